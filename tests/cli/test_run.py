from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.compose import compose
from slurm_train.config.frozen import load_config
from slurm_train.config.words import read_words
from slurm_train.launch.plan import plan_run
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.jobs import Holder, read_job, take_lock, this_process
from slurm_train.rundir.paths import RunDirectory
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.command_line import REPOSITORY


def run_of(folder: Path, *words: str) -> RunDirectory:
    return plan_run(compose(read_words(words)), cwd=folder, env={}).run


def test_a_submission_prints_job_and_run_and_nothing_else_on_stdout(shell: Any) -> None:
    run = run_of(shell.folder, "+cluster=4x8")
    done = shell.types("+cluster=4x8", "optim.lr_retune=none")
    assert (done.code, done.out) == (0, f"4711 {run.path}\n")
    assert shell.slurm.said("submitted.sh") == shell.slurm.said("tested.sh") == run.submit_script.read_text()
    record = read_job(run)
    assert record is not None and record.job_id == "4711"
    assert load_config(run.config).cluster is not None
    assert json.loads(run.provenance.read_text())["words"] == ["+cluster=4x8", "optim.lr_retune=none"]
    for text in ("global batch  32 = 1 local x 32 ranks x 1 accumulation", f"status {run.run_id}", "logs -f", "cancel"):
        assert text in done.err


@pytest.mark.parametrize("name", ["SBATCH_CLUSTERS", "SLURM_CLUSTERS"])
def test_a_shell_that_asks_for_another_cluster_submits_nothing(name: str, shell: Any) -> None:
    (shell.slurm.folder / "config.out").write_text("ClusterName             = cpu\nMaxArraySize            = 1001\n")
    shell.patch.setenv(name, "gpu2")
    for words in (("+cluster=1x1",), ("-m", "+cluster=1x1", "seed=1,2"), ("+cluster=1x1", "launch=interactive")):
        done = shell.types(*words)
        assert done.code == 2 and f"{name}=gpu2 asks for another cluster than cpu" in done.err, done.err
    assert shell.slurm.said("submitted.sh") is None and shell.left() == []
    shell.patch.setenv(name, "cpu")
    assert shell.types("+cluster=1x1").code == 0


def test_the_same_command_while_it_runs_points_to_it(shell: Any) -> None:
    shell.types("+cluster=4x8")
    run = run_of(shell.folder, "+cluster=4x8")
    for word in ("PENDING", "RUNNING", "COMPLETING"):
        shell.slurm.queue("4711", word)
        done = shell.types("+cluster=2x8")
        assert (done.code, done.out) == (2, "")
        assert f"{run.name}/{run.run_id} is active already: Slurm job 4711, {run.path}" in done.err
        assert f"`logs -f {run.run_id}` watch it" in done.err and "run.name=NAME or seed=N" in done.err


def test_the_same_command_after_its_job_has_ended_submits_again_at_any_size(shell: Any) -> None:
    shell.types("+cluster=4x8")
    shell.slurm.account("4711", "CANCELLED by 0")
    (shell.slurm.folder / "job_id").write_text("4712;cluster\n")
    run = run_of(shell.folder, "+cluster=4x8")
    done = shell.types("+cluster=2x8")
    assert done.out == f"4712 {run.path}\n"
    assert json.loads(run.job.read_text())["job_ids"] == ["4711", "4712"]
    assert "#SBATCH --nodes=2" in run.submit_script.read_text()


@pytest.mark.parametrize("words", [["+cluster=4x8"], ["run.processes=4"], []])
def test_a_finished_run_shows_its_result(words: list[str], shell: Any) -> None:
    run = run_of(shell.folder)
    run.path.mkdir(parents=True)
    run.result.write_text('{"eval_loss": 1.25}')
    done = shell.types(*words)
    assert (done.code, json.loads(done.out)) == (0, {"eval_loss": 1.25})
    assert f"{run.name}/{run.run_id} is finished: {run.path}" in done.err
    assert "add run.name=NAME, or seed=N" in done.err
    assert shell.slurm.said("submitted.sh") is None


def test_a_result_that_cannot_be_read_is_kept(shell: Any) -> None:
    run = run_of(shell.folder)
    run.path.mkdir(parents=True)
    run.result.write_text("{")
    done = shell.types("+cluster=4x8")
    assert done.code == 2 and "result.json cannot be read" in done.err and run.result.read_text() == "{"
    assert shell.slurm.said("submitted.sh") is None


@pytest.mark.parametrize("words", [["+cluster=4x8"], []])
def test_a_run_that_a_process_here_is_training_is_refused(words: list[str], shell: Any) -> None:
    run = run_of(shell.folder)
    run.path.mkdir(parents=True)
    take_lock(run, this_process(), is_alive=lambda _holder: True)
    done = shell.types(*words)
    assert done.code == 2 and "is being run by process" in done.err
    assert shell.slurm.said("submitted.sh") is None
    assert not run.config.exists(), "nothing of a run that somebody else is training is overwritten"


def test_a_dead_process_of_this_machine_does_not_block_the_job(shell: Any) -> None:
    run = run_of(shell.folder)
    run.path.mkdir(parents=True)
    dead = Holder(job_id=None, host=this_process().host, pid=4_194_300, started="1")
    take_lock(run, dead, is_alive=lambda _holder: True)
    assert shell.types("+cluster=4x8").code == 0
    assert not run.lock.exists(), "the node could not tell that the holder is dead"


def test_a_queued_run_is_not_started_here(shell: Any) -> None:
    shell.types("+cluster=4x8")
    shell.slurm.queue("4711", "PENDING")
    done = shell.types()
    assert done.code == 2 and "is active already: Slurm job 4711" in done.err


def test_a_script_runs_here_to_its_end_once(shell: Any) -> None:
    facts = "[os.environ['WORLD_SIZE'], *sys.argv[1:]]"
    code = f"import os, sys; open('seen_' + os.environ['RANK'], 'w').write(' '.join({facts}))"
    (shell.folder / "train.py").write_text(code)
    words = ["script=[train.py,--lr,1e-3]", "run.processes=2"]
    shell.patch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    done = shell.types(*words)
    run = run_of(shell.folder, *words)
    assert done.code == 0, done.err
    assert {path.name: path.read_text() for path in shell.folder.glob("seen_*")} == {
        "seen_0": "2 --lr 1e-3",
        "seen_1": "2 --lr 1e-3",
    }
    (line,) = read_ledger(run)
    assert (line["reason"], line["exit_code"], line["job_id"]) == ("done", 0, None)
    again = shell.types(*words)
    assert again.code == 0 and json.loads(again.out)["exit_code"] == 0
    assert len(read_ledger(run)) == 1


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

    def types(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *words]
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)

    try:
        for words in (("plan", "+cluster=1x1"), ("+cluster=1x1",), ("status",), ("doctor",)):
            done = types(*words)
            assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        (record,) = folder.glob("runs/*/*/provenance.json")
        assert json.loads(record.read_text())["user"] == str(uid), "written last, when the job is submitted"
    finally:
        shutil.rmtree(folder)
