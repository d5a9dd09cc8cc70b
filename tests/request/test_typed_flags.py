"""Flags typed for sbatch and srun: what the launch decides is refused, and the GPUs of a job stay its GPUs.

Values of `--gres` were tried on Slurm 22.05: a later one replaces an earlier one, and a step with one of its own has
nothing else of its job's.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from slurm_train.config.words import split_word
from slurm_train.errors import ConfigError
from slurm_train.request.batch_script import sbatch_components, srun_flags
from tests.support.plans import make_plan
from tests.support.refusals import refusal

PROTECTED = [
    ("sbatch", "nodes", "use cluster.nodes instead"),
    ("sbatch", "gpus-per-task", "use cluster.gpus_per_node instead"),
    ("sbatch", "tres_per_task", "use cluster.gpus_per_node and cluster.cpus_per_gpu instead"),
    ("sbatch", "wait", "drop cluster.sbatch.wait"),
    ("srun", "output", "drop cluster.srun.output"),
    # Slurm takes a long name cut short as well.
    ("sbatch", "gpus-per-t", "use cluster.gpus_per_node instead"),
    ("srun", "outp", "drop cluster.srun.outp"),
]


def flags_of(**cluster: Any) -> tuple[list[dict[str, str | bool]], dict[str, str | bool]]:
    per_node = cluster.get("gpus_per_node", 1)
    ranks = sum(per_node) if isinstance(per_node, list) else per_node
    plan = make_plan(cluster=cluster, batch={"global_size": 24 * ranks})
    return sbatch_components(plan), srun_flags(plan)


@pytest.mark.parametrize(("section", "flag", "hint"), PROTECTED)
def test_flags_that_the_launch_decides_are_refused_with_the_key_to_use(section: str, flag: str, hint: str) -> None:
    error = refusal(ConfigError, flags_of, **{section: {flag: "1"}})
    assert error.message == f"cluster.{section}.{flag} would break the launch, which sets it itself"
    assert error.hint == hint


@pytest.mark.parametrize("section", ["sbatch", "srun"])
@pytest.mark.parametrize("flag", ["clusters", "cluster", "cluster-constraint"])
def test_another_cluster_is_refused(section: str, flag: str) -> None:
    text = f"cluster.{section}.{flag}=gpu2 sends the job to another cluster"
    with pytest.raises(ConfigError, match=re.escape(text)) as caught:
        flags_of(**{section: {flag: "gpu2"}})
    assert "log in to a login node of that cluster" in caught.value.hint


JOINED = [
    ({"gpu_flag": "gres"}, "nvme:10", "gpu:2,nvme:10"),
    ({"gpu_flag": "gres", "gpu_type": "v100"}, "nvme:10,tmpdisk:5", "gpu:v100:2,nvme:10,tmpdisk:5"),
    ({"gpu_flag": "gres"}, "gpu:2,nvme:10", "gpu:2,nvme:10"),
    ({"gpu_flag": "gres"}, "gpu:a100:1,gpu:v100:1", "gpu:a100:1,gpu:v100:1"),
    ({"gpu_flag": "gres"}, "gres/gpu:2", "gres/gpu:2"),
    # A name that begins alike is another resource.
    ({"gpu_flag": "gres"}, "gpu_mem:40", "gpu:2,gpu_mem:40"),
    ({"gpu_flag": "gpus-per-node"}, "nvme:10", "nvme:10"),
    ({"gpu_flag": "gpus-per-task"}, "nvme:10", "nvme:10"),
    ({"gpu_flag": "none"}, "gpu:4", "gpu:4"),
]


@pytest.mark.parametrize(("keys", "typed", "gres"), JOINED)
@pytest.mark.parametrize("section", ["sbatch", "srun"])
def test_other_resources_leave_the_job_and_its_steps_their_gpus(
    section: str, keys: dict[str, Any], typed: str, gres: str
) -> None:
    (job,), step = flags_of(gpus_per_node=2, **keys, **{section: {"gres": typed}})
    assert (job if section == "sbatch" else step)["gres"] == gres


def test_each_component_of_an_uneven_job_has_its_gpus_beside_other_resources() -> None:
    uneven: dict[str, Any] = {"nodes": 2, "gpus_per_node": [2, 1], "gpu_flag": "gres"}
    components, _ = flags_of(**uneven, sbatch={"gres": "nvme:10"})
    assert [component["gres"] for component in components] == ["gpu:2,nvme:10", "gpu:1,nvme:10"]
    # srun takes one value for all of them.
    assert "cluster.gpu_flag=gpus-per-node" in refusal(ConfigError, flags_of, **uneven, srun={"gres": "nvme:5"}).hint


@pytest.mark.parametrize(
    ("keys", "srun", "hint"),
    [
        ({}, {"distribution": "cyclic"}, "block:cyclic"),
        ({}, {"distribution": "plane=2"}, "block:cyclic"),
        ({"spare_nodes": 1}, {"nodelist": "node1"}, "cluster.nodelist"),
    ],
)
def test_ranks_stay_where_the_launch_counts_them(keys: dict[str, Any], srun: dict[str, Any], hint: str) -> None:
    assert hint in refusal(ConfigError, flags_of, nodes=2, gpus_per_node=2, **keys, srun=srun).hint


@pytest.mark.parametrize("distribution", ["block", "block:cyclic", "block:fcyclic,Pack", "*:block"])
def test_the_ranks_of_a_node_may_be_spread_over_its_sockets(distribution: str) -> None:
    assert flags_of(nodes=2, srun={"distribution": distribution})[1]["distribution"] == distribution


TWICE = [
    ({"gpus_per_node": 2}, {"sbatch": {"gres": "gpu:4"}}),
    ({"gpus_per_node": 2}, {"sbatch": {"gres": "gpu"}}),
    ({"gpus_per_node": 2, "gpu_flag": "gres"}, {"sbatch": {"gres": "gpu:a100:4,nvme:10"}}),
    ({"gpus_per_node": 2, "gpu_flag": "gres", "gpu_type": "v100"}, {"sbatch": {"gres": "gpu:2"}}),
    ({"gpus_per_node": 2}, {"srun": {"gpus-per-node": "1"}}),
    ({"gpus_per_node": 2, "gpu_flag": "gres"}, {"srun": {"gres": "gpu:1"}}),
    ({"memory_gb_per_node": 32}, {"sbatch": {"mem": "64G"}}),
    ({"memory_gb_per_node": 32}, {"sbatch": {"mem": "65536"}}),
    ({"memory_gb_per_node": 32}, {"sbatch": {"mem": "100M"}}),
    ({"memory_gb_per_gpu": 32}, {"sbatch": {"mem": "64G"}}),
    ({"memory_gb_per_node": 32}, {"sbatch": {"mem-per-cpu": "4G"}}),
    ({"memory_gb_per_node": 32}, {"sbatch": {"mem-per-gpu": "1T"}}),
    ({"partition": "gpu"}, {"sbatch": {"part": "big"}}),
]


@pytest.mark.parametrize(("keys", "typed"), TWICE)
def test_what_is_asked_twice_is_refused_and_the_hint_is_accepted(keys: dict[str, Any], typed: dict[str, Any]) -> None:
    ((section, flags),) = typed.items()
    hint = refusal(ConfigError, flags_of, **keys, **typed).hint
    settings = {key.removeprefix("cluster."): value for key, value in _settings_of(hint).items()}
    rest = settings.pop(f"{section}.gres", "")
    followed = {**keys, **settings, section: {"gres": rest} if rest else {}}
    components, _ = flags_of(**followed)
    # What was wanted is what is asked for now.
    wanted = {"gpu:4": "4", "gpu": "1", "64G": "64G", "65536": "64G", "1T": "1024G", "big": "big"}
    (value,) = flags.values()
    if value in wanted:
        assert wanted[value] in components[0].values()


def _settings_of(hint: str) -> dict[str, Any]:
    """Returns the settings that a hint says, by key; numbers as numbers."""
    settings: dict[str, Any] = {}
    for word in re.findall(r"cluster\.[\w.]+=[^\s;]+", hint):
        _, key, text = split_word(word.rstrip(","))
        settings[key] = None if text == "null" else int(text) if str(text).isdigit() else text
    return settings


@pytest.mark.parametrize("section", ["sbatch", "srun"])
@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("ALL", "\"cluster.export=['*']\""),
        ("ALL,MY_LR=3", "cluster.env.MY_LR=3"),
        ("MY_LR,DATA", "cluster.export=[MY_LR,DATA]"),
        ("NONE", "leave cluster.export out"),
    ],
)
def test_an_export_of_slurms_is_answered_with_the_keys_that_export(section: str, value: str, hint: str) -> None:
    assert hint in refusal(ConfigError, flags_of, **{section: {"export": value}}).hint
