"""What a person has set in the shell for all jobs: taken below words, files and site, or named."""

from __future__ import annotations

import multiprocessing.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import ClusterSection, RunConfig, build_config, to_mapping
from slurm_train.errors import ConfigError
from slurm_train.plan.plan import plan_run
from slurm_train.plan.shell_choices import take_shell_choices
from slurm_train.slurm.flags import OPTIONS
from tests.support.plans import composed, render_script
from tests.support.refusals import refusal

OPEN = tuple(to_mapping(ClusterSection()))
TEXTS = {key: option for key, option in OPTIONS.items() if key != "time_limit_min"}
# Each variable, its value, and the word of the batch script.
TAKEN = [
    *((option.shell, "a,b", f"--{option.flag}=a,b") for option in TEXTS.values() if option.shell),
    ("CONSTRAINT", "a100|h100", "--constraint='a100|h100'"),
    ("TIMELIMIT", "1-12:00", "--time=2160"),
    ("RESERVATION", "course", "--reservation=course"),
    ("WCKEY", "0123", "--wckey=0123"),
    ("EXCLUSIVE", "", "--exclusive"),
    ("EXCLUSIVE", "user", "--exclusive=user"),
    ("CORE_SPEC", "2", "--core-spec=2"),
    ("REQ_SWITCH", "1", "--switches=1"),
    ("GRES_FLAGS", "enforce-binding", "--gres-flags=enforce-binding"),
]
# Sizes, names and outputs that the launch decides, a spelling that sbatch itself would not take, and srun's own.
DROPPED = [
    *({f"SBATCH_{name}": "4"} for name in ("GPUS", "GPUS_PER_NODE", "MEM_PER_NODE", "JOB_NAME", "OUTPUT", "EXPORT")),
    *({f"SBATCH_{name}": "4"} for name in ("ARRAY_INX", "NO_REQUEUE", "SIGNAL", "HINT", "DISTRIBUTION", "WHATEVER")),
    {"SBATCH_TIMELIMIT": "soon"},
    {"SLURM_ACCOUNT": "grant2"},
    {"SLURM_HINT": "nomultithread"},
]


def script(env: dict[str, str], /, *, open_keys: Any = OPEN, **cluster: Any) -> tuple[str, tuple[str, ...]]:
    """Returns the batch script of a run that is typed in a shell with such variables, and what is said of them."""
    launch = cluster.pop("launch", "slurm")
    configuration = composed(cluster={"nodes": 1, "gpus_per_node": 1, **cluster}, launch=launch)
    open_keys = None if open_keys is None else [key for key in open_keys if key not in cluster]
    plan = plan_run(replace(configuration, open_keys=open_keys), cwd=Path("/work"), env=env)
    return render_script(plan), plan.from_shell


@pytest.mark.parametrize(("name", "value", "word"), TAKEN)
def test_a_choice_is_taken_where_nothing_else_decides(name: str, value: str, word: str) -> None:
    for variable, launch in ((f"SBATCH_{name}", "slurm"), (f"SALLOC_{name}", "interactive")):
        text, remarks = script({variable: value}, launch=launch)
        assert f"\n#SBATCH {word}\n" in text
        (remark,) = remarks
        assert remark.startswith(f"{variable}={value} is taken as cluster.")
        assert script({variable: value, "SLURM_JOB_ID": "7"}, launch=launch) == script({}, launch=launch)
        assert script({variable: value}, open_keys=None, launch=launch) == script({}, launch=launch)


@pytest.mark.parametrize(("name", "value", "word"), TAKEN)
def test_a_choice_that_words_files_or_site_decide_otherwise_is_named(name: str, value: str, word: str) -> None:
    flag = word.removeprefix("--").partition("=")[0]
    key = next((key for key, option in OPTIONS.items() if option.flag == flag), None)
    set_otherwise: dict[str, Any] = {key: 5 if flag == "time" else "other"} if key else {"sbatch": {flag: "other"}}
    text, remarks = script({f"SBATCH_{name}": value}, **set_otherwise)
    assert text == script({}, **set_otherwise)[0]
    (remark,) = remarks
    assert remark.startswith(f"SBATCH_{name}={value} is not used: cluster.")


def test_a_key_that_is_set_to_null_stays_so() -> None:
    text, remarks = script({"SBATCH_ACCOUNT": "grant2"}, account=None)
    assert "--account" not in text and remarks == ("SBATCH_ACCOUNT=grant2 is not used: cluster.account=null is set",)


@pytest.mark.parametrize("env", DROPPED, ids=lambda env: next(iter(env)))
def test_every_other_choice_is_named_as_dropped(env: dict[str, str]) -> None:
    ((name, value),) = env.items()
    text, remarks = script(env)
    assert text == script({})[0] and f"{name}={value} is not used" in " ".join(remarks)


def test_a_run_that_exists_keeps_what_it_has_and_names_what_it_drops() -> None:
    config = build_config(RunConfig, {"cluster": {"nodes": 1, "gpus_per_node": 1, "qos": "low"}})
    env = {"SBATCH_ACCOUNT": "grant2", "SBATCH_RESERVATION": "course", "SBATCH_QOS": "low", "SBATCH_GPUS": "4"}
    kept, remarks = take_shell_choices(config, None, env)
    assert kept == config
    assert [remark.partition(" is not used")[0] for remark in remarks] == [
        "SBATCH_ACCOUNT=grant2",
        "SBATCH_GPUS=4",
        "SBATCH_RESERVATION=course",
    ]


def test_a_choice_that_is_what_the_run_has_is_not_worth_a_word() -> None:
    env = {"SBATCH_ACCOUNT": "a", "SLURM_ACCOUNT": "a", "SBATCH_TIMELIMIT": "1:00:00", "SBATCH_WCKEY": "w"}
    given: dict[str, Any] = {"account": "a", "time_limit_min": 60, "sbatch": {"wckey": "w"}}
    assert script(env, **given) == script({}, **given)
    assert script({"SBATCH_DEBUG": "1", "SLURM_CONF": "/etc/s", "SBATCH_QOS": "", "SALLOC_QOS": "x"}) == script({})


def test_a_run_that_stays_here_takes_nothing() -> None:
    config = build_config(RunConfig, {"launch": "local"})
    assert take_shell_choices(config, OPEN, {"SBATCH_ACCOUNT": "a"}) == (config, ())


def test_a_folder_for_temporary_files_that_is_too_long_for_sockets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(multiprocessing.util, "_get_base_temp_dir", raising=False)
    long = {"TMPDIR": "/scratch/" + "a" * 90}
    (remark,) = script(long)[1]
    assert "TMPDIR has 99 characters" in remark
    for env, cluster in (
        ({"TMPDIR": "/tmp"}, {}),
        (long, {"env": {"TMPDIR": "/tmp"}}),
        (long, {"setup": ["export TMPDIR=/tmp/$SLURM_JOB_ID"]}),
        ({**long, "SLURM_JOB_ID": "7"}, {}),
    ):
        assert script(env, **cluster)[1] == ()


@pytest.mark.parametrize(
    ("site", "cluster", "is_named"),
    [
        ("ALL", {}, True),
        ("NONE", {}, False),
        ("ALL", {"sbatch": {"propagate": "NONE"}}, False),
        ("NONE", {"sbatch": {"propagate": True}}, True),
        ("ALL", {"setup": ["ulimit -t unlimited"]}, False),
        ("ALL", {"time_limit_min": 60, "cpus_per_gpu": 1}, False),
        ("ALL", {"time_limit_min": 60, "cpus_per_gpu": 2}, True),
        # Slurm does not say what it passes on.
        ("", {}, False),
    ],
)
def test_a_limit_that_travels_into_the_job_is_named(
    site: str, cluster: dict[str, Any], is_named: bool, tmp_path: Path
) -> None:
    answer = f"echo 'PropagateResourceLimits = {site}'" if site else "exit 1"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
    (tmp_path / "scontrol").chmod(0o755)
    config = build_config(RunConfig, {"cluster": {"nodes": 1, "gpus_per_node": 1, **cluster}})
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    _, remarks = take_shell_choices(config, OPEN, env, limits={"CPU": 3600, "NPROC": 4096})
    assert ["(ulimit -t)" in remark for remark in remarks] == [True] * is_named
    assert take_shell_choices(config, OPEN, env, limits={"NPROC": 4096})[1] == ()
    assert take_shell_choices(config, OPEN, {**env, "SLURM_JOB_ID": "7"}, limits={"CPU": 3})[1] == ()


# Every key with the word of the script that it stands for.
FLAGS = {
    **{key: ("0123", f"--{option.flag}=0123") for key, option in TEXTS.items()},
    "time_limit_min": (90, "--time=90"),
    "nodelist": ("node[1-2]", "--nodelist='node[1-2]'"),
    "constraint": ("x&y", "--constraint='x&y'"),
    "cpus_per_gpu": (4, "--cpus-per-task=4"),
    "memory_gb_per_node": (10, "--mem=10G"),
    "memory_gb_per_gpu": (10, "--mem=10G"),
    "gpu_type": ("a100", "--gpus-per-node=a100:1"),
    "sbatch": ({"reservation": "r", "licenses": "x:1"}, "--licenses=x:1"),
    "srun": ({"mpi": "pmix"}, "--mpi=pmix"),
    "env": ({"A": "0123"}, "export A=0123"),
    "setup": (["module load x"], "module load x"),
    "python": ("/opt/python", "exec /opt/python"),
}


@pytest.mark.parametrize("key", FLAGS)
def test_every_key_reaches_the_script(key: str) -> None:
    value, word = FLAGS[key]
    text, _ = script({}, **{key: value})
    assert re.search(rf"(^|\s){re.escape(word)}(\s|$)", text)


@pytest.mark.parametrize("flag", [*TEXTS, "part", "mem"])
def test_a_flag_does_not_replace_another_value_of_a_key(flag: str) -> None:
    key = {"part": "partition", "mem": "memory_gb_per_node"}.get(flag, flag)
    value: Any = 10 if flag == "mem" else "a"
    error = refusal(ConfigError, script, {}, **{key: value, "sbatch": {flag: "b"}})
    assert f"cluster.sbatch.{flag} for b" in error.message and f"cluster.{key}=" in error.hint
    assert f"--{flag}=b" in script({}, sbatch={flag: "b"})[0]


def test_two_amounts_of_memory_are_refused() -> None:
    error = refusal(ConfigError, script, {}, memory_gb_per_node=10, memory_gb_per_gpu=2)
    assert "both give the memory" in error.message
