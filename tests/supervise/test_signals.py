"""The stop flag: idempotent, silent, and its own process's only."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.supervise.signals import STOP_SIGNALS, StopFlag, ignore_in_worker, install


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    numbers = (*STOP_SIGNALS, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_three_signals_are_one_request(number: signal.Signals) -> None:
    flag = StopFlag()
    install(flag)
    for _ in range(3):
        os.kill(os.getpid(), number)
    assert (flag.requested, flag.signal_number) == (1, number)


def test_a_forked_child_does_not_ask_and_does_not_die() -> None:
    flag = StopFlag()
    install(flag)
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(flag.requested)
    assert os.waitpid(child, 0)[1] == 0
    assert flag.requested == 0


def test_a_worker_is_deaf() -> None:
    ignore_in_worker()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)


def test_stop_file_is_looked_at_once_a_second(tmp_path: Path) -> None:
    now = [10.0]
    flag = StopFlag(clock=lambda: now[0])
    stop_file = tmp_path / "STOP"
    flag.look_at(stop_file)
    stop_file.touch()
    now[0] = 10.9
    flag.look_at(stop_file)
    assert flag.requested == 0
    now[0] = 11.0
    flag.look_at(stop_file)
    assert flag.requested == 1
