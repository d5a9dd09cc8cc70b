from __future__ import annotations

from typing import Any

from slurm_train.cli.display import plan_rows, table
from tests.support.plans import make_plan


def test_a_plan_prints_the_script_that_a_submission_would_use(shell: Any) -> None:
    planned = shell.types("plan", "+cluster=4x8")
    assert planned.code == 0
    assert shell.left() == [] and shell.slurm.said("submitted.sh") is None
    shell.types("+cluster=4x8")
    assert planned.out == shell.slurm.said("submitted.sh")


def test_slurms_verdict_is_told(shell: Any) -> None:
    start = "sbatch: Job 5 to start at 2026-01-31T09:41:24 using 32 processors on nodes node[1-4] in partition main"
    (shell.slurm.folder / "verdict").write_text(f"{start}\n")
    assert "would take it; estimated start 2026-01-31T09:41:24 on node[1-4]" in shell.types("plan", "+cluster=4x8").err
    shell.slurm.refuse("sbatch: error: Batch job submission failed: Invalid qos specification")
    done = shell.types("plan", "+cluster=4x8")
    assert done.code == 0 and "would refuse it: Invalid qos specification" in done.err
    shell.slurm.refuse(
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)"
    )
    done = shell.types("plan", "+cluster=4x8")
    assert done.code == 0 and "does not answer, so the script is not checked" in done.err
    assert done.out.startswith("#!/bin/bash\n")


def test_without_slurm_the_script_is_shown_unchecked(shell: Any) -> None:
    shell.leaves_slurm()
    done = shell.types("plan", "+cluster=4x8")
    assert done.code == 0 and "not here: no sbatch on the PATH" in done.err
    assert done.out.startswith("#!/bin/bash\n")


def test_without_a_cluster_there_is_no_script(shell: Any) -> None:
    done = shell.types("plan", "run.processes=4")
    assert (done.code, done.out) == (0, "")
    assert "4 = this machine" in done.err and "add +cluster=NxG for Slurm" in done.err
    assert shell.left() == []


def test_the_rows_of_the_table() -> None:
    plan = make_plan(
        cluster={"nodes": 4, "gpus_per_node": 8},
        optim={"lr": 1e-3, "lr_retune": "sqrt", "lr_global_size": 256},
        train={"max_steps": 1000},
        checkpoint={"every_steps": None, "keep": 3},
        requeue={"enabled": False},
    )
    assert plan_rows(plan) == [
        ("run", str(plan.run.path)),
        ("ranks", "32 = 4 nodes x 8"),
        ("global batch", "64 = 2 local x 32 ranks x 1 accumulation"),
        ("length", "1000 steps, 64,000 samples"),
        ("peak lr", "0.0005 (sqrt rule: 0.001 was tuned for a global batch of 256)"),
        ("checkpoints", "at a stop and at the end only, 3 kept"),
        ("requeue", "never"),
    ]


def test_a_table_is_aligned() -> None:
    assert table(["A", "LONG"], [["wide cell", "x"], ["y", ""]]) == "A          LONG\nwide cell  x\ny"


def test_a_layout_is_told_with_its_groups_and_its_cost(shell: Any) -> None:
    words = ("+cluster=16x4", "parallel={dp_shard:8,tp:4,pp:2}", "model.tied=false")
    done = shell.types("plan", *words)
    assert done.code == 0, done.err
    for text in (
        "layout        pp 2 x dp_shard 8 x tp 4; 8 read different samples",
        "tp: 16 groups of 4, on one node each; the first: ranks 0-3",
        "pp: 32 groups of 2, over several nodes; the first: ranks 0, 32",
        "bubble        11% of a step: 2 stages, 8 micro-batches",
        "global batch  64 = 1 local x 8 ranks x 8 accumulation",
    ):
        assert text in done.err
    assert "along tp (inside nodes)" in done.err and "along dp_shard (between nodes)" in done.err
    table = shell.types("plan", "--ranks", *words).out.splitlines()
    assert len(table) == 65
    assert " ".join(table[0].split()) == "rank node local pp dp_replicate dp_shard cp tp"
    assert " ".join(table[64].split()) == "63 15 3 1 0 7 0 3"
