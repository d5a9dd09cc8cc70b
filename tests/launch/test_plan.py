from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.batch import BatchPlan
from slurm_train.errors import BatchError, ConfigError
from slurm_train.launch.plan import RunPlan
from tests.support.plans import make_plan

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
    assert plan.as_json() == {
        "config_hash": plan.config_hash,
        "directory": str(tmp_path),
        "world": {"size": 32, "ranks_per_node": [8, 8, 8, 8]},
        "layout": {"dp_replicate": 32},
        "batch": {"ranks": 32, "global_size": 64, "local_size": 2, "accumulation": 1},
        "lr": {"planned": 2e-3, "configured": 1e-3, "retune": "linear", "tuned_for_global_size": 32},
        "max_steps": 400,
        "samples": 25600,
        "requeue": {"enabled": False, "strategy": "scontrol requeue incomplete"},
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
    ({"root": "/scratch/x"}, "/scratch/x/gpt-stdlib"),
    ({"root": "~/runs"}, f"{Path.home()}/runs/gpt-stdlib"),
]


@pytest.mark.parametrize(("section", "folder"), PLACES)
def test_where_a_run_lies(section: dict[str, str], folder: str) -> None:
    assert str(make_plan(run=section).run.path.parent) == folder


def test_a_script_or_task_is_called_after_its_file_or_function(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "train.py").write_text("")
    script = make_plan(tmp_path, script=["jobs/train.py", "--flag"], cluster=CLUSTER)
    assert script.run.name == "train"
    assert script.batch.global_size == 32, "its batch is its own affair; ours must not refuse anything"
    task = make_plan(tmp_path, task={"_target_": "my_package.main"}, cluster={"nodes": 3, "gpus_per_node": 5})
    assert (task.run.name, task.world.size) == ("main", 15)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"batch": {"global_size": 65}, "cluster": CLUSTER}, "batch.global_size=65 cannot be split over 32 ranks"),
    ({"script": ["a.sh"], "task": {"_target_": "m.f"}}, "script and task are both set"),
    ({"script": []}, "script=[] names no file"),
    ({"script": ["nowhere.py"]}, "script=nowhere.py: there is no such file in /home/user/project"),
    ({"task": {"x": 1}}, "task has no _target_: there is nothing to build"),
    ({"model": {"width": 3}}, "model has no _target_: there is nothing to build"),
    ({"model": None}, "model has no _target_: there is nothing to build"),
    ({"data": {"_target_": ""}}, "data has no _target_: there is nothing to build"),
    ({"parallel": {"dp_shard": -1}}, "parallel.dp_replicate=-1 and parallel.dp_shard=-1 are both left open"),
    *(
        ({"run": {"name": name}}, f"run.name={name!r} cannot be the name of a folder and of a job")
        for name in ("", "a b", "a/b", "..", ".hidden", "-flag", "a\nb", "\u00e9", "a;b", "$x", "a%j")
    ),
    *(
        ({"run": {"root": root}}, f"run.root={root!r} has a character that Slurm reads as a pattern")
        for root in ("/a%j", "/a\\b", "/a\nb", "/a\tb", "/a\x7f")
    ),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED, ids=[str(sections) for sections, _ in REFUSED])
def test_a_plan_that_cannot_be_carried_out_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(**sections)
    assert caught.value.message.startswith(message)
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_null_counts_mean_never() -> None:
    plan = make_plan(train={"eval_every_steps": None}, checkpoint={"every_steps": None})
    assert plan.config.checkpoint.every_steps is None


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
        {"cluster": {"export": ["A,B"]}},
    ],
    ids=ascii,
)
def test_what_could_not_arrive_as_it_was_given_is_refused(sections: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigError):
        make_plan(tmp_path, **sections)


def elastic(**sections: Any) -> RunPlan:
    return make_plan(cluster={"nodes": "2-4", "gpus_per_node": 2, "launcher": "torchrun"}, **sections)


def test_a_range_of_nodes_keeps_one_global_batch_that_each_number_can_share() -> None:
    plan = elastic(batch={"default_global_size": 60})
    assert plan.batch == BatchPlan(local_size=6, ranks=8, accumulation=1)
    assert plan.as_json()["world"] == {"size": 8, "ranks_per_node": [2, 2, 2, 2], "min_nodes": 2}
    assert elastic(batch={"local_size": 3, "accumulation": 2}).batch.global_size == 48


@pytest.mark.parametrize("batch", [{"global_size": 64}, {"local_size": 1}])
def test_a_number_of_nodes_that_cannot_share_the_batch_is_refused_before_it_is_granted(batch: dict[str, int]) -> None:
    with pytest.raises(
        BatchError, match=r"Slurm may grant \d nodes x 2: batch.global_size=.* cannot be split"
    ) as caught:
        elastic(batch=batch)
    sizes = "48 or 72" if batch == {"global_size": 64} else "24"
    assert caught.value.hint == f"set batch.global_size={sizes}, or another range of cluster.nodes"
