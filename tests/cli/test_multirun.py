from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element, SweepDirectory, read_runs, read_table
from tests.cli.conftest import Shell

SWEEP = "-m +cluster=1x8 optim.lr=1e-3,3e-4 seed=range(3)"


def the_sweep(shell: Shell) -> SweepDirectory:
    (path,) = (shell.folder / "runs" / "sweeps").iterdir()
    return SweepDirectory(path)


def elements(shell: Shell) -> list[Element]:
    return read_table(the_sweep(shell))


def finish(run: RunDirectory) -> None:
    run.result.write_text(json.dumps({"step": 12, "eval_loss": 1.0}))


def test_a_sweep_is_one_array_and_every_run_has_its_directory(shell: Shell) -> None:
    done = shell.types(f"{SWEEP} sweep.max_parallel=2")
    sweep, found = the_sweep(shell), elements(shell)
    assert (done.code, done.out) == (0, f"4711 {sweep.path}\n")
    assert "6 runs: optim.lr (2) x seed (3)" in done.err and f"status {sweep.sweep_id}" in done.err
    assert shell.slurm.times_asked("sbatch") == 1
    script = sweep.array(0).script.read_text()
    assert "#SBATCH --array=0-5%2\n" in script and shell.slurm.said("submitted.sh") == script
    for index, element in enumerate(found):
        record = read_job(element.run)
        assert record.job_id == element.job == f"4711_{index}"
        assert element.run.code.resolve() == sweep.code / "000"


def test_a_run_of_a_sweep_is_the_run_that_it_would_be_alone(shell: Shell) -> None:
    run = read_table(shell.submits_sweep("-m +cluster=1x8 seed=5,6"))[0].run
    before = [path.read_text() for path in (run.config, run.plan, run.submit_script)]
    assert shell.submits("+cluster=1x8 seed=5") == run
    assert [path.read_text() for path in (run.config, run.plan, run.submit_script)] == before
    assert not run.code.is_symlink(), "a run that is submitted alone has its own copy"
    assert (the_sweep(shell).code / "000").is_dir()


@pytest.mark.parametrize("words", ["+cluster=1x8", SWEEP])
def test_a_python_that_no_job_will_find_is_refused(words: str, shell: Shell) -> None:
    shell.patch.setattr("slurm_train.code.job_python._OF_ONE_COMMAND", re.compile("python"))
    done = shell.types(words)
    assert done.code == 2 and "is gone when `uv run` ends" in done.err
    assert not list(shell.folder.glob("runs/*"))


def test_what_a_person_has_put_into_the_scripts_is_in_the_array_of_the_continued_sweep(shell: Shell) -> None:
    for element in read_table(shell.submits_sweep(SWEEP)):
        script = element.run.submit_script
        script.write_text(script.read_text().replace("#SBATCH --requeue\n", "#SBATCH --requeue\n#SBATCH -C 'a b'\n"))
    assert shell.types(f"resume {the_sweep(shell).sweep_id}").code == 0
    assert "\n#SBATCH -C 'a b'\n" in the_sweep(shell).array(1).script.read_text()


def test_the_same_sweep_again_submits_only_what_is_missing(shell: Shell) -> None:
    shell.submits_sweep(SWEEP)
    for index in (0, 4):
        finish(elements(shell)[index].run)
    shell.slurm.queue_many(["4711_1", "4711_2"], "RUNNING")
    shell.slurm.next_job(4720)
    done = shell.types(SWEEP)
    assert done.out == f"4720 {the_sweep(shell).path}\n"
    assert "2 runs are finished, 2 active; 2 to submit" in done.err
    assert "#SBATCH --array=0-1\n" in shell.slurm.said("submitted.sh")
    found = [(one.job, one.run.code.resolve().name) for one in elements(shell)]
    old, new = [(f"4711_{index}", "000") for index in (0, 1, 2, 4)], [("4720_0", "001"), ("4720_1", "001")]
    assert found == [*old[:3], new[0], old[3], new[1]]


def test_chunks_and_shapes_are_one_sbatch_each(shell: Shell) -> None:
    (shell.slurm.folder / "config.out").write_text("MaxArraySize            = 2\n")
    shell.types("-m +cluster=1x8,2x8 seed=range(3) run.name=n${cluster.nodes} sweep.max_parallel=2")
    said = (shell.slurm.said("sbatch_words") or "").splitlines()
    assert [("--dependency=afterany:4711" in line) for line in said] == [False, False, True, True]
    assert [len(read_runs(the_sweep(shell).array(number))) for number in range(4)] == [2, 1, 2, 1]


def test_a_submission_that_fails_half_way_says_what_is_there_and_goes_on_later(shell: Shell) -> None:
    (shell.slurm.folder / "config.out").write_text("MaxArraySize            = 4\n")
    sbatch, fails = shell.slurm.folder / "sbatch", shell.slurm.folder / "sbatch_fails"
    text = sbatch.read_text()
    sbatch.write_text(text.replace("_env; cat ", f"_env; touch {fails}; cat "))
    done, sweep = shell.types(SWEEP), the_sweep(shell)
    assert done.code == 2 and done.out == f"4711 {sweep.path}\n"
    first = [f"4711_{index}" for index in range(4)]
    assert [element.job for element in elements(shell)] == [*first, None, None]
    sbatch.write_text(text)
    fails.unlink()
    shell.slurm.queue_many(first, "RUNNING")
    shell.slurm.next_job(4712)
    shell.submits_sweep(SWEEP)
    assert [element.job for element in elements(shell)] == [*first, "4712_0", "4712_1"]


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_more_runs_than_may_be_queued_are_refused_with_what_to_do(is_asked_first: bool, shell: Shell) -> None:
    """The limit is that of QOSMaxSubmitJobPerUserLimit: four, of which an array takes one for each element."""
    words = (
        "QOSMaxSubmitJobPerUserLimit\\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
    )
    asks = "true" if is_asked_first else '[ "$1" != --test-only ]'
    too_many = f"for script; do :; done; if {asks} && grep -q 'array=0-[45]' \"$script\"; then"
    refusal = f"printf 'sbatch: error: {words}\\n' >&2; exit 1; fi"
    shell.slurm.wrap("sbatch", f'{too_many} {refusal}; exec {{real}} "$@"')
    err = shell.refuses("QOSMaxSubmitJobPerUserLimit", SWEEP)
    assert "Slurm counts 6 jobs, waiting ones too, and would take fewer: sweep fewer values at a time" in err
    assert shell.types(SWEEP.replace("range(3)", "range(2)")).code == 0
    shell.slurm.queue_many([f"4711_{index}" for index in range(4)], "RUNNING")
    assert "2 to submit" in shell.types(SWEEP).err


@pytest.mark.parametrize("is_known", [True, False])
def test_an_array_whose_id_was_lost_is_found_again_or_submitted_anew(is_known: bool, shell: Shell) -> None:
    """The submitter was killed between sbatch and the next line."""
    sweep = shell.submits_sweep(SWEEP)
    array = sweep.array(0)
    array.job.unlink()
    for element in elements(shell):
        element.run.job.unlink()
    squeue = shell.slurm.folder / "squeue"
    lines = "99_[0-5]|/elsewhere/x.sh\\n" + f"4711_[0-5]|{array.path}/submitted/x.sh\\n" * is_known
    answer = f'\ncase "$*" in *--me*) printf "{lines}"; exit;; esac\n'
    squeue.write_text(squeue.read_text().replace("\n", answer, 1))
    shell.slurm.queue_many([f"4711_{index}" for index in range(6)] if is_known else [], "RUNNING")
    shell.slurm.next_job(5000)
    done = shell.types(SWEEP)
    assert (done.code, done.out) == (0, "" if is_known else f"5000 {sweep.path}\n")
    assert [element.job for element in elements(shell)] == [f"{4711 if is_known else 5000}_{i}" for i in range(6)]


def test_a_full_disk_is_named_and_the_same_command_goes_on(shell: Shell) -> None:
    """As with a quota; the error of a descriptor has no path of its own."""

    def rename(source: Path, target: Path) -> None:
        if target.name == "submit.sh":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(target))
        source.rename(target)

    with shell.patch.context() as patch:
        patch.setattr("slurm_train.rundir.files.rename", rename)
        done = shell.types(SWEEP)
    assert (done.code, done.out) == (1, "")
    assert re.search(r"/gpt-stdlib/\w+/submit.sh cannot be written: Disk quota exceeded\nhint: make room", done.err)
    assert len(elements(shell)) == 6 and shell.types(SWEEP).code == 0
    assert {element.job for element in elements(shell)} == {f"4711_{index}" for index in range(6)}


def test_two_submitters_of_one_sweep_do_not_meet(shell: Shell) -> None:
    with (shell.submits_sweep(SWEEP).path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shell.refuses("being submitted or run by another command", SWEEP)


def test_waiting_says_when_runs_end_without_a_result(shell: Shell) -> None:
    done = shell.types(f"{SWEEP} --wait")
    assert done.code == 1 and "6 of 6 runs ended without a result" in done.err
