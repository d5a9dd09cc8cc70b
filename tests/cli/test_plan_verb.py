"""`plan`: the script, the table, JSON, and layouts to choose from. Its numbers are tested in tests/estimate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_train.cli.preview import plan_rows
from tests.cli.conftest import Shell
from tests.support.command_line import REPOSITORY, TINY_MODULE
from tests.support.plans import make_plan
from tests.tools.site.sites import RECORDED


def rows_of(shell: Shell, words: str) -> dict[str, str]:
    """Returns the table that a plan prints."""
    done = shell.types(f"plan {words}")
    assert done.code == 0, done.err
    cells = (line.strip().split("  ", 1) for line in done.err.splitlines() if line.startswith("  "))
    return {cell[0]: cell[1].strip() for cell in cells if len(cell) == 2}


def test_a_plan_prints_the_script_that_a_submission_would_use(shell: Shell) -> None:
    planned = shell.types("plan +cluster=4x8")
    assert planned.code == 0 and shell.left() == [] and shell.slurm.said("submitted.sh") is None
    shell.submits("+cluster=4x8")
    assert planned.out == shell.slurm.said("submitted.sh")
    here = shell.types("plan run.processes=4")
    assert (here.code, here.out) == (0, "")
    assert "4 = this machine" in here.err and "add +cluster=NxG for Slurm" in here.err


FAILED = "sbatch: error: Batch job submission failed: "


def test_slurms_verdict_is_told(shell: Shell) -> None:
    start = "sbatch: Job 5 to start at 2026-01-31T09:41:24 using 32 processors on nodes node[1-4] in partition main"
    (shell.slurm.folder / "verdict").write_text(f"{start}\n")
    said = [rows_of(shell, "+cluster=4x8")["Slurm"]]
    for why in ("Invalid qos specification", "Unable to contact slurm controller (connect failure)"):
        shell.slurm.refuse(f"{FAILED}{why}")
        said.append(rows_of(shell, "+cluster=4x8")["Slurm"])
    shell.leaves_slurm()
    said.append(rows_of(shell, "+cluster=4x8")["Slurm"])
    assert said[0] == "would take it; estimated start 2026-01-31T09:41:24 on node[1-4]"
    assert said[1].startswith("would refuse it: Invalid qos specification; ") and "set cluster.qos" in said[1]
    assert said[2].startswith("does not answer, so the script is not checked")
    assert said[3].startswith("not here: no sbatch on the PATH")
    assert shell.types("plan +cluster=4x8").out.startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("enforced", "said"),
    [
        ("associations,limits,qos", ""),
        ("all", ""),
        ("associations,limits", "; cluster.qos=urgent not checked: AccountingStorageEnforce=associations,limits here"),
        ("none", "; cluster.account=lab and cluster.qos=urgent not checked: AccountingStorageEnforce=none here"),
    ],
)
def test_what_slurm_takes_without_a_look_is_told(shell: Shell, enforced: str, said: str) -> None:
    config = shell.slurm.folder / "config.out"
    config.write_text(f"{config.read_text()}AccountingStorageEnforce = {enforced}\n")
    row = rows_of(shell, "+cluster=4x8 cluster.account=lab cluster.qos=urgent")["Slurm"]
    assert row == f"would take it; estimated start not told on ?{said}"
    assert "not checked" not in rows_of(shell, "+cluster=4x8")["Slurm"]


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


def test_epochs_are_told_with_their_steps_where_the_samples_are_known(tmp_path: Path) -> None:
    shards = [{"file": "train_00000.bin", "tokens": 2561, "xxh3_128": "0"}]
    (tmp_path / "index.json").write_text(json.dumps({"splits": {"train": {"shards": shards}}}))
    text = {"_target_": "slurm_train.data.text.build", "context": 16, "path": str(tmp_path)}
    for data, said in (
        (text, "2.5 epochs of 160 samples, 7 steps"),
        ({"_target_": "my.Data"}, "2.5 epochs; the ranks count the steps when they have opened the data"),
    ):
        plan = make_plan(data=data, train={"max_epochs": 2.5})
        assert dict(plan_rows(plan))["length"] == said
        assert (plan.as_json()["max_steps"], plan.as_json()["samples"]) == (None, None)


def test_steps_that_grow_are_told_with_all_their_samples_and_their_gradients(shell: Shell) -> None:
    rows = rows_of(shell, "+cluster=2x4 train.max_steps=100 'batch.growth={60: 2, 90: 4}'")
    assert rows["global batch"].endswith("x 1 accumulation, x 2 after step 60, x 4 after step 90")
    assert rows["length"] == f"100 steps, {32 * (60 + 2 * 30 + 4 * 10):,} samples"
    assert "gradients 9.7 MiB" in rows["memory"], "a sum is held beside DDP's buckets"


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("optim=adamw", "AdamW 9.7 MiB"),
        ("optim=sgd", "SGD 4.8 MiB"),
        ("optim=sgd optim.momentum=0", "activations"),
        ("optim=muon", "Muon and AdamW 5.0 MiB"),
        ("callbacks=[{_target_:slurm_train.train.callbacks.EMA}]", "AdamW 9.7 MiB, average 4.8 MiB"),
        ("optim._target_=torch.optim.NAdam optim.lr=1e-3", "NAdam 9.7 MiB"),
    ],
)
def test_what_an_optimizer_keeps_is_counted(shell: Shell, words: str, kept: str) -> None:
    memory = rows_of(shell, f"+cluster=2x4 {words}")["memory"]
    assert f"gradients 4.8 MiB, {kept}" in memory
    assert ("of NAdam, 2 numbers per parameter are assumed" in memory) == ("NAdam" in words)


def test_unequal_shares_are_told_and_their_memory_counted(shell: Shell) -> None:
    uneven = "+cluster=2x4 cluster.gpus_per_node=[4,2] batch.global_size=24 batch.shares="
    even, measured, weights = (rows_of(shell, f"{uneven}{shares}") for shares in ("even", "measured", "[2,1]"))
    assert "shares" not in even
    assert measured["shares"] == "by speed, measured at each start; a rank has at most 8 samples of a micro-batch"
    assert weights["shares"] == "node 1: 5+5+5+5, node 2: 2+2 of the 24 samples of a micro-batch"
    assert even["run"] == measured["run"] == weights["run"], "the same run, however it is shared out"
    sizes = [float(rows["memory"].split()[0]) for rows in (even, weights, measured)]
    assert sizes == sorted(set(sizes))
    shell.refuses("3 weights, for 6 ranks on nodes of 4 + 2", f"plan {uneven}[2,1,1]")


def test_a_layout_has_memory_traffic_and_a_table_of_ranks(shell: Shell) -> None:
    words = "+cluster=16x4 parallel={dp_shard:8,tp:4,pp:2} model.tied=false"
    rows = rows_of(shell, words)
    assert rows["layout"] == "pp 2 x dp_shard 8 x tp 4; 8 read different samples"
    assert rows["torch.compile"] == "yes, in the first step of each attempt"
    assert rows["global batch"] == "64 = 1 local x 8 ranks x 8 accumulation"
    assert rows["memory"].startswith("3.1 MiB per rank of stage 0: weights 95.4 KiB, AdamW 191 KiB, gathered 1.3 MiB, ")
    assert rows["sends"].startswith("per rank of stage 0 and step: ")
    assert "along tp (inside nodes)" in rows["sends"] and "along dp_shard (between nodes)" in rows["sends"]
    assert json.loads(shell.types(f"plan --json {words}").out)["memory"]["source"] == "formula, bfloat16"
    table = shell.types(f"plan --ranks {words}").out.splitlines()
    assert len(table) == 65
    assert table[0].split() == ["rank", "node", "local", "pp", "dp_replicate", "dp_shard", "cp", "tp"]
    assert " ".join(table[64].split()) == "63 15 3 1 0 7 0 3"
    small = "+cluster=2x4 parallel={dp_shard:8} train.precision=float32"
    on_host = rows_of(shell, f"{small} parallel.cpu_offload=true")["memory"]
    assert on_host.endswith("(formula, float32); on the host offloaded 1.8 MiB; CUDA and NCCL come on top")
    assert "not known; no formula for this model in a layout" in rows_of(shell, f"{small} model=cnn")["memory"]


def test_a_plan_warns_of_moments_that_two_bytes_cannot_hold(shell: Shell) -> None:
    words = "+cluster=1x2 train.param_dtype=bfloat16"
    assert "second moment" not in rows_of(shell, words)["memory"]
    assert (
        "hardly falls in bfloat16 with optim.betas[1]=0.999"
        in rows_of(shell, f"{words} optim.betas=[0.9,0.999]")["memory"]
    )


def test_a_plan_says_what_a_run_needs_costs_and_may_lose(shell: Shell) -> None:
    shell.slurm.be_site(RECORDED / "devcluster")
    rows = rows_of(shell, "+cluster=2x4 cluster.time_limit_min=480")
    assert rows["memory"].startswith(
        "33.8 MiB per rank: weights 4.9 MiB, gradients 4.8 MiB, AdamW 9.7 MiB, activations"
    )
    assert "(formula, bfloat16); on the host copy for saves 14.6 MiB" in rows["memory"]
    assert rows["GPU-hours"] == "at most 64 per attempt (480 min)"
    assert rows["comes back"] == "requeue, same job id; preemption requeues here: 15 s grace, then 5 s to end in"
    assert rows["lost at worst"].startswith("100 steps with a lost node; nothing by preemption if")
    rows = rows_of(shell, "+cluster=2x4 cluster.qos=urgent")
    assert rows["comes back"] == "requeue, same job id; nobody preempts here; 5 s to end in"
    assert rows["GPU-hours"] == "at most 8 per attempt (60 min)", "the partition's default limit"
    shell.slurm.be_site(RECORDED / "typed")
    rows = rows_of(shell, "+cluster=2x4 cluster.partition=scavenge")
    assert "120 s grace, then 30 s to end in" in rows["comes back"]
    shell.leaves_slurm()
    rows = rows_of(shell, "+cluster=2x4 cluster.gpu_flag=none requeue.enabled=false")
    assert rows["rank-hours"].startswith("not known") and rows["comes back"].startswith("not by itself")


def test_json_holds_all_of_it_and_nothing_else_is_printed(shell: Shell) -> None:
    shell.slurm.be_site(RECORDED / "devcluster")
    done = shell.types("plan --json +cluster=2x4")
    facts = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert facts["script"] == shell.types("plan +cluster=2x4").out and facts["world"]["size"] == 8
    memory = facts["memory"]
    parts = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "average_bytes", "activation_bytes")
    assert memory["total_bytes"] == sum(memory[name] for name in parts) and memory["host_copy_bytes"] > 0
    assert facts["slurm"]["is_accepted"] is True and facts["worst_loss"]["notice_s"] == 20.0
    cost = {"unit": "GPU-hours", "per_attempt_h": 8.0, "limit_min": 60, "left_h": None, "left_steps": 300}
    assert facts["cost"] == cost | {"speed": None}
    assert json.loads(shell.types("plan --json run.processes=1").out)["script"] is None


def test_a_model_of_ones_own_is_measured_apart(shell: Shell) -> None:
    shell.patch.setenv("PYTHONPATH", str(REPOSITORY))
    broken = "class Broken:\n    def __init__(self):\n        raise ValueError('no disk')\n"
    (shell.folder / "tiny.py").write_text(f"{TINY_MODULE}\n{broken}")
    words = "model._target_=tiny.Tiny run.processes=1 data._target_=tiny."
    memory = rows_of(shell, f"{words}Numbers")["memory"]
    assert memory == "not known; `plan --measure` builds your model without its memory and looks"
    memory = rows_of(shell, f"--measure {words}Numbers")["memory"]
    assert "(measured, float32)" in memory and "activations are missing" not in memory
    memory = rows_of(shell, f"--measure {words}Broken")["memory"]
    assert memory == "not known; the model cannot be measured here: ValueError: no disk"
    (shell.folder / "train.py").touch()
    assert rows_of(shell, "script=[train.py]")["memory"] == "not known; only your own code knows"


def test_a_sweep_tells_each_kind_of_run_and_the_hours_of_all(shell: Shell) -> None:
    rows = rows_of(shell, "-m +cluster=2x4 cluster.time_limit_min=60 seed=1,2,3 model.width=64,128")
    assert rows["memory"].count(" | ") == 1
    assert rows["all 6"] == "GPU-hours: at most 48 if each run has one attempt"
    assert rows["lost at worst"].startswith("100 steps with a lost node")


def test_suggestions_are_a_table_of_words_to_type(shell: Shell) -> None:
    done = shell.types("plan --suggest 80 +cluster=2x8 model.tied=false")
    lines = done.out.splitlines()
    assert done.code == 0 and lines[0].split() == ["WHAT", "NODES", "MEMORY", "SPEED", "WORDS"]
    assert lines[1].startswith("best") and '"parallel={dp_replicate:' in lines[1] and "100 %" in lines[1]
    assert lines[-1].split()[:2] == ["smallest", "1x8"]
    assert "legal layouts of 16 ranks; speed by a simple model: 400 TFLOP/s a device" in done.err
    assert shell.left() == []
