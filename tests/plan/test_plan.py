from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.batch import BatchPlan
from slurm_train.config.compose import Composed, Point
from slurm_train.config.frozen import config_hash
from slurm_train.errors import BatchError, ConfigError
from slurm_train.plan.plan import RunPlan, SweepPlan, check_path, plan_sweep
from slurm_train.plan.preview import plan_rows
from slurm_train.rundir.lookup import run_of_hash
from tests.support.plans import DEFAULTS, composed, make_plan, render_script
from tests.support.refusals import refusal

CLUSTER = {"nodes": 4, "gpus_per_node": 8}


def test_a_plan_holds_everything_that_is_decided(tmp_path: Path) -> None:
    plan = make_plan(
        tmp_path,
        cluster=CLUSTER,
        optim={"lr": 1e-3, "lr_retune": "linear", "lr_global_size": 32},
        train={"max_steps": 400},
        requeue={"enabled": False},
    )
    assert plan.run.path == tmp_path / "runs" / "gpt-stdlib" / plan.config_hash[:12]
    assert plan.record.as_json() == {
        "config_hash": plan.config_hash,
        "directory": str(tmp_path),
        "path": str(plan.run.path),
        "world": {"size": 32, "ranks_per_node": [8, 8, 8, 8]},
        "layout": {"dp_replicate": 32},
        "batch": {"ranks": 32, "global_size": 64, "local_size": 2, "accumulation": 1},
        "lr": {"planned": 2e-3, "configured": 1e-3, "retune": "linear", "tuned_for_global_size": 32},
        "max_steps": 400,
        "samples": 25600,
        "requeue": {"enabled": False},
    }


def test_the_same_run_keeps_its_folder_at_another_size(tmp_path: Path) -> None:
    here = make_plan(tmp_path, run={"processes": 2})
    there = make_plan(tmp_path, cluster=CLUSTER)
    assert here.run == there.run
    assert (here.batch.accumulation, there.batch.accumulation) == (1, 1)
    assert (here.batch.local_size, there.batch.local_size) == (32, 2)


PLACES = [
    ({}, "/home/user/project/runs/gpt-stdlib"),
    ({"root": "../all", "name": "mine"}, "/home/user/all/mine"),
    ({"root": "~/runs"}, f"{Path.home()}/runs/gpt-stdlib"),
]


def test_a_path_through_a_link_stays_as_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "auto" / "proj").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "home").symlink_to("auto")
    (tmp_path / "auto" / "proj" / "out").symlink_to(tmp_path / "elsewhere")
    cwd = tmp_path / "home" / "proj"
    for root, folder in (
        (f"{cwd}/runs", f"{cwd}/runs"),
        ("runs", f"{cwd}/runs"),
        ("./a/../runs", f"{cwd}/runs"),
        ("out", f"{cwd}/out"),
        # Without the link this would be another place.
        ("out/../runs", f"{tmp_path}/runs"),
    ):
        plan = make_plan(cwd, run={"root": root, "name": "n"})
        assert str(plan.run.path.parent.parent) == folder, root
        assert plan.directory == str(cwd) and plan.record.path == str(plan.run.path)


@pytest.mark.parametrize(("section", "folder"), PLACES)
def test_where_a_run_lies(section: dict[str, str], folder: str) -> None:
    assert str(make_plan(run=section).run.path.parent) == folder


def test_a_script_that_no_python_reads_is_refused_before_the_queue(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for text, said in (
        ("import os\nfor x in (1:\n    pass\n", "SyntaxError in line 2: "),
        ("if True:\n    a = 1\n   b = 2\n", "IndentationError in line 3: unindent does not match"),
        ("return 1\n", "SyntaxError in line 1: 'return' outside function: return 1"),
    ):
        script.write_text(text)
        with pytest.raises(ConfigError, match=f"script=train.py: {said}"):
            make_plan(tmp_path, script=["train.py"])
    # Another Python may read it, and odd text in a string is its own affair.
    make_plan(tmp_path, script=["train.py"], cluster={**CLUSTER, "python": "/opt/python"})
    script.write_text(r'print("\d")')
    make_plan(tmp_path, script=["train.py"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"run": {"root": "$SCRATCH/runs"}}, "run.root=$SCRATCH/runs begins with a variable"),
    ({"batch": {"global_size": 31}, "cluster": CLUSTER}, "batch.global_size=31 has no sample for each of 32 ranks"),
    ({"script": ["a.sh"], "task": {"_target_": "m.f"}}, "script and task are both set"),
    ({"script": []}, "script=[] names no file"),
    (
        {"data": {"_target_": "m.Data", "document_mask": True}, "parallel": {"cp": 2}},
        "data.document_mask=true was asked with parallel.cp=2",
    ),
    ({"script": ["nowhere.py"]}, "script=nowhere.py: there is no such file in /home/user/project"),
    *(
        ({"script": words}, f"script={words[0]} starts ranks, and this program starts one per GPU already")
        for words in (
            ["/opt/bin/torchrun", "--nproc_per_node=8", "-m", "pkg"],
            ["accelerate", "launch", "train.py"],
            ["srun", "train.py"],
        )
    ),
    ({"model": None}, "model has no _target_: there is nothing to build"),
    ({"data": {"_target_": ""}}, "data has no _target_: there is nothing to build"),
    ({"ddp": {"static_graph": True, "find_unused_parameters": True}}, "ddp.find_unused_parameters=true looks for"),
    *(
        (
            {"train": {"precision": "fp8"}, "cluster": {"nodes": 1, "gpus_per_node": 2, **cluster}},
            f"train.precision=fp8 needs GPUs with float8 products; requested: {requested}",
        )
        for cluster, requested in (
            *(({"gpu_type": name}, name) for name in ("A100-SXM4-40GB", "2080ti")),
            ({"gpu_flag": "none"}, "none"),
        )
    ),
    *(
        (
            {"train": {"param_dtype": "bfloat16", **train}, **sections},
            f"{asked} was asked, but train.param_dtype=bfloat16 has parameters and gradients of two bytes each",
        )
        for train, sections, asked in (
            ({"precision": "float32"}, {}, "train.precision=float32"),
            ({}, {"parallel": {"gather_dtype": "float32"}}, "parallel.gather_dtype=float32"),
            ({}, {"ddp": {"comm": "bf16"}}, "ddp.comm=bf16"),
        )
    ),
    *(
        ({"requeue": {"warm_ranks": True}, **sections}, "requeue.warm_ranks=true needs the trainer, equal nodes and")
        for sections in (
            {"cluster": {"nodes": 2, "gpus_per_node": [4, 2]}},
            {"cluster": {"nodes": 2, "launcher": "torchrun"}},
        )
    ),
    ({"parallel": {"dp_shard": -1}}, "parallel asks for dp_replicate -1 x dp_shard -1"),
    *(
        ({"run": {"name": name}}, f"run.name={name!r} cannot be the name of a folder and of a job")
        for name in ("", "a b", "a/b", "..", ".hidden", "-flag", "a\nb", "\u00e9", "a;b", "$x", "a%j")
    ),
    *(
        ({"run": {"root": root}}, f"run.root={root!r} has a character that Slurm reads as a pattern")
        for root in ("/a%j", "/a\\b", "/a\nb", "/a\tb", "/a\x7f")
    ),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_a_plan_that_cannot_be_carried_out_is_refused(sections: dict[str, Any], message: str) -> None:
    error = refusal(ConfigError, make_plan, **sections)
    assert error.message.startswith(message)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "sections",
    [
        {"run": {"root": "/tmp/{attempt}/runs"}},
        {"run": {"root": "/tmp/%j/runs"}},
        {"run": {"root": "/tmp/a\u2028b"}},
        {"script": ["train.py", "a\0b"]},
        {"script": ["train.py", "a\udc80b"]},
        {"data": {"_target_": "my.Data", "path": "\ud800"}},
        {"cluster": {"export": ["A=b"]}},
        {"cluster": {"export": ["ALL"]}},
        {"cluster": {"env": {"CUDA_VISIBLE_DEVICES": "0"}}},
        {"cluster": {"export": ["PATH", "NONE"]}},
        {"cluster": {"export": ["A,B"]}},
    ],
    ids=ascii,
)
def test_what_could_not_arrive_as_it_was_given_is_refused(sections: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError):
        make_plan(tmp_path, **sections)


def test_a_folder_that_the_locale_cannot_name_is_refused_with_the_locale_as_the_reason() -> None:
    error = refusal(ConfigError, check_path, "run.root", "/home/\udcc3\udcbc/runs")
    assert "no text under the locale of this shell" in error.message
    assert error.hint == "export LC_ALL=C.UTF-8"


def elastic(**sections: Any) -> RunPlan:
    return make_plan(cluster={"nodes": "2-4", "gpus_per_node": 2, "launcher": "torchrun"}, **sections)


def test_a_range_of_nodes_keeps_one_global_batch_on_any_number_of_nodes() -> None:
    plan = elastic(batch={"default_global_size": 60})
    assert plan.batch == BatchPlan.equal(local_size=8, ranks=8, accumulation=1)
    assert plan.record.as_json()["world"] == {"size": 8, "ranks_per_node": [2, 2, 2, 2], "num_nodes": [2, 3, 4]}
    assert elastic(batch={"local_size": 3, "accumulation": 2}).batch.global_size == 48
    assert elastic(batch={"global_size": 65}).batch.global_size == 65


def test_a_number_of_nodes_that_cannot_share_the_batch_is_refused_before_it_is_granted() -> None:
    with pytest.raises(BatchError, match=r"Slurm may grant 3 nodes x 2: a pipeline of 2 stages") as caught:
        elastic(batch={"global_size": 64}, parallel={"pp": 2}, model={**DEFAULTS["model"], "tied": False})
    assert caught.value.hint == "set batch.global_size=48 or 72, or another range of cluster.nodes"


# --- a sweep ---

CWD = Path("/home/user/project")


def sweep_of(*sections: dict[str, Any]) -> SweepPlan:
    points = [Point((), {"n": str(index)}) for index in range(len(sections))]

    def configs() -> Iterator[Composed]:
        for one in sections:
            yield composed(**one)

    return plan_sweep(points, configs(), cwd=CWD, env={})


def test_the_same_runs_are_the_same_sweep_in_any_order() -> None:
    one, other = sweep_of({"seed": 1}, {"seed": 2}), sweep_of({"seed": 2}, {"seed": 1})
    assert one.sweep == other.sweep
    assert one.sweep != sweep_of({"seed": 1}, {"seed": 3}).sweep
    assert one.sweep != sweep_of({"seed": 1, "run": {"name": "x"}}, {"seed": 2, "run": {"name": "x"}}).sweep


def test_a_sweep_over_a_key_that_the_script_does_not_get_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    points = [Point((), {"optim.lr": "1"}), Point((), {"optim.lr": "2"})]
    compositions = [replace(composed(script=["train.py"], model=None), unused_keys=("optim.lr",)) for _ in points]
    err = refusal(ConfigError, plan_sweep, points, iter(compositions), cwd=tmp_path, env={})
    assert err.message.startswith("optim.lr is swept") and "'script=[train.py,--lr,${optim.lr}]'" in err.hint


NO_SWEEPS: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"seed": 1}, {"seed": 2}, {"seed": 1, "cluster": None, "checkpoint": {"keep": 5}}],
        "runs 0 and 2 of the sweep have the same configuration: n=0, and n=2",
    ),
    ([{"seed": 1}, {"seed": 2, "cluster": {"nodes": 1}}], "some runs of the sweep ask for a cluster and some do not"),
    ([{"run": {"root": "a"}}, {"run": {"root": "b"}}], "the runs of one sweep have several roots: a, b"),
    ([{"sweep": {"max_parallel": 1}}, {"seed": 2}], "sweep.max_parallel differs"),
    ([{"launch": "interactive"}, {"seed": 2, "launch": "interactive"}], "launch=interactive waits for one run"),
    ([{"sweep": {"pack": 2}}, {"seed": 2}], "sweep.pack differs"),
    ([{"sweep": {"runs_per_gpu": 2}}, {"seed": 2}], "sweep.runs_per_gpu differs"),
    ([{"seed": 1, "sweep": {"pack": 2}}, {"seed": 2, "sweep": {"pack": 2}}], "sweep.pack=2 puts runs into one Slurm"),
    ([{}, {"script": []}], "run 1 (n=1): script=[] names no file"),
]


def test_a_value_that_is_given_twice_is_no_second_run() -> None:
    points = [Point((), {"seed": "1"}), Point((), {"seed": "1"})]
    err = refusal(ConfigError, plan_sweep, points, iter([composed(seed=1), composed(seed=1)]), cwd=CWD, env={})
    assert err.message.endswith("have the same configuration: seed=1, and seed=1")
    assert err.hint == 'give each value once; to train it several times, sweep the seed: "seed=range(3)"'


@pytest.mark.parametrize(("sections", "message"), NO_SWEEPS)
def test_what_cannot_be_one_sweep_is_refused(sections: list[dict[str, Any]], message: str) -> None:
    assert refusal(ConfigError, sweep_of, *sections).message.startswith(message)


NOT_PACKED: list[tuple[dict[str, Any], str]] = [
    ({"cluster": {"nodes": 2}}, "sweep.pack=2 shares one node among runs, and gpt-stdlib/"),
    ({"cluster": {"spare_nodes": 1}}, "sweep.pack=2 shares one node among runs, and gpt-stdlib/"),
    ({"requeue": {"warm_ranks": True}}, "sweep.pack=2 shares one node among runs, each with its own CPUs"),
    ({"cluster": {"sbatch": {"gres": "gpu:2"}}}, "sweep.pack=2 shares one node among runs, and cluster.sbatch.gres"),
    ({"sweep": {"pack": 2, "max_parallel": 1}}, "sweep.max_parallel=1 is fewer than the runs of one job, sweep.pack=2"),
    ({"sweep": {"runs_per_gpu": 2}}, "sweep.runs_per_gpu=2 lets runs of one job share a GPU, and a job has 1 run"),
    ({"sweep": {"pack": 2, "runs_per_gpu": 3}}, "sweep.runs_per_gpu=3 lets runs of one job share a GPU, and a job has"),
    (
        {"sweep": {"pack": 2, "runs_per_gpu": 2}, "cluster": {"gpu_flag": "none"}},
        "sweep.runs_per_gpu=2 lets runs of one job share a GPU, and cluster.gpu_flag=none asks for no GPU",
    ),
    (
        {"sweep": {"pack": 2, "runs_per_gpu": 2}, "cluster": {"gpus_per_node": 2}},
        "sweep.runs_per_gpu=2 lets runs of one job share a GPU, and gpt-stdlib/",
    ),
]


@pytest.mark.parametrize(("sections", "message"), NOT_PACKED)
def test_what_cannot_share_a_job_is_refused(sections: dict[str, Any], message: str) -> None:
    packed = {
        "sweep": {"pack": 2},
        **sections,
        "cluster": {"nodes": 1, "gpus_per_node": 1, **sections.get("cluster", {})},
    }
    assert refusal(ConfigError, sweep_of, {"seed": 1, **packed}, {"seed": 2, **packed}).message.startswith(message)


def test_runs_of_one_node_share_jobs() -> None:
    packed = {"sweep": {"pack": 2, "max_parallel": 2}, "cluster": {"nodes": 1, "sbatch": {"exclusive": True}}}
    assert sweep_of({"seed": 1, **packed}, {"seed": 2, **packed}).pack == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rendezvous_ports": "20100-20000"}, "cluster.rendezvous_ports=20100-20000 is no range"),
        ({"rendezvous_address": "ib0,ib1"}, "cluster.rendezvous_address=ib0,ib1 is neither an interface nor a name"),
        ({"rendezvous_address": "%N:29500"}, "cluster.rendezvous_address=%N:29500 is neither"),
    ],
)
def test_where_no_ranks_can_meet_is_refused(settings: dict[str, str], message: str) -> None:
    assert refusal(ConfigError, make_plan, cluster={**CLUSTER, **settings}).message.startswith(message)


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({}, None),
        ({"network_interface": "ib0"}, "ib0 of rank 0's node"),
        ({"rendezvous_address": "%Ni", "rendezvous_ports": "20000-20100"}, "%Ni, ports 20000-20100"),
        ({"rendezvous_ports": "20000-20100"}, "rank 0's node, ports 20000-20100"),
        ({"network_interface": "ib0", "nodes": 1}, None),
        ({"network_interface": "^lo"}, None),
    ],
)
def test_where_the_ranks_meet_is_a_row_of_the_plan(settings: dict[str, Any], row: str | None) -> None:
    assert dict(plan_rows(make_plan(cluster={**CLUSTER, **settings}))).get("rendezvous") == row


def test_the_ports_that_a_site_opens_travel_into_the_job() -> None:
    script = render_script(make_plan(cluster={**CLUSTER, "rendezvous_ports": "20000-20100"}))
    assert "export SLURM_TRAIN_PORTS=20000-20100" in script


def test_a_run_that_has_begun_with_a_schedule_that_is_refused_now_goes_on(tmp_path: Path) -> None:
    """One of an earlier version, by the same command; by other settings it is refused."""
    sections: dict[str, Any] = {"optim": {"decay_samples": 64}, "train": {"max_steps": 10}}
    with pytest.raises(ConfigError, match=r"optim\.decay_samples=64 was asked with optim\.schedule=cosine"):
        make_plan(tmp_path, **sections)
    root = tmp_path / "runs"
    run_of_hash(root, "gpt-stdlib", config_hash(composed(**sections).config, global_size=64)).path.mkdir(parents=True)
    assert make_plan(tmp_path, **sections).run.path.exists()
