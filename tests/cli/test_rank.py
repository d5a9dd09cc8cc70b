from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurm_train.cli.rank import allocator_environment, gloo_environment, message_of, place_of
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise.ranks import WAITS
from tests.support.command_line import REPOSITORY
from tests.support.waiting import wait_for


def raised(err: BaseException) -> BaseException:
    try:
        raise err
    except BaseException as caught:  # whatever the table has
        return caught


@pytest.mark.parametrize(
    ("err", "is_known"),
    [
        (ValueError("no such layer"), True),
        (IndexError("index 300 is out of range"), True),
        (MemoryError(), True),
        # What may go well the next time has no place, and so is never the same twice.
        (OSError(116, "Stale file handle"), False),
        (ConnectionResetError("peer"), False),
        (TimeoutError("store"), False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), False),
        (RuntimeError("NCCL communicator was aborted"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), False),
        (RuntimeError("Caught OSError in DataLoader worker process 0."), False),
    ],
)
def test_only_an_exception_of_the_program_has_a_place(err: BaseException, is_known: bool) -> None:
    place = place_of(raised(err))
    assert (place.startswith("test_rank.py:") and place.endswith(" in raised")) == is_known
    assert is_known or place == ""


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise ValueError(f"sample {index} is broken")


def test_what_a_worker_of_a_data_loader_raised_is_named_and_not_the_worker() -> None:
    with pytest.raises(ValueError, match="Caught ValueError in DataLoader worker process 0") as caught:
        next(iter(torch.utils.data.DataLoader(Broken(), num_workers=1)))
    assert message_of(caught.value) == "ValueError: sample 0 is broken"
    assert place_of(caught.value).startswith("test_rank.py:") and place_of(caught.value).endswith(" in __getitem__")
    assert message_of(KeyError("oops")) == "KeyError: 'oops'"


@pytest.mark.parametrize(
    ("version", "env", "expected"),
    [
        ("2.8.0+cu128", {}, "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.13.0", {}, "PYTORCH_ALLOC_CONF"),
        ("2.13.0", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, None),
        ("2.8.0", {"PYTORCH_ALLOC_CONF": ""}, None),
    ],
)
def test_segments_grow_unless_the_user_has_set_the_allocator(
    version: str, env: dict[str, str], expected: str | None
) -> None:
    assert allocator_environment(version, env) == ({expected: "expandable_segments:True"} if expected else {})


def test_only_large_worlds_leave_the_connections_of_gloo_to_the_first_exchange() -> None:
    assert gloo_environment(32) == {}
    assert gloo_environment(1024) == {"TORCH_GLOO_LAZY_INIT": "1"}


def start_waiting(run: RunDirectory) -> subprocess.Popen[bytes]:
    """Starts a rank that waits for a failure of attempt 2."""
    env = {**os.environ, WAITS: "1", "SLURM_TRAIN_ATTEMPT": "2", "PYTHONPATH": str(REPOSITORY)}
    argv = [sys.executable, "-m", "slurm_train", "worker", str(run.path)]
    return subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_a_rank_in_waiting_goes_without_a_trace_when_it_is_not_needed(tmp_path: Path) -> None:
    with start_waiting(RunDirectory(tmp_path)) as process:
        assert process.communicate(timeout=60) == (b"", None) and process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_rank_in_waiting_has_nothing_to_save(tmp_path: Path) -> None:
    """It must not keep a job from ending for as long as Slurm waits before it kills."""
    with start_waiting(RunDirectory(tmp_path)) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        wait_for(lambda: "libtorch_python" in maps.read_text(), within_s=60, what="torch in a rank in waiting")
        process.terminate()
        assert process.wait(timeout=20) == -signal.SIGTERM
