"""`plan`: the script, the table, JSON, and layouts to choose from. Its numbers are tested in tests/plan."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from tests.cli.conftest import Shell
from tests.support.command_line import REPOSITORY, TINY_MODULE
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


def test_a_plan_says_which_switches_the_nodes_are_on(shell: Shell) -> None:
    start = "sbatch: Job 5 to start at 2026-01-31T09:41:24 using 4 processors on nodes node[2-3] in partition main"
    (shell.slurm.folder / "verdict").write_text(f"{start}\n")
    assert "topology" not in rows_of(shell, "+cluster=2x2")
    (shell.slurm.folder / "topology.out").write_text(
        "SwitchName=a Level=0 LinkSpeed=1 Nodes=node[1-2]\nSwitchName=b Level=0 LinkSpeed=1 Nodes=node[3-4]\n"
        "SwitchName=root Level=1 LinkSpeed=1 Nodes=node[1-4] Switches=a,b\n"
    )
    crossing = "nodes on switch a: 1, switch b: 1; groups of ranks on several: dp_replicate 1 of 1"
    advice = "; cluster.sbatch.switches=1 asks for nodes on one switch"
    assert rows_of(shell, "+cluster=2x2")["topology"] == crossing + advice
    for words in ("cluster.sbatch.switches=1", "cluster.nodelist=node[2-3]"):
        assert rows_of(shell, f"+cluster=2x2 {words}")["topology"] == crossing
    facts = json.loads(shell.types("plan --json +cluster=2x2").out)
    assert facts["slurm"]["topology"] == crossing + advice
    assert "#SBATCH --switches=1\n" in shell.types("plan +cluster=2x2 cluster.sbatch.switches=1").out


def test_a_layout_has_memory_traffic_and_a_table_of_ranks(shell: Shell) -> None:
    words = "+cluster=16x4 parallel={dp_shard:8,tp:4,pp:2} model.tied=false"
    rows = rows_of(shell, words)
    assert rows["layout"] == "pp 2 x dp_shard 8 x tp 4; 8 read different samples"
    assert "along tp (inside nodes)" in rows["sends"] and "along dp_shard (between nodes)" in rows["sends"]
    assert json.loads(shell.types(f"plan --json {words}").out)["memory"]["source"] == "formula, bfloat16"
    table = shell.types(f"plan --ranks {words}").out.splitlines()
    assert len(table) == 65
    assert table[0].split() == ["rank", "node", "local", "pp", "dp_replicate", "dp_shard", "cp", "tp"]
    assert " ".join(table[64].split()) == "63 15 3 1 0 7 0 3"


def test_a_plan_says_what_a_run_needs_costs_and_may_lose(shell: Shell) -> None:
    shell.slurm.be_site(RECORDED / "devcluster")
    rows = rows_of(shell, "+cluster=2x4 cluster.time_limit_min=480")
    assert rows["GPU-hours"] == "at most 64 per attempt (480 min)"
    assert rows["comes back"] == "requeue, same job id; preemption requeues here: 15 s grace, then 5 s to end in"
    assert rows["lost at worst"].startswith("100 steps with a lost node; nothing by preemption if")
    shell.leaves_slurm()
    rows = rows_of(shell, "+cluster=2x4 cluster.gpu_flag=none requeue.enabled=false")
    assert rows["rank-hours"].startswith("not known") and rows["comes back"].startswith("not by itself")


def test_a_plan_names_limits_that_the_run_and_its_return_will_meet(shell: Shell) -> None:
    shell.slurm.be_site(RECORDED / "devcluster")
    (shell.slurm.folder / "qos.out").write_text("normal|0|00:00:15||requeue|00:30:00||||||||||1|||\n")
    with (shell.slurm.folder / "config.out").open("a") as config:
        config.write("RequeueExit             = 1\n")
    rows = rows_of(shell, "+cluster=2x4 cluster.time_limit_min=480")
    assert rows["Slurm"].startswith("would let it wait for ever: cluster.time_limit_min=480 is more than QOS normal")
    assert "one job of a user into the queue" in rows["comes back"] and "RequeueExit=1" in rows["comes back"]
    facts = json.loads(shell.types("plan --json +cluster=2x4 cluster.time_limit_min=480").out)
    assert facts["slurm"]["is_accepted"] is False
    partitions = shell.slurm.folder / "partitions.out"
    partitions.write_text(partitions.read_text().replace("State=UP", "State=DOWN"))
    start = "sbatch: Job 5 to start at 2026-01-31T09:41:24 using 8 processors on nodes node[1-2] in partition main"
    (shell.slurm.folder / "verdict").write_text(f"{start}\n")
    rows = rows_of(shell, "+cluster=2x4 cluster.time_limit_min=30")
    assert "main is DOWN" in rows["Slurm"] and "estimated start" not in rows["Slurm"]


def test_the_plan_in_readme_is_the_one_that_is_printed(shell: Shell) -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    command, *lines = readme.partition("    $ python -m slurm_train plan ")[2].partition("    $ ")[0].splitlines()
    shell.slurm.be_site(RECORDED / "devcluster")
    rows = rows_of(shell, command)
    said = dict(line.strip().split("  ", 1) for line in lines)
    assert said.pop("Slurm").strip().startswith("would take it; estimated start ")
    assert len(said) == 5
    assert {name: text.strip() for name, text in said.items()} == {name: rows[name] for name in said}


def test_json_holds_all_of_it_and_nothing_else_is_printed(shell: Shell) -> None:
    shell.slurm.be_site(RECORDED / "devcluster")
    done = shell.types("plan --json +cluster=2x4")
    facts = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert facts["script"] == shell.types("plan +cluster=2x4").out and facts["world"]["size"] == 8
    assert facts["slurm"]["is_accepted"] is True and facts["worst_loss"]["notice_s"] == 20.0
    assert (facts["cost"]["per_attempt_h"], facts["cost"]["left_steps"]) == (8.0, 300)
    assert json.loads(shell.types("plan --json run.processes=1").out)["script"] is None


def test_a_model_of_ones_own_is_measured_apart(shell: Shell) -> None:
    shell.patch.setenv("PYTHONPATH", str(REPOSITORY))
    broken = "class Broken:\n    def __init__(self):\n        raise ValueError('no disk')\n"
    (shell.folder / "tiny.py").write_text(f"{TINY_MODULE}\n{broken}")
    words = "model._target_=tiny.Tiny run.processes=1 data._target_=tiny."
    memory = rows_of(shell, f"--measure {words}Numbers")["memory"]
    assert "(measured, float32)" in memory and "activations are missing" not in memory
    per_rank = "+cluster=1x1 cluster.cpus_per_gpu="
    numbers = f"{words}Numbers {per_rank}"
    assert (
        rows_of(shell, f"{numbers}2")["reading"] == "by the training process: a rank has 2 CPUs (data.num_workers=auto)"
    )
    assert rows_of(shell, f"{numbers}8")["reading"].startswith("by up to 6 processes per rank, where a sample takes")
    assert "reading" not in rows_of(shell, f"{numbers}8 +data.num_workers=1")
    assert "reading" not in rows_of(shell, f"{per_rank}8")
    memory = rows_of(shell, f"--measure {words}Broken")["memory"]
    assert memory == "not known; the model cannot be measured here: ValueError: no disk"
    assert "(formula, float32)" in rows_of(shell, "--measure run.processes=1")["memory"]
    (shell.folder / "train.py").touch()
    assert rows_of(shell, "script=[train.py]")["memory"] == "not known; only your own code knows"


def test_shares_growth_and_epochs_are_told(shell: Shell) -> None:
    uneven = "+cluster=2x4 cluster.gpus_per_node=[4,2] batch.global_size=24 batch.shares="
    even, weights = rows_of(shell, f"{uneven}even"), rows_of(shell, f"{uneven}[2,1]")
    assert "shares" not in even
    assert weights["shares"] == "node 1: 5+5+5+5, node 2: 2+2 of the 24 samples of a global batch"
    assert even["run"] == weights["run"], "the same run, however it is shared out"
    (shell.folder / "book.txt").write_text("a line of a book\n" * 10_000)
    assert shell.types("prepare book.txt --out book").code == 0
    text = "data=text data.path=book data.context=16"
    rows = rows_of(shell, f"+cluster=2x4 optim=sgd train.max_epochs=2.5 'batch.growth={{60: 2}}' {text}")
    assert rows["length"] == "2.5 epochs of 9,562 samples, 404 steps"
    assert rows["global batch"].endswith(", x 2 after step 60") and "SGD 4.8 MiB" in rows["memory"]
    assert "Muon and AdamW 5.0 MiB" in rows_of(shell, "+cluster=2x4 optim=muon")["memory"]


def test_a_sweep_tells_each_kind_of_run_and_the_hours_of_all(shell: Shell) -> None:
    rows = rows_of(shell, "-m +cluster=2x4 cluster.time_limit_min=60 seed=1,2,3 model.width=64,128")
    assert rows["memory"].count(" | ") == 1
    assert rows["all 6"] == "GPU-hours: at most 48 if each run has one attempt"


def test_suggestions_are_a_table_of_words_to_type(shell: Shell) -> None:
    lines = shell.types("plan --suggest 80 +cluster=2x8 model.tied=false").out.splitlines()
    assert lines[0].split() == ["WHAT", "NODES", "MEMORY", "SPEED", "WORDS"]
    assert lines[1].startswith("best") and '"parallel={dp_replicate:' in lines[1]


def test_sizes_and_limits_are_asked_of_slurm_and_nothing_is_submitted(shell: Shell) -> None:
    start = datetime.now() + timedelta(hours=1, minutes=1)
    verdict = f"sbatch: Job 5 to start at {start:%Y-%m-%dT%H:%M:%S} using 4 processors on nodes n1 in partition main"
    (shell.slurm.folder / "verdict").write_text(f"{verdict}\n")
    words = "+cluster=2x4 cluster.time=8:00:00 batch.global_size=16 train.max_steps=1000"
    done = shell.types(f"plan --when 1,2,8 {words}")
    lines = done.out.splitlines()
    assert done.code == 0 and shell.left() == [] and shell.slurm.said("submitted.sh") is None
    assert len(lines) == 1 + 3 * 3 and "sbatch --test-only" in done.err
    assert " 1 h " in lines[1] and lines[1].endswith("ends first")
    assert "batch.global_size=16 has no sample for each of 32 ranks" in lines[-1]
    found = json.loads(shell.types(f"plan --json --when 2 {words}").out)
    assert [option["limit_min"] for option in found] == [120, 240, 480]
    assert all(3600 < option["starts_in_s"] < 3700 for option in found)
    shell.slurm.refuse(f"{FAILED}Invalid qos specification")
    assert "Invalid qos specification" in shell.types(f"plan --when 2 {words}").out


def test_a_plan_says_what_was_chosen_and_a_run_and_a_sweep_ask_for_it(shell: Shell) -> None:
    shell.slurm.be_site(RECORDED / "devcluster")
    done = shell.types("plan +cluster=2x4")
    assert "per rank: a GPU's part of a node with" in done.err and "#SBATCH --cpus-per-task=8\n" in done.out
    assert "--cpus-per-task" not in shell.types("plan +cluster=2x4 cluster.cpus_per_gpu=null").out
    shell.submits("+cluster=2x4")
    assert "#SBATCH --cpus-per-task=8\n" in (shell.slurm.said("submitted.sh") or "")
    swept = shell.types("plan -m +cluster=1x2 seed=1,2")
    assert swept.code == 0 and "#SBATCH --cpus-per-task=8\n" in swept.out
