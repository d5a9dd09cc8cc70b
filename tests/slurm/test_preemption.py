from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import pytest

from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.preemption import Preemption, duration_s, end_and_limit, grace_s, read_preemption


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:00:15", 15.0),
        ("5 sec", 5.0),
        ("30", 30.0),
        ("0", 0.0),
        ("02:30", 150.0),
        ("1-02:00:01", 93601.0),
        ("UNLIMITED", None),
        ("", None),
        ("N/A", None),
    ],
)
def test_durations_as_slurm_writes_them(text: str, seconds: float | None) -> None:
    assert duration_s(text) == seconds


def test_end_and_length_of_a_limit() -> None:
    job = {"StartTime": "2026-11-20T12:49:37", "EndTime": "2026-11-20T12:54:37"}
    assert end_and_limit(job) == (datetime(2026, 11, 20, 12, 54, 37).timestamp(), 300.0)  # local
    assert end_and_limit(job | {"EndTime": "Unknown"}) == (None, None)
    assert end_and_limit({}) == (None, None)


QOS = {"GraceTime": "00:00:15", "PreemptMode": "requeue"}
PARTITION = {"GraceTime": "40", "PreemptMode": "CANCEL"}


@pytest.mark.parametrize(
    ("preempt_type", "change", "expected"),
    [
        ("preempt/qos", {}, 15.0),
        ("preempt/partition_prio", {}, 40.0),
        ("preempt/none", {}, 0.0),
        ("", {}, 0.0),
        ("preempt/qos", {"PreemptMode": "OFF"}, 0.0),
        ("preempt/partition_prio", {"PreemptMode": "SUSPEND"}, 0.0),
        ("preempt/qos", {"GraceTime": ""}, 0.0),
    ],
)
def test_grace_is_that_of_the_side_that_preempts(preempt_type: str, change: dict[str, str], expected: float) -> None:
    assert grace_s(preempt_type, qos=QOS | change, partition=PARTITION | change) == expected


@pytest.mark.parametrize(
    ("kind", "cluster_mode", "change", "outcome", "mode"),
    [
        ("preempt/qos", "CANCEL", {}, "requeued", "REQUEUE"),
        ("preempt/qos", "CANCEL", {"PreemptMode": "cluster"}, "cancelled", "CANCEL"),
        ("preempt/qos", "REQUEUE", {"PreemptMode": ""}, "requeued", "REQUEUE"),
        ("preempt/partition_prio", "REQUEUE", {}, "cancelled", "CANCEL"),
        ("preempt/partition_prio", "REQUEUE", {"PreemptMode": "OFF"}, "never", "OFF"),
        ("preempt/partition_prio", "REQUEUE", {"PreemptMode": "GANG,SUSPEND"}, "suspended", "GANG,SUSPEND"),
        ("preempt/none", "OFF", {}, "never", "OFF"),
        ("", "", {}, "never", "OFF"),
    ],
)
def test_what_a_preemption_does(kind: str, cluster_mode: str, change: dict[str, str], outcome: str, mode: str) -> None:
    settings = {"PreemptType": kind, "PreemptMode": cluster_mode, "KillWait": "30 sec"}
    found = read_preemption(settings, qos=QOS | change, partition=PARTITION | change)
    assert (found.outcome, found.mode, found.kill_wait_s) == (outcome, mode, 30.0)


@pytest.mark.parametrize(
    ("mode", "kill_wait_s", "words"),
    [
        ("REQUEUE", 5.0, "preemption requeues here: 15 s grace, then 5 s to end in"),
        ("REQUEUE", None, "preemption requeues here: 15 s grace"),
        (
            "CANCEL",
            30.0,
            "preemption cancels here (15 s grace, then 30 s to end in): requeued within that time, else another job "
            "takes over",
        ),
        ("SUSPEND", 5.0, "preemption suspends here: the run waits in memory and goes on in the same attempt"),
        ("OFF", 30.0, "nobody preempts here; 30 s to end in"),
        ("OFF", None, "nobody preempts here"),
    ],
)
def test_preemption_in_words(mode: str, kill_wait_s: float | None, words: str) -> None:
    assert Preemption(by="qos", mode=mode, grace_s=15.0, kill_wait_s=kill_wait_s).in_words == words


# 02:30 for the second time on the night on which summer time ends.
REPEATED = 1792891800


def test_the_end_of_a_job_in_the_hour_that_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    form = '+"${SLURM_TIME_FORMAT:-%Y-%m-%dT%H:%M:%S}"'
    start, end = (f"$(date -d @{time_s} {form})" for time_s in (REPEATED - 7200, REPEATED))
    scontrol.write_text(f'#!/bin/sh\necho "JobId=7 JobName=x"; echo "   StartTime={start} EndTime={end}"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert datetime.fromtimestamp(REPEATED).isoformat() == "2026-10-25T02:30:00"
        job = SlurmCommands({"PATH": f"{tmp_path}:/usr/bin:/bin", "TZ": "Europe/Berlin"}).show_job("7")
        assert end_and_limit(job) == (REPEATED, 7200)
        # Slurm's usual form still is read, where it is not ambiguous.
        job = {"StartTime": "2026-10-25T05:00:00", "EndTime": "2026-10-25T05:30:00"}
        assert end_and_limit(job) == (REPEATED + 3 * 3600, 1800)
    finally:
        monkeypatch.undo()
        time.tzset()
