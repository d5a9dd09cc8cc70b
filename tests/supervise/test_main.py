"""One attempt in a job, by the verb of its batch script with Slurm's commands as small programs; and one here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from slurm_train.config.frozen import dump_config, load_config
from slurm_train.config.schema import ClusterSection, RequeueSection, RunConfig
from slurm_train.rundir.jobs import Holder, read_job, release_lock, take_lock, this_process
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.main import supervise_here
from slurm_train.tools.trackers import build_trackers
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.command_line import Done, Person
from tests.support.ledgers import ledger_lines
from tests.support.run_facts import RunFacts
from tests.support.waiting import wait_for

JOB = {
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "node[2-3]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NAME": "gpt",
}
RUNNING = "JobId=77 JobName=gpt\n   JobState=RUNNING Reason=None Restarts=0\n   PreemptTime=None\n"

# Answers for every node when it is asked whether it sees the run; else it is the step of the ranks.
SRUN = """
case " $* " in
  *config.yaml*) for node in node2 node3; do echo "$(cat {here}/sees) $node"; done;;
  *) printf '%s\\n' "$@" > {here}/words; env > {here}/env; cp {run}/result.new {run}/result.json 2>/dev/null
     exit "$(cat {here}/code)";;
esac
"""


class Batch:
    """An allocation of two nodes with a run in it."""

    def __init__(self, person: Person, slurm: SlurmPrograms, run: RunDirectory) -> None:
        self.run = run
        self.run.logs.mkdir(exist_ok=True)
        self.here = slurm.folder
        self.person = person
        self._write("srun", SRUN.format(here=self.here, run=self.run.path))
        self._write("scontrol", f"cat {self.here}/show_job")
        self.says(sees="fine", code="0", show_job=RUNNING)

    def _write(self, name: str, body: str) -> None:
        (self.here / name).write_text(f"#!/bin/sh\n{body}\n")

    def says(self, **files: str) -> None:
        for name, text in files.items():
            (self.here / name).write_text(text)

    def supervises(self, **env: str) -> Done:
        words = ["supervise", str(self.run.path), "--", "srun", f"--output={self.run.logs}/attempt_{{attempt}}/r", "x"]
        return self.person.types(*words, env={**JOB, **env, "PATH": f"{self.here}:/usr/bin:/bin"})

    def step_env(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in (self.here / "env").read_text().splitlines() if "=" in line)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmPrograms:
    """Slurm's commands on the PATH, outside any job."""
    slurm = SlurmPrograms(tmp_path / "slurm" / "bin")
    monkeypatch.setenv("PATH", slurm.path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return slurm


@pytest.fixture
def person(tmp_path: Path, slurm: SlurmPrograms) -> Person:
    folder = tmp_path / "project"
    folder.mkdir()
    return Person(folder)


@pytest.fixture
def batch(person: Person, slurm: SlurmPrograms) -> Batch:
    run = RunDirectory(person.folder / "runs" / "gpt-stdlib" / "3f9a1c07")
    return Batch(person, slurm, RunFacts(job_ids=("76",)).write(run))


def test_the_step_gets_its_attempt_and_where_to_meet(batch: Batch) -> None:
    (batch.run.path / "result.new").write_text("{}")
    left_over = {"RANK": "9", "SRUN_CPUS_PER_TASK": "4", "SLURM_STEP_NODELIST": "node9"}
    done = batch.supervises(**left_over)
    assert done.code == 0, done.err
    env = batch.step_env()
    assert (env["MASTER_ADDR"], env["SLURM_TRAIN_ATTEMPT"]) == ("node2", "0"), "not the step of an enclosing shell"
    assert not set(left_over) & set(env) and env["SLURM_JOB_ID"] == "77"
    assert 1024 < int(env["MASTER_PORT"]) < 65536
    assert (batch.here / "words").read_text().split() == [f"--output={batch.run.logs}/attempt_0/r", "x"]
    (line,) = ledger_lines(batch.run)
    assert (line["reason"], line["nodes"], line["world_size"]) == ("done", ["node2", "node3"], 8)
    record = read_job(batch.run)
    assert record.job_id == "77", "a script submitted by hand is this run's job from now on"


def test_a_job_that_does_not_get_the_run_does_not_hide_the_one_that_has_it(batch: Batch) -> None:
    (batch.here / "squeue.out").write_text("80|RUNNING|None|node9|N/A|N/A|main\n")
    take_lock(batch.run.lock, Holder(job_id="80", host="node9", pid=5, started="1"), is_alive=lambda _holder: True)
    batch.run.stop_file.touch()
    done = batch.supervises()
    assert done.code == 2 and f"{batch.run.path} is being run by Slurm job 80" in done.err
    record = read_job(batch.run)
    assert record.job_ids == ("76",)
    assert batch.run.stop_file.read_text() == "", "what is asked of another job is not this one's business"


def test_a_job_waits_for_whoever_writes_the_run(batch: Batch) -> None:
    (batch.run.path / "result.new").write_text("{}")
    writer = this_process()
    take_lock(batch.run.lock, writer, is_alive=lambda _holder: True)
    release = threading.Timer(2.0, release_lock, (batch.run.lock, writer))
    release.start()
    done = batch.supervises()
    assert done.code == 0, done.err
    release.join()


def test_a_job_that_takes_over_from_a_cancelled_one_does_not_begin(batch: Batch) -> None:
    batch.run.stop_file.write_text(json.dumps({"jobs": ["76"], "newest_job": 76}))
    done = batch.supervises(TRAIN_CONTINUES_JOB="76")
    assert done.code == 1 and ledger_lines(batch.run) == [] and batch.run.stop_file.exists(), done.err


@pytest.mark.parametrize(("state", "begins"), [("CANCELLED by 0", False), ("FAILED", True), (None, True)])
def test_a_job_asks_slurm_whether_the_one_before_was_cancelled(
    batch: Batch, slurm: SlurmPrograms, state: str | None, begins: bool
) -> None:
    """By `scancel` alone: no file of the run says so."""
    (batch.run.path / "result.new").write_text("{}")
    if state is not None:
        slurm.account("76", state)
    done = batch.supervises(TRAIN_CONTINUES_JOB="76")
    assert (done.code == 0, bool(ledger_lines(batch.run))) == (begins, begins), done.err
    assert ("job 76, which this one was to continue, was cancelled" in done.err) is not begins
    assert (batch.here / "words").exists() is begins, "whether ranks were started"


def test_nodes_that_do_not_see_the_run_end_the_job_at_once_by_name(batch: Batch) -> None:
    batch.says(sees="blind")
    done = batch.supervises()
    text = f"nodes node2, node3 do not see the run directory {batch.run.path}"
    assert done.code == 2 and text in done.err
    assert text in (batch.run.attempt_logs(0) / "batch.log").read_text()
    assert not (batch.here / "words").exists(), "no rank was started"
    assert ledger_lines(batch.run)[0]["exit_code"] == 2


def test_a_slurm_that_does_not_answer_does_not_lose_the_ledger(batch: Batch) -> None:
    batch._write("scontrol", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    batch.says(code="75")
    config = RunConfig(cluster=ClusterSection(), requeue=RequeueSection(controller_timeout_s=1))
    batch.run.config.write_text(dump_config(config))
    done = batch.supervises()
    assert done.code == 75
    assert "Slurm does not give the record of job 77" in done.err
    assert ledger_lines(batch.run)[0]["reason"] == "unknown"


def test_outside_a_job_it_says_where_it_belongs(batch: Batch) -> None:
    done = batch.supervises(SLURM_JOB_ID="")
    assert done.code == 2 and "SLURM_JOB_ID is not set" in done.err
    assert ledger_lines(batch.run) == []


def plant(code: Path, canary: Path) -> None:
    """Puts modules into a copy of code that Python or the supervisor would import if it looked there."""
    for name in ("sitecustomize", "yaml", "json", "slurm_train/__init__"):
        (code / name).parent.mkdir(exist_ok=True)
        (code / f"{name}.py").write_text(f"open({str(canary)!r}, 'a').write({name!r})\n")


@pytest.mark.parametrize("is_open", [False, True])
def test_no_code_of_a_changed_copy_is_run_before_it_is_refused(
    person: Person, slurm: SlurmPrograms, is_open: bool
) -> None:
    job_id, run = person.types("+cluster=2x4").job_and_run
    batch = Batch(person, slurm, run)
    canary = person.folder / "canary"
    plant(run.code, canary)
    run.code.chmod(0o777 if is_open else 0o700)
    env = person.environment() | JOB | {"SLURM_JOB_ID": job_id, "PATH": f"{batch.here}:/usr/bin:/bin"}
    # An empty part of PYTHONPATH means the working directory, also to Python's own start.
    env["PYTHONPATH"] = f":{env.get('PYTHONPATH', '')}"
    done = subprocess.run(["bash", run.submit_script], cwd="/", env=env, capture_output=True, text=True, check=False)
    said = "another user could have written what would run" if is_open else "is not what was submitted"
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not canary.exists() and not (batch.here / "words").exists(), "neither the supervisor nor a rank has begun"


def test_ranks_of_a_changed_copy_are_not_started_here(person: Person) -> None:
    (person.folder / "train.py").write_text("open('ran', 'a').write('x')\n")
    assert person.types("script=[train.py]", "run.processes=1").code == 0
    (path,) = person.folder.glob("runs/*/*/config.yaml")
    run = RunDirectory(path.parent)
    canary = person.folder / "canary"
    (run.code / "yaml.py").write_text(f"open({str(canary)!r}, 'w')\n")
    run.result.unlink(missing_ok=True)
    env = dict(os.environ)
    code = supervise_here(run, load_config(run.config), world_size=1, env=env, build_trackers=build_trackers)
    assert code == 2 and not canary.exists()
    assert not run.rank_log(1, 0).exists(), "no rank was started, which would go on by itself"


def test_a_preflight_alone_is_not_done_here(person: Person) -> None:
    """Ranks of one machine have none."""
    done = person.types("preflight.only=true", "run.processes=1")
    assert done.code == 1 and not list(person.folder.glob("runs/.doctor/*/result.json")), done.err


SLEEPER = """
import os, signal, time
def stop(number, frame):
    open("stopped_" + os.environ["RANK"], "w").write(str(number))
    os._exit(75)
signal.signal(signal.SIGUSR2, stop)
open("ready_" + os.environ["RANK"], "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_here_is_a_polite_stop(number: signal.Signals, person: Person) -> None:
    (person.folder / "train.py").write_text(SLEEPER)
    argv = [sys.executable, "-m", "slurm_train", "script=[train.py]", "run.processes=2"]
    env = person.environment()
    trainer = subprocess.Popen(argv, cwd=person.folder, env=env, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list(person.folder.glob("ready_*"))) == 2, within_s=60, what="both ranks", poll_s=0.05)
    trainer.send_signal(number)
    _, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 75, err
    stopped = {path.name: path.read_text() for path in person.folder.glob("stopped_*")}
    assert stopped == {name: str(int(signal.SIGUSR2)) for name in ("stopped_0", "stopped_1")}
    (run,) = (RunDirectory(path.parent) for path in person.folder.glob("runs/*/*/config.yaml"))
    (line,) = ledger_lines(run)
    assert (line["reason"], line["exit_code"]) == ("stopped", 75)
    assert not run.lock.exists() and not run.result.exists()
    assert json.loads(run.plan.read_text())["world"]["size"] == 2
