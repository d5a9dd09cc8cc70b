from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.rundir.events import write_preflight
from slurm_train.rundir.layout import RunDirectory
from slurm_train.supervise import monitor as told
from slurm_train.supervise.monitor import Monitor, findings_relay
from tests.support.waiting import wait_for


def record(*lines: str) -> dict[str, object]:
    return {"findings": [{"code": "X", "line": line} for line in lines]}


def test_each_finding_is_said_once_while_the_ranks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "_RELAY_EVERY_S", 0.02)
    run, said = RunDirectory(tmp_path), list[str]()
    run.attempt_logs(0).mkdir(parents=True)
    monitor = Monitor()
    monitor.add(findings_relay(run, 0, say=said.append))
    with monitor.running():
        assert said == []
        write_preflight(run, 0, record("one"))
        wait_for(lambda: said == ["one"], within_s=5, what="the first line", poll_s=0.02)
        write_preflight(run, 0, record("one", "two"))
        wait_for(lambda: len(said) == 2, within_s=5, what="the second line", poll_s=0.02)
    assert said == ["one", "two"]


def test_what_is_written_last_is_said_at_the_end(tmp_path: Path) -> None:
    run, said = RunDirectory(tmp_path), list[str]()
    run.attempt_logs(0).mkdir(parents=True)
    monitor = Monitor()
    monitor.add(findings_relay(run, 0, say=said.append))
    with monitor.running():
        write_preflight(run, 0, record("late"))
    assert said == ["late"]
