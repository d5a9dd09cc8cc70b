"""Words without a verb: a submission, or a run on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_train.config.compose import compose
from slurm_train.config.frozen import load_config
from slurm_train.config.words import read_words
from slurm_train.plan.plan import plan_run
from slurm_train.rundir.files import read_json
from slurm_train.rundir.jobs import clear_dead, read_job, take_lock, this_process
from slurm_train.rundir.paths import RunDirectory
from tests.cli.conftest import Shell
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.command_line import REPOSITORY
from tests.support.ledgers import ledger_lines


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
    for text in ("global batch  32 = 1 local x 32 ranks x 1 accumulation", f"status {run.run_id}", "logs -f", "cancel"):
        assert text in done.err


def test_the_same_command_points_to_a_job_and_submits_again_at_any_size_after_it(shell: Shell) -> None:
    run = shell.submits("+cluster=4x8")
    for word in ("PENDING", "RUNNING", "COMPLETING"):
        shell.slurm.queue("4711", word)
        for words in ("+cluster=2x8", ""):
            err = shell.refuses(f"is active already: Slurm job 4711, {run.path}", words)
            assert f"`logs -f {run.run_id}` watch it" in err and "run.name=NAME or seed=N" in err
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
    assert f"is finished: {run.path}" in done.err and f"add run.name={run.name}-2, or seed=N" in done.err
    (run.path.parent.parent / f"{run.name}-2").mkdir()
    assert f"add run.name={run.name}-3, or seed=N" in shell.types(words).err, "a name that is free"
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


def test_a_script_runs_here_to_its_end_once(shell: Shell) -> None:
    facts = "[os.environ['WORLD_SIZE'], *sys.argv[1:]]"
    code = f"import os, sys; open('seen_' + os.environ['RANK'], 'w').write(' '.join({facts}))"
    (shell.folder / "train.py").write_text(code)
    shell.patch.setenv("PYTHONPATH", str(REPOSITORY))
    words = ("script=[train.py,--lr,1e-3]", "run.processes=2")
    done = shell.types(*words)
    assert done.code == 0, done.err
    seen = {path.name: path.read_text() for path in shell.folder.glob("seen_*")}
    assert seen == {"seen_0": "2 --lr 1e-3", "seen_1": "2 --lr 1e-3"}
    again = shell.types(*words)
    assert again.code == 0 and json.loads(again.out)["exit_code"] == 0
    (line,) = ledger_lines(run_of(shell, *words))
    assert (line["reason"], line["exit_code"], line["job_id"]) == ("done", 0, None)


def test_a_uid_without_an_entry_in_passwd_can_plan_submit_and_look() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another uid")
    uid, folder = 54321, Path(tempfile.mkdtemp())
    slurm = SlurmPrograms(folder / "bin")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, uid, uid)
    env = {"PATH": slurm.path, "PYTHONPATH": str(REPOSITORY)}
    # The real uid is what passwd is asked about; the effective one may still read this Python.
    program = f"import os, sys; os.setreuid({uid}, 0); from slurm_train.verbs import run; sys.exit(run(sys.argv[1:]))"
    try:
        for words in (("plan", "+cluster=1x1"), ("+cluster=1x1",), ("status",), ("doctor",)):
            command = [sys.executable, "-c", program, *words]
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        (record,) = folder.glob("runs/*/*/provenance.json")
        assert json.loads(record.read_text())["user"] == str(uid), "written last, when the job is submitted"
    finally:
        shutil.rmtree(folder)


def test_a_program_without_standard_streams_submits_all_the_same(shell: Shell) -> None:
    command = f'exec "{sys.executable}" -m slurm_train +cluster=1x8 <&- >&- 2>&-'
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run(["sh", "-c", command], cwd=shell.folder, env=env, check=False).returncode == 0
    assert read_job(run_of(shell, "+cluster=1x8")).job_id == "4711"


@pytest.mark.parametrize("verb", ["", "plan "])
def test_slurm_is_asked_each_question_once(shell: Shell, verb: str) -> None:
    asked = shell.folder / "asked"
    for program in ("sinfo", "scontrol", "sacctmgr"):
        shell.slurm.wrap(program, f'echo "{program} $*" >> {asked}; exec {{real}} "$@"')
    done = shell.types(f"{verb}+cluster=4x8")
    questions = asked.read_text().splitlines()
    assert done.code == 0 and len(questions) >= 6
    assert len(questions) == len(set(questions)), questions
