"""Runs as Python values: the same submission as the command line's, and what a notebook asks of a handle."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import slurm_train
from slurm_train.cli.handles import Run, Sweep
from slurm_train.errors import ConfigError, RunError, SlurmTrainError, TimedOutError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.status.run_status import RunState
from tests.cli.conftest import Shell
from tests.support.run_facts import attempt


def submits(*words: str, **how: Any) -> Run:
    found = slurm_train.submit(words, **how)
    assert isinstance(found, Run)
    return found


def ends(run: Run, note: str = "rank 3 on node2: ValueError: no") -> None:
    lines = attempt(0, reason="failed", action="stop", note=note, time_unix_s=time.time() + 60)
    (run.path / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_submission_is_that_of_the_command_line_and_prints_nothing(shell: Shell) -> None:
    shell.capture.readouterr()
    run = submits("+cluster=2x4", "optim.lr=3e-4")
    assert shell.capture.readouterr() == ("", "")
    assert (run.job_id, run.path.name) == ("4711", run.run_id)
    assert "--nodes=2" in shell.slurm.said("submitted.sh")
    shell.slurm.queue("4711", "PENDING", reason="Resources")
    status = run.status()
    assert (status.state, status.job_id, status.max_steps) == (RunState.QUEUED, "4711", 300)
    assert slurm_train.find("4711") == slurm_train.find(run.run_id) == slurm_train.find(str(run.path)) == run
    run.cancel()
    assert (shell.slurm.said("cancelled"), shell.capture.readouterr()) == ("4711\n", ("", ""))


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        (["train.max_steps=3"], ConfigError, "would be trained here"),
        (["-m", "seed=1,2"], ConfigError, "would be trained here"),
        (["+cluster=1x1", "--cfg", "job"], ConfigError, "submit nothing"),
    ],
)
def test_what_is_no_submission_is_refused_before_anything_is_written(
    words: list[str], kind: type[SlurmTrainError], text: str, shell: Shell
) -> None:
    with pytest.raises(kind, match=text):
        slurm_train.submit(words)
    assert shell.left() == []


def after(seconds: float, act: Callable[[], object]) -> None:
    threading.Timer(seconds, act).start()


def test_waiting_ends_with_the_run_or_with_the_time(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurm_train.cli.handles._POLL_S", 0.05)
    run = submits("+cluster=2x4")
    shell.slurm.queue("4711", "RUNNING")
    with pytest.raises(TimedOutError, match=r"not ended within 0\.2 s: gpt-stdlib/\w+ is running") as caught:
        run.result(timeout_s=0.2)
    assert isinstance(caught.value, TimeoutError)
    after(0.3, lambda: (run.path / "result.json").write_text('{"eval_loss": 1.25}'))
    assert run.result(timeout_s=30) == {"eval_loss": 1.25}
    assert run.wait().is_finished


def test_a_failed_run_has_no_result_and_says_why(shell: Shell) -> None:
    run = submits("+cluster=2x4")
    assert run.logs() == ""
    ends(run)
    files = RunDirectory(run.path)
    (files.epochs).mkdir()
    (files.epochs / "attempt_0").write_text("{}")
    files.attempt_logs(0).mkdir(parents=True)
    files.rank_log(0, 0).write_bytes(b"step 1\n\xff")
    with pytest.raises(RunError, match="ended without a result: failed: rank 3 on node2: ValueError: no"):
        run.result()
    assert run.wait().state is RunState.FAILED
    assert run.logs() == "step 1\n�"
    with pytest.raises(RunError, match="has no attempt 7"):
        run.logs(attempt=7)


def test_a_sweep_is_one_handle_of_all_its_runs(shell: Shell) -> None:
    sweep = slurm_train.submit(["-m", "+cluster=1x8", "optim.lr=1e-3,3e-4"])
    assert isinstance(sweep, Sweep) and shell.capture.readouterr() == ("", "")
    assert slurm_train.find(sweep.sweep_id) == slurm_train.find("4711") == sweep
    assert [one.job_id for one in sweep.runs] == ["4711_0", "4711_1"]
    shell.slurm.queue_many(["4711_0", "4711_1"], "RUNNING")
    sweep.cancel()
    assert shell.slurm.said("cancelled") == "4711\n"
    for number, run in enumerate(sweep.runs):
        (run.path / "result.json").write_text(json.dumps({"loss": number}))
    assert sweep.result() == [{"loss": 0}, {"loss": 1}]
