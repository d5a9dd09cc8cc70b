"""A person in an allocation, and ranks in a container, on a real Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.events import errors_of, findings_of, read_preflight
from slurm_train.rundir.paths import RunDirectory
from tests.support import light_training
from tests.support.command_line import REPOSITORY, Person
from tests.support.ledgers import ledger_lines
from tests.support.light_training import undisturbed_losses
from tests.support.slurm_runs import all_logs, command, losses, wait_for_state, wait_until_finished, wait_until_step
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.full]
PATIENCE_S = 240.0
SMALL = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1")
STAND_IN = REPOSITORY / "tests" / "fakes" / "apptainer.sh"

PROBE = """
import json, os, pathlib
import slurm_train

facts = {"package": slurm_train.__file__, "sees_tests": os.path.exists(os.environ["PROBE_OUTSIDE"])}
facts |= {"export": os.environ.get("MY_OWN"), "nccl": os.environ.get("NCCL_DEBUG"), "cwd": os.getcwd()}
facts |= {"job": "SLURM_JOB_ID" in os.environ, "devices": os.environ.get("CUDA_VISIBLE_DEVICES")}
pathlib.Path(f"probe_{os.environ['SLURM_PROCID']}.json").write_text(json.dumps(facts))
"""


def only_run(person: Person) -> RunDirectory:
    (config,) = (person.folder / "runs").glob("*/*/config.yaml")
    return RunDirectory(config.parent)


def test_an_allocation_is_made_and_given_back(person: Person) -> None:
    light_training.add_program(person)
    words = ("+cluster=2x2", "launch=interactive", *light_training.words(), "preflight.enabled=true")
    done = person.types(*words, timeout_s=PATIENCE_S)
    run = only_run(person)
    assert done.code == 0, done.out + done.err + all_logs(run)
    assert ledger_lines(run)[-1]["world_size"] == 4
    assert read_preflight(run, 0)["table"], "the nodes were looked at"
    assert "step 12" in done.out and "salloc: Relinquishing job allocation" in done.err
    job = json.loads(run.job.read_text())["job_ids"][-1]
    wait_for_state(job, "COMPLETED", within_s=30)


def test_a_run_fits_into_a_larger_allocation_and_not_into_a_smaller_one(person: Person) -> None:
    light_training.add_program(person)
    typed = (sys.executable, "-m", "slurm_train", "launch=interactive", *light_training.words())
    refused = person.runs("salloc", *SMALL, *typed, "+cluster=2x2", timeout_s=PATIENCE_S)
    assert refused.code == 2 and "too small for this run: 1 nodes, 2 asked" in refused.err
    assert not (person.folder / "runs").exists()
    larger = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=4")
    done = person.runs("salloc", *larger, *typed, "+cluster=1x2", timeout_s=PATIENCE_S)
    run = only_run(person)
    assert done.code == 0, done.out + done.err + all_logs(run)
    assert ledger_lines(run)[-1]["world_size"] == 2


@pytest.fixture
def long_run(person: Person) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """An interactive run that takes its time, and its words."""
    light_training.add_program(person)
    words = ["+cluster=1x2", "launch=interactive", *light_training.words(steps=60, step_s=0.2)]
    process = subprocess.Popen(
        [sys.executable, "-m", "slurm_train", *words],
        cwd=person.folder,
        env=person.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    yield process, words
    if process.poll() is None:
        process.kill()
        process.communicate()


def test_ctrl_c_saves_and_the_same_words_continue(
    person: Person, long_run: tuple[subprocess.Popen[str], list[str]]
) -> None:
    process, words = long_run
    wait_for(lambda: list((person.folder / "runs").glob("*/*/config.yaml")), within_s=60, what="the run")
    run = only_run(person)
    wait_until_step(run, 3, within_s=PATIENCE_S)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    assert "saving and stopping" in output
    stopped_at = max(losses(run))
    assert f"asked to stop at step {stopped_at} " in output
    assert ledger_lines(run)[-1]["reason"] == "stopped"
    done = person.types(*words, timeout_s=PATIENCE_S)
    assert done.code == 0, done.out + done.err
    assert f"resuming from checkpoint_{stopped_at:07d}" in done.out
    assert losses(run) == undisturbed_losses(60)


@pytest.fixture
def image(tmp_path: Path) -> str:
    """An image of this machine's system and Python, without the package under test."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("the stand-in for apptainer needs root and unshare")
    path = tmp_path / "image.txt"
    python = Path(sys.executable).resolve().parents[1]
    folders = dict.fromkeys(["/usr", "/bin", "/lib", "/lib64", "/etc", sys.prefix, str(python)])
    path.write_text("".join(f"{folder}\n" for folder in folders if Path(folder).is_dir()))
    return str(path)


def contained(image: str) -> list[str]:
    return ["container=apptainer", f"container.image={image}", f"container.command={STAND_IN}"]


def test_ranks_in_a_container_see_the_run_and_not_the_host(person: Person, image: str, tmp_path: Path) -> None:
    (person.folder / "probe.py").write_text(PROBE)
    outside = tmp_path / "outside"
    outside.mkdir()
    env = {"MY_OWN": "secret-value", "PROBE_OUTSIDE": str(outside), "NCCL_DEBUG": "WARN"}
    words = ["+cluster=2x1", *contained(image), f"container.python={sys.executable}", "script=[probe.py]"]
    exports = "cluster.export=[MY_OWN,PROBE_OUTSIDE]"
    _, run = person.types(*words, exports, env=env).job_and_run
    wait_until_finished(run, within_s=PATIENCE_S)
    for rank in (0, 1):
        facts: dict[str, Any] = json.loads((person.folder / f"probe_{rank}.json").read_text())
        assert facts["package"] == "/opt/slurm_train/slurm_train/__init__.py"
        assert (facts["sees_tests"], facts["export"], facts["nccl"]) == (False, "secret-value", "WARN")
        assert (facts["job"], facts["devices"], facts["cwd"]) == (True, "0", str(person.folder))
    assert "secret-value" not in run.submit_script.read_text()


def test_a_container_is_requeued_from_outside(person: Person, image: str) -> None:
    light_training.add_program(person)
    training = (*light_training.words(steps=40, step_s=0.3), "preflight.enabled=true")
    words = ["+cluster=2x2", *contained(image), f"container.python={sys.executable}", *training]
    job, run = person.types(*words).job_and_run
    wait_until_step(run, 3, within_s=PATIENCE_S)
    command("scancel", "--signal=TERM", job)
    wait_for(lambda: len(ledger_lines(run)) == 2, within_s=PATIENCE_S, what="a second attempt")
    wait_until_finished(run, within_s=PATIENCE_S)
    assert losses(run) == undisturbed_losses(40)
    assert ledger_lines(run)[0]["action"] == "requeue"
    records = [read_preflight(run, attempt) for attempt in (0, 1)]
    assert all(record["table"] and not errors_of(findings_of(record)) for record in records), "inside an image as well"
