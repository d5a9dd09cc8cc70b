from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory, read_runs, read_table

SWEEP = ("-m", "+cluster=1x8", "optim.lr=1e-3,3e-4", "seed=range(3)")


def the_sweep(folder: Path) -> SweepDirectory:
    (path,) = (folder / "runs" / "sweeps").iterdir()
    return SweepDirectory(path)


def words_of_sbatch(shell: Any) -> list[str]:
    said = shell.slurm.said("sbatch_words")
    return [] if said is None else said.splitlines()


def finish(run: RunDirectory) -> None:
    run.result.write_text(json.dumps({"step": 12, "eval_loss": 1.0}))


def test_a_sweep_is_one_array_and_every_run_has_its_directory(shell: Any) -> None:
    done = shell.types(*SWEEP, "sweep.max_parallel=2")
    sweep = the_sweep(shell.folder)
    assert (done.code, done.out) == (0, f"4711 {sweep.path}\n")
    assert len(words_of_sbatch(shell)) == 1
    assert "#SBATCH --array=0-5%2\n" in shell.slurm.said("submitted.sh")
    assert shell.slurm.said("submitted.sh") == sweep.array(0).script.read_text()
    elements = read_table(sweep)
    assert [dict(element.overrides) for element in elements[:2]] == [
        {"optim.lr": "0.001", "seed": "0"},
        {"optim.lr": "0.001", "seed": "1"},
    ]
    assert read_runs(sweep.array(0)) == [element.run for element in elements]
    for index, element in enumerate(elements):
        record = read_job(element.run)
        assert record is not None and record.job_id == element.job == f"4711_{index}"
        assert element.run.config.exists() and element.run.submit_script.exists() and element.run.logs.is_dir()
        assert element.run.code.resolve() == sweep.code / "000"
        assert json.loads(element.run.provenance.read_text())["words"] == [*SWEEP, "sweep.max_parallel=2"]
    assert "6 runs: optim.lr (2) x seed (3)" in done.err and f"status {sweep.sweep_id}" in done.err


def test_a_run_of_a_sweep_is_the_run_that_it_would_be_alone(shell: Any) -> None:
    shell.types("-m", "+cluster=1x8", "seed=5,6")
    run = read_table(the_sweep(shell.folder))[0].run
    config, plan, script = (path.read_text() for path in (run.config, run.plan, run.submit_script))
    done = shell.types("+cluster=1x8", "seed=5")
    assert done.out == f"4711 {run.path}\n", done.err
    assert (config, plan, script) == tuple(path.read_text() for path in (run.config, run.plan, run.submit_script))
    assert not run.code.is_symlink(), "a run that is submitted alone has its own copy"
    assert (the_sweep(shell.folder).code / "000").is_dir()


def test_the_same_sweep_again_submits_only_what_is_missing(shell: Any) -> None:
    shell.types(*SWEEP)
    elements = read_table(the_sweep(shell.folder))
    finish(elements[0].run)
    finish(elements[4].run)
    shell.slurm.queue_many(["4711_1", "4711_2"], "RUNNING")
    (shell.slurm.folder / "job_id").write_text("4720\n")
    done = shell.types(*SWEEP)
    sweep = the_sweep(shell.folder)
    assert done.out == f"4720 {sweep.path}\n"
    assert "2 runs are finished, 2 active; 2 to submit" in done.err
    assert "#SBATCH --array=0-1\n" in shell.slurm.said("submitted.sh")
    jobs = [element.job for element in read_table(sweep)]
    assert jobs == ["4711_0", "4711_1", "4711_2", "4720_0", "4711_4", "4720_1"]
    assert [element.run.code.resolve().name for element in read_table(sweep)] == [
        "000",
        "000",
        "000",
        "001",
        "000",
        "001",
    ]


def test_a_wider_sweep_leaves_the_runs_of_the_narrower_alone(shell: Any) -> None:
    shell.types("-m", "+cluster=1x8", "seed=range(2)")
    shell.slurm.queue_many(["4711_0", "4711_1"], "PENDING")
    done = shell.types("-m", "+cluster=1x8", "seed=range(4)")
    assert "0 runs are finished, 2 active; 2 to submit" in done.err
    wider = SweepDirectory(Path(done.out.split()[1]))
    assert [element.overrides["seed"] for element in read_table(wider)] == ["0", "1", "2", "3"]
    assert [run.path for run in read_runs(wider.array(0))] == [element.run.path for element in read_table(wider)[2:]]


def test_chunks_and_shapes_are_one_sbatch_each(shell: Any) -> None:
    (shell.slurm.folder / "config.out").write_text("MaxArraySize            = 2\n")
    words = ("-m", "+cluster=1x8,2x8", "seed=range(3)", "run.name=n${cluster.nodes}", "sweep.max_parallel=2")
    done = shell.types(*words)
    assert done.code == 0 and len(done.out.splitlines()) == 4
    said = words_of_sbatch(shell)
    assert [("--dependency=afterany:4711" in line) for line in said] == [False, False, True, True]
    assert [len(read_runs(the_sweep(shell.folder).array(number))) for number in range(4)] == [2, 1, 2, 1]


def test_a_refusal_writes_nothing(shell: Any) -> None:
    shell.slurm.refuse(
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)"
    )
    done = shell.types(*SWEEP)
    assert done.code == 2 and "Slurm would not take this job: Job violates accounting/QOS policy" in done.err
    assert shell.left() == [] and words_of_sbatch(shell) == []


def test_a_submission_that_fails_half_way_says_what_is_there_and_goes_on_later(shell: Any) -> None:
    (shell.slurm.folder / "config.out").write_text("MaxArraySize            = 4\n")
    sbatch, fails = shell.slurm.folder / "sbatch", shell.slurm.folder / "sbatch_fails"
    text = sbatch.read_text()
    sbatch.write_text(text.replace("_env; cat ", f"_env; touch {fails}; cat "))
    done = shell.types(*SWEEP)
    sweep = the_sweep(shell.folder)
    assert done.code == 2 and done.out == f"4711 {sweep.path}\n"
    assert "4 runs are submitted, 2 are not" in done.err and "the same command submits those" in done.err
    assert [element.job for element in read_table(sweep)] == [*(f"4711_{i}" for i in range(4)), None, None]
    sbatch.write_text(text)
    fails.unlink()
    shell.slurm.queue_many([f"4711_{i}" for i in range(4)], "RUNNING")
    (shell.slurm.folder / "job_id").write_text("4712\n")
    assert shell.types(*SWEEP).out == f"4712 {sweep.path}\n"
    assert [element.job for element in read_table(sweep)][4:] == ["4712_0", "4712_1"]


@pytest.mark.parametrize("is_known", [True, False])
def test_an_array_whose_id_was_lost_is_found_again_or_submitted_anew(is_known: bool, shell: Any) -> None:
    """The submitter was killed between sbatch and the next line."""
    shell.types(*SWEEP)
    sweep = the_sweep(shell.folder)
    array = sweep.array(0)
    array.job.unlink()
    for element in read_table(sweep):
        element.run.job.unlink()
    squeue = shell.slurm.folder / "squeue"
    named = f"4711_[0-5]|{array.path}/submitted/x.sh" if is_known else ""
    other = "99_[0-5]|/elsewhere/x.sh"
    script = squeue.read_text()
    lines = "\\n".join(line for line in (other, named) if line)
    squeue.write_text(script.replace("\n", f'\ncase "$*" in *--me*) printf "{lines}\\n"; exit;; esac\n', 1))
    if is_known:
        shell.slurm.queue_many([f"4711_{i}" for i in range(6)], "RUNNING")
    (shell.slurm.folder / "job_id").write_text("5000\n")
    done = shell.types(*SWEEP)
    assert done.code == 0, done.err
    assert done.out == ("" if is_known else f"5000 {sweep.path}\n")
    assert [element.job for element in read_table(sweep)] == [f"{4711 if is_known else 5000}_{i}" for i in range(6)]


def test_two_submitters_of_one_sweep_do_not_meet(shell: Any) -> None:
    shell.types(*SWEEP)
    descriptor = os.open(the_sweep(shell.folder).path / ".lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    done = shell.types(*SWEEP)
    os.close(descriptor)
    assert done.code == 2 and "being submitted or run by another command" in done.err


def test_waiting_ends_when_every_run_has_a_result(shell: Any) -> None:
    shell.types(*SWEEP)
    for element in read_table(the_sweep(shell.folder)):
        finish(element.run)
    done = shell.types(*SWEEP, "--wait")
    assert (done.code, done.out) == (0, "") and "all 6 runs are finished" in done.err


def test_waiting_says_when_runs_end_without_a_result(shell: Any) -> None:
    done = shell.types(*SWEEP, "--wait")
    assert done.code == 1 and "6 of 6 runs ended without a result" in done.err
