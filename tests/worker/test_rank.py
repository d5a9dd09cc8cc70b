from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_train.rundir.events import first_mark, message_of, place_of, would_last
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.signals import StopFlag
from slurm_train.supervise.ranks import WAITS
from slurm_train.worker import rank
from slurm_train.worker.rank import allocator_environment
from tests.support.command_line import REPOSITORY, Person
from tests.support.run_facts import RunFacts
from tests.support.waiting import wait_for


def raised(err: BaseException) -> BaseException:
    try:
        raise err
    except BaseException as caught:  # whatever the table has
        return caught


# What may go well the next time is never the same twice.
PASSING = (
    OSError(116, "Stale file handle"),
    ConnectionResetError("peer"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("NCCL communicator was aborted"),
    RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
    RuntimeError("Caught OSError in DataLoader worker process 0."),
)


def test_only_an_exception_of_the_program_is_to_be_expected_again() -> None:
    place = place_of(raised(ValueError("no such layer")))
    assert place.startswith("test_rank.py:") and place.endswith(" in raised")
    assert would_last(ValueError("no such layer")) and not any(map(would_last, PASSING))


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError(f"sample {index} is broken")


def test_what_a_worker_of_a_data_loader_raised_is_named_and_not_the_worker() -> None:
    batches: Any = iter(torch.utils.data.DataLoader(Broken(), num_workers=1))
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker process 0") as caught:
        next(batches)
    # The exception keeps the loader: its worker would outlive this test, and be counted by another.
    batches._shutdown_workers()
    assert message_of(caught.value) == "ValueError: sample 0 is broken"
    assert place_of(caught.value).startswith("test_rank.py:") and place_of(caught.value).endswith(" in __getitem__")
    assert message_of(KeyError("oops")) == "KeyError: 'oops'"


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        (SystemExit(), 0, None),
        (SystemExit(75), 75, None),
        (SystemExit(3), 3, "the function ended with code 3"),
        (SystemExit(256), 1, "the function ended with code 1"),
        (SystemExit("no data\nin x"), 1, "no data"),
    ],
)
def test_how_a_function_has_ended_is_told(
    end: SystemExit, code: int, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)

    def leave(_run: RunDirectory, code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(rank, "leave", leave)
    try:
        ended_with = rank._exit_code(run, {}, end)
    except SystemExit as ended:
        ended_with = int(str(ended.code))
    assert ended_with == code
    mark = first_mark(run, 0)
    assert (None if mark is None else mark.message) == words


def test_segments_grow_unless_the_user_has_set_the_allocator() -> None:
    grow = "expandable_segments:True"
    assert allocator_environment("2.8.0+cu128", {}) == {"PYTORCH_CUDA_ALLOC_CONF": grow}
    assert allocator_environment("2.13.0", {}) == {"PYTORCH_ALLOC_CONF": grow}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert allocator_environment("2.13.0", {name: ""}) == {}


def test_a_rank_in_waiting_has_nothing_to_save(tmp_path: Path) -> None:
    """It must not keep a job from ending for as long as Slurm waits before it kills."""
    env = {**os.environ, WAITS: "1", "SLURM_TRAIN_ATTEMPT": "2", "PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, "-m", "slurm_train", "worker", str(tmp_path)]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "libtorch_python" in maps.read_text(), within_s=60, what="torch in a rank in waiting")
        process.terminate()
        assert process.wait(timeout=20) == -signal.SIGTERM


class LeftError(BaseException):
    pass


@pytest.mark.parametrize(
    ("env", "is_watched"),
    [({"SLURM_TRAIN_ATTEMPT": "3"}, True), ({"TORCHELASTIC_RUN_ID": "by hand", "RANK": "1"}, False)],
    ids=["a supervisor", "a plain torchrun"],
)
def test_only_a_supervisors_ranks_rely_on_its_watchdog(
    env: dict[str, str], is_watched: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def leaves(*_: Any, **__: Any) -> None:
        raise LeftError

    monkeypatch.setattr(rank, "_work", lambda *_, is_watched: seen.append(is_watched) or 0)
    monkeypatch.setattr(rank, "_join_restart", lambda _run, env: {**env, "SLURM_TRAIN_ATTEMPT": "3"})
    for name in ("_prepare_torch", "_require_visible", "_watch_orphan", "_leave_restart"):
        monkeypatch.setattr(rank, name, lambda *_, **__: 0)
    for name in ("leave", "_fail"):
        monkeypatch.setattr(rank, name, leaves)
    whole = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **env}
    with pytest.raises(LeftError):
        rank.run_rank(RunDirectory(tmp_path), whole, StopFlag(), parent=1)
    assert seen == [is_watched]


def test_a_failing_rank_names_its_node_as_slurm_does(tmp_path: Path) -> None:
    run = RunFacts().write(RunDirectory(tmp_path / "run"))
    run.attempt_logs(0).mkdir(parents=True)
    run.config.write_text("not: [a configuration")
    env = {"SLURM_TRAIN_ATTEMPT": "0", "SLURM_PROCID": "3", "SLURMD_NODENAME": "gpu-a7"}
    assert Person(tmp_path).types("worker", str(run.path), env=env).code != 0
    mark = first_mark(run, 0)
    assert mark is not None and (mark.rank, mark.host) == (3, "gpu-a7"), "--exclude takes no host names"
