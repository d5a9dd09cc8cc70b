"""Workers of a loader of torch tell the rank what keeps them from sending a batch."""

from __future__ import annotations

import mmap
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from slurm_train.data.mapstyle import KeyedData, KeyedNumber
from slurm_train.rundir.events import message_of
from slurm_train.session.loader_workers import note_draws, raise_in_rank, samples_draw

# Without the exception the loader would wait for ever; torch's own time-out ends the test then.
_TIMEOUT_S = 120.0


class LocalError(Exception):
    """Cannot be pickled where it is made in a function."""


def _generator(_items: Any) -> Iterator[int]:
    return (number for number in range(3))


def _of_local_type(_items: Any) -> Any:
    class Local(LocalError):
        pass

    raise Local("no such file")


def _tensors(items: Any) -> Any:
    return torch.tensor(items)


def _begin_worker(_number: int) -> None:
    raise_in_rank()


def _begin_with_long_path(_number: int) -> None:
    raise_in_rank()
    # As multiprocessing keeps the place of its sockets.
    process: Any = multiprocessing.process.current_process()
    folder = Path(tempfile.gettempdir(), "a" * 99)
    folder.mkdir(exist_ok=True)
    process._config["tempdir"] = str(folder)


@pytest.mark.parametrize(
    ("collate", "begin", "words"),
    [
        (_generator, _begin_worker, "generator"),
        (_of_local_type, _begin_worker, "Local"),
        (_tensors, _begin_with_long_path, "OSError: AF_UNIX path too long"),
    ],
)
def test_the_rank_gets_the_exception_instead_of_a_batch_that_cannot_be_sent(
    collate: Any, begin: Any, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    loader = DataLoader(
        list(range(4)),  # type: ignore[arg-type]
        batch_size=2,
        num_workers=1,
        collate_fn=collate,
        worker_init_fn=begin,
        multiprocessing_context="fork",
        timeout=_TIMEOUT_S,
    )
    batches: Any = iter(loader)
    with pytest.raises(Exception, match=r"Caught .* in DataLoader worker process 0") as caught:
        list(batches)
    batches._shutdown_workers()
    assert words in message_of(caught.value)


def test_other_queues_print_what_they_cannot_send(capfd: pytest.CaptureFixture[str]) -> None:
    def put() -> None:
        raise_in_rank()
        queue: Any = multiprocessing.get_context("fork").Queue()
        queue.put((1, (number for number in range(3))))
        queue.close()
        queue.join_thread()

    process = multiprocessing.get_context("fork").Process(target=put)
    process.start()
    process.join(_TIMEOUT_S)
    assert process.exitcode == 0
    assert "cannot pickle 'generator' object" in capfd.readouterr().err


class Noise(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.rand(())


@pytest.mark.parametrize("is_keyed", [False, True])
def test_samples_that_draw_are_noted_unless_their_numbers_follow_from_their_place(
    is_keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurm_train.session.loader_workers._has_drawn", mmap.mmap(-1, 1))
    number = KeyedNumber(0)
    number.key = 7
    loader = DataLoader(
        KeyedData(Noise()) if is_keyed else Noise(),
        batch_sampler=[[number]],
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=lambda _: note_draws(),
    )
    assert len(list(loader)) == 1
    assert samples_draw() is not is_keyed


_STREAM_OF_ITS_OWN = """
import faulthandler, sys, torch
from slurm_train.session.loader_workers import tell_of_loader_workers
class Logger:
    def write(self, text): sys.__stderr__.write(text)
    def flush(self): pass
faulthandler.enable()
tell_of_loader_workers()
sys.stderr = Logger()
print(sum(1 for _ in torch.utils.data.DataLoader(torch.arange(4), num_workers=1, multiprocessing_context="fork")))
"""


def test_a_program_may_have_a_stream_of_its_own_for_errors() -> None:
    done = subprocess.run([sys.executable, "-c", _STREAM_OF_ITS_OWN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
