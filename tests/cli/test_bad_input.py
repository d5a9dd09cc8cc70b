"""Bad input: a clear text on stderr, exit code 2, nothing written, nothing submitted."""

from __future__ import annotations

from typing import Any

import pytest

BAD = [
    ("an unknown key", ["optim.lrr=3e-4"], "there is no configuration key 'optim.lrr'"),
    ("an unknown key of a model", ["model.widht=3"], "did you mean model.width"),
    ("an unknown key of a cluster", ["+cluster=4x8", "cluster.nods=3"], "did you mean cluster.nodes"),
    ("a model of transformers without a name", ["model=hf"], "model.model_type=None and model.path=None; it takes one"),
    (
        "a directory without a model",
        ["+cluster=4x8", "model=hf", "model.path=llama"],
        "model.path=llama: there is no llama/config.json",
    ),
    ("weights that are not there", ["train.init_from=nowhere"], "train.init_from=nowhere is not there"),
    ("an unknown option", ["model=gptt"], "there is no configuration 'model/gptt'"),
    ("a wrong type", ["optim.lr=fast"], "optim.lr asks for a number, found 'fast'"),
    ("an unknown flag", ["--foo"], "there is no flag '--foo'"),
    ("a sweep of nothing", ["-m", "seed=range(0)"], "seed=range(0) gives no value: the sweep is empty"),
    ("a planned sweep of nothing", ["plan", "-m", "seed=range(3,3)"], "gives no value: the sweep is empty"),
    ("a sweep of an interval", ["-m", "optim.lr=interval(0,1)"], "optim.lr=interval(0,1): an interval names no points"),
    ("a sweep that Hydra cannot read", ["-m", "seed=choice("], "'seed=choice(' cannot be read"),
    ("a key swept twice", ["-m", "seed=1,2", "seed=3,4"], "seed is swept by two words"),
    ("a sweep with a slip of the pen", ["-m", "seed=range(1000000)"], "1000000 = 1,000,000 runs in one sweep"),
    (
        "runs that are the same",
        ["-m", "seed=3", "train.log_every_steps=1,2"],
        "runs 0 and 1 of the sweep train the same: train.log_every_steps=1, and train.log_every_steps=2",
    ),
    ("a sweep with an impossible run", ["-m", "+cluster=1x8", "seed=1,2", "batch.global_size=32,33"], "run 1 (seed=1"),
    ("a sweep of a wrong value", ["-m", "optim.lr=1,x"], "run 1 (optim.lr=x): optim.lr asks for a number, found 'x'"),
    ("runs with several roots", ["-m", "run.root=a,b", "seed=1,2"], "have several roots: a, b"),
    ("several limits", ["-m", "sweep.max_parallel=1,2", "seed=1"], "sweep.max_parallel"),
    ("no limit", ["-m", "sweep.max_parallel=0", "seed=1,2"], "sweep.max_parallel must be at least 1, got 0"),
    ("waiting for one run", ["--wait"], "--wait waits for the runs of a sweep"),
    ("the ranks of what would run", ["--ranks"], "--ranks prints where the ranks would run"),
    ("the ranks of a sweep", ["plan", "-m", "--ranks", "seed=1,2"], "--ranks is for one run"),
    ("a config dir that is not there", ["--config-dir", "nowhere"], "'nowhere' is not a directory"),
    ("an impossible batch", ["+cluster=4x8", "batch.global_size=65"], "set batch.global_size=64 or 96"),
    (
        "an impossible batch, planned",
        ["plan", "+cluster=4x8", "batch.global_size=65"],
        "set batch.global_size=64 or 96",
    ),
    ("no steps", ["train.max_steps=0"], "train.max_steps must be at least 1, got 0"),
    ("a size without nodes", ["+cluster=0x8"], "write +cluster=<nodes>x<GPUs per node>"),
    ("cluster settings without a cluster", ["cluster.nodes=2"], "the run asks for no cluster"),
    ("cluster variables without a cluster", ["cluster.env.A=1"], "the run asks for no cluster"),
    (
        "a sweep on uneven nodes",
        ["-m", "+cluster=2x2", "cluster.gpus_per_node=[4,2]", "seed=1,2"],
        "no arrays of heterogeneous jobs",
    ),
    ("a name that is a path", ["run.name=../x"], "cannot be the name of a folder and of a job"),
    ("a root that Slurm would expand", ["run.root=runs/%j"], "has a character that Slurm reads as a pattern"),
    ("a newline in a partition", ["+cluster=1x1", "cluster.partition=a\nb"], "a line break at character 2"),
    ("a newline in a variable", ["+cluster=1x1", "cluster.env.X=a\nb"], "a line break at character 2"),
    ("a newline in a setup line", ["+cluster=1x1", "cluster.setup=['a\nb']"], "cluster.setup has a line break"),
    ("an escape in a flag", ["+cluster=1x1", "cluster.sbatch.comment=a\x1bb"], "U+001B at character 2"),
    ("a flag that the launch decides", ["+cluster=1x1", "cluster.sbatch.array=1-3"], "would break the launch"),
    ("a secret", ["+cluster=1x1", "cluster.env.K=${oc.env:MY_API_KEY}"], "refers to a secret"),
    ("a script that is not there", ["script=[nope.py]"], "there is no such file"),
    ("a task without a function", ["task.x=1"], "task has no _target_"),
    ("data without its path", ["data=text"], "data.path has no value"),
    ("data that cannot be read", ["data=text", "data.path=nowhere"], "holds no prepared text"),
    ("data that cannot be read, planned", ["plan", "data=text", "data.path=nowhere"], "holds no prepared text"),
    ("a run that is not there", ["logs", "nothing"], "no run matches 'nothing'"),
    ("a run to cancel that is not there", ["cancel", "nothing"], "no run matches 'nothing'"),
    ("a run to resume that is not there", ["resume", "nothing"], "no run matches 'nothing'"),
    ("a status that is not there", ["status", "nothing"], "no run matches 'nothing'"),
    ("no run at all", ["logs"], "there is no run below runs"),
    ("nothing to cancel", ["cancel"], "the following arguments are required"),
    ("the batch script's verb typed by hand", ["supervise", "x"], "supervise cannot read ['x']"),
]


@pytest.mark.parametrize(("words", "text"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_is_refused_before_anything_happens(words: list[str], text: str, shell: Any) -> None:
    done = shell.types(*words)
    assert (done.code, done.out) == (2, "")
    assert text in done.err
    assert shell.left() == []
    assert shell.slurm.said("submitted.sh") is None


REFUSED_BY_SLURM = [
    (
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        ["+cluster=2x16", "batch.global_size=null"],
        "Slurm would not take this job: Requested node configuration is not available\n"
        "hint: 16 GPUs per node were asked; the nodes of partition main have at most 8: "
        "lower cluster.gpus_per_node, or name another cluster.partition\n",
    ),
    (
        "sbatch: error: Batch job submission failed: Requested node configuration is not available",
        ["+cluster=5x8", "batch.global_size=null"],
        "hint: 5 nodes with 8 GPUs were asked; partition main has 4 such nodes: "
        "lower cluster.nodes, or name another cluster.partition\n",
    ),
    (
        "sbatch: error: invalid partition specified: nope",
        ["+cluster=1x1", "cluster.partition=nope"],
        "hint: partitions here: main; set cluster.partition\n",
    ),
    (
        "sbatch: error: Batch job submission failed: Invalid qos specification",
        ["+cluster=1x1", "cluster.qos=nope"],
        "hint: see `sacctmgr show qos` for the names you may use and set cluster.qos\n",
    ),
]


@pytest.mark.parametrize(("refusal", "words", "text"), REFUSED_BY_SLURM, ids=["GPUs", "nodes", "partition", "qos"])
def test_what_slurm_would_refuse_is_not_submitted(refusal: str, words: list[str], text: str, shell: Any) -> None:
    shell.slurm.refuse(refusal)
    done = shell.types(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.endswith(text)
    assert shell.slurm.said("tested.sh") is not None and shell.slurm.said("submitted.sh") is None
    assert shell.left() == []


def test_a_time_limit_that_the_partition_does_not_have_is_refused(shell: Any) -> None:
    done = shell.types("+cluster=1x1", "cluster.time_limit_min=5000")
    assert done.code == 2
    assert "cluster.time_limit_min=5000 is more than partition main allows (1440)" in done.err
    assert shell.left() == []


def test_a_cluster_where_there_is_no_slurm(shell: Any) -> None:
    shell.leaves_slurm()
    done = shell.types("+cluster=4x8")
    assert (done.code, done.out) == (2, "")
    assert "a cluster was asked for, but there is no Slurm here (no sbatch on the PATH)" in done.err
    assert "devcluster up" in done.err
    assert "there is no Slurm here" in shell.types("+cluster=1x2", "launch=interactive").err
    assert shell.left() == []
    shell.has_run(script="#!/bin/bash\n#SBATCH --nodes=1\n")
    assert "there is no Slurm here" in shell.types("resume", "gpt-stdlib").err


def test_a_root_that_is_a_file(shell: Any) -> None:
    (shell.folder / "runs").write_text("")
    done = shell.types("+cluster=1x1")
    assert done.code == 2 and "runs is not a directory" in done.err
    assert shell.left() == ["runs"]
