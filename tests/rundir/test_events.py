"""What happens in a run: changes, saves, failures of ranks, findings of the preflight, bad nodes."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.events import (
    BAD_NODES_PARTS,
    AcceptedChange,
    FailureMark,
    SaveLog,
    add_bad_nodes,
    bad_nodes_of,
    codes_of,
    covers_code,
    covers_config,
    covers_data,
    errors_of,
    findings_of,
    first_mark,
    forgive_nodes,
    leave_mark,
    list_file,
    message_of,
    place_of,
    read_bad_nodes,
    read_changes,
    read_preflight,
    read_saves,
    record_change,
    would_last,
    write_preflight,
)
from slurm_train.rundir.ledger import Start
from slurm_train.rundir.paths import RunDirectory
from tests.support.ledgers import ledger_lines

LR = AcceptedChange(number=1, step=40, config={"optim.lr": [0.3, 0.1]})
CODE = AcceptedChange(number=2, step=80, code={"old": "a", "new": "b", "files": ["x.py: +1 -0"]})
BACK = AcceptedChange(number=3, step=90, config={"optim.lr": [0.1, 0.3]}, data={"old": "d1", "new": ""})
START = Start(job_id=None, restart_count=0, nodes=("n1",), world_size=1)


def test_an_attempt_says_which_recorded_changes_it_is_the_first_to_carry(run: RunDirectory) -> None:
    open_attempt(run, START)
    for change in (LR, CODE, BACK):
        record_change(run, change)
    assert [(item.number, item.step) for item in read_changes(run)] == [(1, 40), (2, 80), (3, 90)]
    open_attempt(run, START)
    open_attempt(run, START)
    facts = [(entry.get("changes"), entry.get("accepted")) for entry in ledger_lines(run)]
    assert facts == [(None, None), (3, ["optim.lr", "code", "optim.lr", "data"]), (3, None)]


def test_only_the_newest_value_is_covered() -> None:
    assert covers_config([LR], "optim.lr", 0.1) and not covers_config([LR], "seed", 0)
    assert covers_config([LR, CODE, BACK], "optim.lr", 0.3) and not covers_config([LR, CODE, BACK], "optim.lr", 0.1)
    assert covers_code([LR, CODE], "b") and not covers_code([LR, CODE], "c") and not covers_code([], "b")
    assert covers_data([BACK], old="d1", new="anything") and not covers_data([BACK], old="d2", new="d1")


def test_a_save_has_one_line_and_a_disk_that_refuses_it_costs_nothing(run: RunDirectory) -> None:
    log = SaveLog(run, 3, now=lambda: 17.0)
    log.stalled(10, 0.25)
    log.stalled(10, 0.25)
    log.ended(10, num_bytes=1000, save_s=2.0)
    log.ended(10, num_bytes=0, save_s=0.1)
    log.ended(20, num_bytes=0, save_s=1.0, error="no space left")
    first, failed = read_saves(run)
    assert first == {"attempt": 3, "step": 10, "bytes": 1000, "stall_s": 0.5, "save_s": 2.0, "time_unix_s": 17.0}
    assert (failed["step"], failed["stall_s"], failed["error"]) == (20, 0.0, "no space left")
    SaveLog(RunDirectory(run.path / "gone"), 0).ended(10, num_bytes=5, save_s=1.0)


def test_the_earliest_mark_is_the_cause_and_repeats_no_secret(run: RunDirectory) -> None:
    token = "hf_" + "aB3" * 9
    first = FailureMark(rank=3, host="node2", exit_code=1, message=f"\x1b[31m401\x1b[0m for\r{token}")
    leave_mark(run, 0, first)
    assert first_mark(run, 0) is None, "a run directory that is gone is no second failure"
    run.attempt_logs(0).mkdir(parents=True)
    leave_mark(run, 0, first)
    leave_mark(run, 0, FailureMark(rank=0, host="node1", exit_code=1, message="connection closed by peer"))
    mark = first_mark(run, 0)
    assert mark is not None and str(mark.cause) == "rank 3 on node2: 401 for [redacted]"


LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:31245"


def test_a_rank_that_lost_another_one_is_no_cause_where_one_has_more_to_say(run: RunDirectory) -> None:
    run.attempt_logs(0).mkdir(parents=True)
    for rank, message in ((0, LOST), (3, "ValueError: bad label 17"), (1, "KeyError: 'x'")):
        leave_mark(run, 0, FailureMark(rank=rank, host=f"node{rank}", exit_code=1, message=message))
    mark = first_mark(run, 0)
    assert mark is not None and str(mark.cause) == "rank 3 on node3: ValueError: bad label 17"


@pytest.mark.parametrize(
    ("message", "tells_of_loss"),
    [
        (LOST, True),
        ("DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error", True),
        ("DistBackendError: NCCL communicator was aborted on rank 3.", True),
        ("DistNetworkError: failed to recv, got 0 bytes", True),
        ("DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined.", True),
        ("RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting", True),
        ("RuntimeError: Timed out waiting 1800000ms for recv operation to complete", True),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error", False),
        ("ValueError: the connection string is empty", False),
        ("AcceleratorError: CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_what_tells_only_of_a_loss(message: str, tells_of_loss: bool) -> None:
    assert FailureMark(rank=0, host="n", exit_code=1, message=message).tells_of_loss is tells_of_loss


IN_WORKER = """Caught ValueError in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "/x/site-packages/torch/utils/data/_utils/worker.py", line 364, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/data.py", line 9, in __getitem__
    raise ValueError
    ^^^^^^^^^^^^^^^^
ValueError: cannot decode image_37.jpg
It has no header.
"""
SPAWNED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/x/site-packages/torch/multiprocessing/spawn.py", line 88, in _wrap
    fn(i, *args)
  File "/home/me/train.py", line 12, in work
    raise KeyError("txt")
KeyError: 'txt'
"""


class _Speechless(Exception):
    def __str__(self) -> str:
        raise AttributeError


@pytest.mark.parametrize(
    ("err", "message", "place"),
    [
        (ValueError("odd\nand more"), "ValueError: odd", "<string>:1 in <module>"),
        (ValueError(IN_WORKER), "ValueError: cannot decode image_37.jpg", "data.py:9 in __getitem__"),
        (RuntimeError(SPAWNED), "KeyError: 'txt'", "train.py:12 in work"),
        (
            RuntimeError('Error(s) in loading state_dict for Net:\n\tMissing key(s): "a".\n\tUnexpected: "b".'),
            'RuntimeError: Error(s) in loading state_dict for Net: Missing key(s): "a".',
            "<string>:1 in <module>",
        ),
        (
            RuntimeError("[pair.cc:553] Connection closed by peer [10.0.0.2]:7. This is typically caused by a worker"),
            "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:7",
            None,
        ),
        (AssertionError(), "AssertionError", "<string>:1 in <module>"),
        (_Speechless(), "_Speechless: its message cannot be read (AttributeError)", "<string>:1 in <module>"),
        (
            RuntimeError("CUDA error: illegal memory access"),
            "RuntimeError: CUDA error: illegal memory access",
            None,
        ),
        (
            RuntimeError("CUDA error: device-side assert triggered"),
            "RuntimeError: CUDA error: device-side assert triggered",
            "<string>:1 in <module>",
        ),
        (
            ImportError("libcuda.so.1: cannot open shared object file: No such file or directory"),
            "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
            None,
        ),
        (
            ImportError("/lib64/libc.so.6: version `GLIBC_2.34' not found (required by x.so)"),
            "ImportError: /lib64/libc.so.6: version `GLIBC_2.34' not found (required by x.so)",
            None,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_exception_is_told_in_one_line_with_its_place(err: Exception, message: str, place: str | None) -> None:
    """None: it may pass by itself."""
    with pytest.raises(Exception) as caught:  # any
        exec("raise err", {"err": err})
    assert (message_of(caught.value), place_of(caught.value)) == (message, place or "<string>:1 in <module>")
    assert would_last(caught.value) == (place is not None)


NCCL = """NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


def test_what_nccl_says_in_its_last_line_is_told() -> None:
    assert message_of(RuntimeError(NCCL)).endswith("NCCL version 2.27.5: Cuda failure 2 'out of memory'")


def test_the_signal_that_ended_a_process_of_the_loader_is_told() -> None:
    gone = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    assert message_of(gone) == "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly"
    gone.__cause__ = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    assert message_of(gone) == "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."


def test_an_exception_without_words_is_told_with_its_place() -> None:
    mark = FailureMark(rank=0, host="n", exit_code=1, message="AssertionError", place="train.py:1 in f")
    assert str(mark.cause) == "rank 0 on n: AssertionError at train.py:1 in f"


def found(code: str, level: str, node: str, *, blames: bool) -> dict[str, Any]:
    facts = {"seen": "seen", "todo": "todo", "line": "for people", "blames_node": blames}
    return {"code": code, "level": level, "node": node, **facts}


def test_errors_of_the_preflight_blame_nodes(run: RunDirectory) -> None:
    sick = found("GPU_SICK", "error", "node3, node4", blames=True)
    others = [found("FS_STALE", "error", "node2", blames=False), found("CLOCK_SKEW", "warning", "node5", blames=True)]
    assert findings_of(read_preflight(run, 2)) == []
    run.attempt_logs(2).mkdir(parents=True)
    write_preflight(run, 2, {"findings": [sick, *others, {}, 3]})
    findings = findings_of(read_preflight(run, 2))
    assert [finding.code for finding in errors_of(findings)] == ["GPU_SICK", "FS_STALE"]
    assert bad_nodes_of(findings) == {"node3": "GPU_SICK: seen", "node4": "GPU_SICK: seen"}
    assert codes_of(findings[1:]) == "FS_STALE node2; CLOCK_SKEW node5"
    assert findings[1].line == "FS_STALE node2: seen; todo (docs/troubleshooting.md#fs_stale)"


def names(run: RunDirectory, now_unix_s: float) -> list[str]:
    return [bad.node for bad in read_bad_nodes(run, now_unix_s=now_unix_s)]


def test_a_node_is_listed_for_its_term_in_the_root_that_runs_share(run: RunDirectory) -> None:
    add_bad_nodes(run, {"node9": "x"}, hours=0.0, now_unix_s=0.0)
    assert not list(list_file(run).parent.glob(BAD_NODES_PARTS))
    add_bad_nodes(run, {"node3": "GPU_SICK: three errors"}, hours=2.0, now_unix_s=1000.0)
    (bad,) = read_bad_nodes(RunDirectory(run.path.parent / "other"), now_unix_s=1000.0 + 7199)
    assert str(bad).startswith("node3 (until ") and str(bad).endswith("; GPU_SICK: three errors)")
    assert names(run, 1000.0 + 7201) == []


def test_the_last_line_about_a_node_counts_and_one_that_makes_no_sense_does_not(run: RunDirectory) -> None:
    list_file(run).write_text('{"node": "node2"}\n[]\n{"node": "no')
    add_bad_nodes(run, {"node3": "first", "node4": "first"}, hours=1.0, now_unix_s=0.0)
    add_bad_nodes(run, {"node3": "second"}, hours=3.0, now_unix_s=0.0)
    assert names(run, 2 * 3600.0) == ["node3"]
    assert forgive_nodes(run, ["node3", "node9"], now_unix_s=10.0) == ["node3"]
    assert names(run, 20.0) == ["node4"]


def test_a_node_of_another_cluster_is_another_node(run: RunDirectory) -> None:
    def listed(cluster: str) -> list[str]:
        return [bad.node for bad in read_bad_nodes(run, now_unix_s=10.0, cluster=cluster)]

    add_bad_nodes(run, {"node1": "x"}, hours=2.0, now_unix_s=0.0)  # of an earlier version
    add_bad_nodes(run, {"node2": "x", "node3": "x"}, hours=2.0, now_unix_s=0.0, cluster="a")
    assert (listed("a"), listed("b"), listed("")) == (
        ["node1", "node2", "node3"],
        ["node1"],
        ["node1", "node2", "node3"],
    )
    assert forgive_nodes(run, ["node1", "node2"], now_unix_s=1.0, cluster="b") == ["node1"]
    assert (listed("a"), listed("b")) == (["node1", "node2", "node3"], [])
    assert forgive_nodes(run, ["node2"], now_unix_s=2.0, cluster="a") == ["node2"]
    assert listed("a") == ["node1", "node3"]


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_what_another_user_lists_keeps_nobody_off_a_node(run: RunDirectory) -> None:
    add_bad_nodes(run, {"node3": "mine"}, hours=2.0, now_unix_s=0.0)
    root = list_file(run).parent
    line = json.dumps({"node": "node4", "why": "theirs", "until_unix_s": 7200.0, "time_unix_s": 1.0})
    for name in ("bad_nodes@node9.jsonl", "bad_nodes.jsonl"):
        (root / name).write_text(f"{line}\n")
    assert set(names(run, 10.0)) == {"node3", "node4"}
    for name in ("bad_nodes@node9.jsonl", "bad_nodes.jsonl"):
        os.chown(root / name, 65534, 65534)
    assert names(run, 10.0) == ["node3"]
