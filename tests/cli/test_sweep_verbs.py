"""status, resume, cancel and collate of a sweep, with Slurm's commands as small programs."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from typing import Any

import pytest

from slurm_train.rundir.sweep import SweepDirectory, read_runs, read_table
from tests.cli.conftest import Shell
from tests.support.run_facts import attempt

SWEEP = "-m +cluster=1x8 optim.lr=1e-3,3e-4 seed=range(3)"


@pytest.fixture
def sweep(shell: Shell) -> SweepDirectory:
    """Six runs: finished, running, failed, never begun, out of time, cancelled."""
    found = shell.submits_sweep(SWEEP)
    runs = [element.run for element in read_table(found)]
    ends: list[dict[str, Any]] = [
        {"reason": "done", "action": "finish", "world_size": 8},
        {},
        {"reason": "failed", "action": "stop", "note": "rank 3 on node2: ZeroDivisionError: 1 / 0"},
        {},
        {"reason": "time_limit", "action": "stop", "note": "time limit"},
        {"reason": "cancelled", "action": "stop", "note": "the job was cancelled"},
    ]
    for index, (run, end) in enumerate(zip(runs, ends, strict=True)):
        if index != 3:
            lines = attempt(0, job_id=f"4711_{index}", **end)
            run.attempts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs[0].result.write_text(json.dumps({"step": 300}))
    metrics = [{"step": 10, "attempt": 0, "loss": 2.0}, {"step": 20, "attempt": 0, "loss": 3.0}]
    metrics += [{"step": 20, "attempt": 0, "eval_accuracy": 0.5}, {"step": 30, "attempt": 0, "eval_accuracy": 0.4}]
    runs[0].metrics.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    shell.slurm.queue_many(["4711_1"], "RUNNING")
    shell.slurm.forget("sbatch_words")
    shell.slurm.next_job(4720)
    return found


def test_status_shows_what_each_run_was_given_and_how_it_stands(sweep: SweepDirectory, shell: Shell) -> None:
    done = shell.types("status", sweep.sweep_id)
    lines = done.out.splitlines()
    assert done.code == 0 and lines[0].split()[:6] == ["#", "optim.lr", "seed", "RUN", "JOB", "STATE"]
    run = read_table(sweep)[2].run
    assert lines[3].split()[:6] == ["2", "0.001", "2", run.run_id, "4711_2", "failed"]
    summary = "6 runs: 1 finished, 1 running, 1 failed, 1 not started, 1 timeout, 1 cancelled"
    assert lines[7:] == [summary, str(sweep.path)]


RESUMED = {
    "--only failed,missing,timeout": [2, 3, 4],
    "": [2, 3, 4, 5],
    "--only cancelled,timeout --where seed=1": [4],
}


@pytest.mark.parametrize("words", RESUMED)
def test_resume_submits_the_chosen_runs_as_one_array(words: str, sweep: SweepDirectory, shell: Shell) -> None:
    indices, before = RESUMED[words], {one.run: one.run.config.read_text() for one in read_table(sweep)}
    assert shell.types(f"resume {sweep.sweep_id} {words}").out == f"4720 {sweep.path}\n"
    assert shell.slurm.times_asked("sbatch") == 1
    assert read_runs(sweep.array(1)) == [read_table(sweep)[index].run for index in indices]
    jobs = [element.job for element in read_table(sweep)]
    assert [jobs[index] for index in indices] == [f"4720_{task}" for task in range(len(indices))]
    assert {run: run.config.read_text() for run in before} == before


def test_resume_with_accepted_code_gives_it_to_the_chosen_runs_only(sweep: SweepDirectory, shell: Shell) -> None:
    subprocess.run(["git", "init", "-q", str(shell.folder)], check=True)
    (shell.folder / "train.py").write_text("mended = True\n")
    assert shell.types(f"resume {sweep.sweep_id} --only failed --accept code").code == 0
    runs = [element.run for element in read_table(sweep)]
    assert [run.code.resolve().name for run in runs] == ["000", "000", "001", "000", "000", "000"]
    assert (runs[2].code / "train.py").exists()
    assert json.loads(runs[2].provenance.read_text())["words"][0] == "resume"


NOT_RESUMED = {
    "--only interrupted": "no run of sweep {id} is to be continued: 6 runs: 1 finished",
    "--only broken": "--only broken: there is no state 'broken'",
    "--where optim.lrr=1": "no run has the key 'optim.lrr'",
}


def test_what_cannot_be_resumed_is_refused(sweep: SweepDirectory, shell: Shell) -> None:
    for words, message in NOT_RESUMED.items():
        shell.refuses(message.format(id=sweep.sweep_id), f"resume {sweep.sweep_id} {words}")
    run_id = read_table(sweep)[2].run.run_id
    shell.refuses("is not a sweep", f"resume {run_id} --only failed")
    shell.refuses("is not a sweep", f"cancel {run_id} --where seed=1")
    shell.slurm.break_down("squeue", "sacct")
    for words in (f"resume {sweep.sweep_id}", SWEEP):
        assert shell.types(words).code == 2, "Slurm does not say what runs"
    assert shell.slurm.said("sbatch_words") is None


CANCELLED = {"": ["4711"], "--where optim.lr=1e-3": ["4711_1", "4711_2"]}


@pytest.mark.parametrize("words", CANCELLED)
def test_cancel_ends_the_meant_runs_with_one_command(words: str, sweep: SweepDirectory, shell: Shell) -> None:
    shell.slurm.queue_many(["4711_1", "4711_2", "4711_3"], "PENDING")
    assert shell.types(f"cancel {sweep.sweep_id} {words}").code == 0
    ids = CANCELLED[words]
    assert (shell.slurm.said("cancelled") or "").split() == ids
    stopped = [one.run for one in read_table(sweep) if one.run.stop_file.exists()]
    assert len(stopped) == (3 if ids == ["4711"] else len(ids)), "what is on its way for these must not begin"


def test_cancel_spares_the_runs_of_another_sweep(sweep: SweepDirectory, shell: Shell) -> None:
    """A sweep that shares a run with a wider one must not end the array of the wider one."""
    narrow = shell.types("-m +cluster=1x8 optim.lr=1e-3 seed=1,2")
    shell.slurm.queue_many(["4711_1", "4711_2", "4711_3"], "RUNNING")
    assert narrow.out.startswith("4720 ")
    other = shell.submits_sweep("-m +cluster=1x8 optim.lr=1e-3 seed=0,1,7")
    assert shell.types("cancel", str(other.path)).code == 0
    assert "4711" not in (shell.slurm.said("cancelled") or "").split()
    shell.slurm.queue_many([], "RUNNING")
    shell.refuses(f"no such run of sweep {sweep.sweep_id} is active", f"cancel {sweep.sweep_id}")


# collate


def test_collate_has_a_row_per_run(sweep: SweepDirectory, shell: Shell) -> None:
    done = shell.types(f"collate {sweep.sweep_id} --format csv")
    rows = list(csv.DictReader(io.StringIO(done.out)))
    assert done.code == 0 and len(rows) == 6
    first = rows[0]
    assert (first["optim.lr"], first["seed"], first["state"], first["attempts"]) == ("0.001", "0", "finished", "1")
    assert (first["last_loss"], first["best_loss"], first["best_loss_step"]) == ("3.0", "2.0", "10")
    assert (rows[3]["state"], rows[3]["last_loss"], rows[3]["attempts"]) == ("not_started", "", "0")
    assert done.err == f"best eval_accuracy: 0.5 at step 20 of run 0, {first['run']}: optim.lr=0.001 seed=0\n"


def test_a_run_name_leads_to_its_sweep(sweep: SweepDirectory, shell: Shell) -> None:
    table = shell.types("collate", sweep.sweep_id).out
    shell.has_run("gpt-stdlib", "ffffffff")
    assert shell.types("collate", "gpt-stdlib").out == table, "only a sweep is meant"
    assert f"sweeps there: {sweep.sweep_id} (gpt-stdlib)" in shell.types("collate", "gpt").err
    assert f"are a sweep: `status {sweep.sweep_id}`" in shell.types("status").err


def test_collate_writes_a_file_after_its_ending(sweep: SweepDirectory, shell: Shell) -> None:
    for name in ("a.csv", "a.md"):
        assert shell.types(f"collate {sweep.sweep_id} --out {name}").code == 0
    assert (shell.folder / "a.csv").read_text().startswith("index,run,optim.lr,seed,state,")
    assert (shell.folder / "a.md").read_text().splitlines()[1].startswith("| --- | ---")
    for words in ("--format parquet", "--out no/such/x.csv"):
        assert shell.types(f"collate {sweep.sweep_id} {words}").code == 2
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    assert shell.types(f"collate {sweep.sweep_id} --out a.parquet").code == 0
    assert parquet.read_table("a.parquet").num_rows == 6
    shell.refuses("no/such/x.parquet cannot be written", f"collate {sweep.sweep_id} --out no/such/x.parquet")
