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
