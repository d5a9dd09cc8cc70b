"""Words without a verb: a submission, or a run on this machine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slurm_train.config.compose import compose
from slurm_train.config.frozen import load_config
from slurm_train.config.words import read_words
from slurm_train.launch.plan import plan_run
from slurm_train.rundir.files import read_json
from slurm_train.rundir.jobs import clear_dead, read_job, take_lock, this_process
from slurm_train.rundir.paths import RunDirectory
from tests.cli.conftest import Shell


def run_of(shell: Shell, *words: str) -> RunDirectory:
    return plan_run(compose(read_words(words)), cwd=shell.folder, env={}).run


def test_a_submission_prints_job_and_run_and_nothing_else_on_stdout(shell: Shell) -> None:
    run, words = run_of(shell, "+cluster=4x8"), "+cluster=4x8 optim.lr_retune=none"
    done = shell.types(words)
    assert (done.code, done.out) == (0, f"4711 {run.path}\n")
    assert shell.slurm.said("submitted.sh") == shell.slurm.said("tested.sh") == run.submit_script.read_text()
    record = read_job(run)
    assert record.job_id == "4711"
    assert load_config(run.config).cluster is not None
    assert json.loads(run.provenance.read_text())["words"] == words.split()


def test_the_same_command_points_to_a_job_and_submits_again_at_any_size_after_it(shell: Shell) -> None:
    run = shell.submits("+cluster=4x8")
    for word in ("PENDING", "RUNNING", "COMPLETING"):
        shell.slurm.queue("4711", word)
        for words in ("+cluster=2x8", ""):
            shell.refuses(f"is active already: Slurm job 4711, {run.path}", words)
    shell.slurm.queue("4711", "CANCELLED")
    shell.slurm.next_job(4712)
    assert shell.submits("+cluster=2x8") == run
    assert read_json(run.job)["job_ids"] == ["4711", "4712"]
    assert "#SBATCH --nodes=2" in run.submit_script.read_text()


@pytest.mark.parametrize("words", ["+cluster=4x8", "run.processes=4"])
def test_a_finished_run_shows_its_result(words: str, shell: Shell) -> None:
    run = run_of(shell)
    run.path.mkdir(parents=True)
    run.result.write_text("{")
    shell.refuses("result.json cannot be read", words)
    assert run.result.read_text() == "{", "it is kept"
    run.result.write_text('{"eval_loss": 1.25}')
    done = shell.types(words)
    assert (done.code, json.loads(done.out)) == (0, {"eval_loss": 1.25})
    assert shell.slurm.said("submitted.sh") is None


def test_a_process_that_trains_the_run_keeps_it_until_it_is_dead(shell: Shell) -> None:
    run, mine = run_of(shell), this_process()
    run.path.mkdir(parents=True)
    take_lock(run.lock, mine, is_alive=lambda _holder: True)
    for words in ("+cluster=4x8", ""):
        shell.refuses("is being run by process", words)
    assert shell.slurm.said("submitted.sh") is None and not run.config.exists(), "nothing is overwritten"
    clear_dead(run.lock, is_alive=lambda _holder: False)
    take_lock(run.lock, replace(mine, pid=4_194_300, started="1"), is_alive=lambda _holder: True)
    assert shell.types("+cluster=4x8").code == 0
    assert not run.lock.exists(), "the node could not tell that the holder is dead"
