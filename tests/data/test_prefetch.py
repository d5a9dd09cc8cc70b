from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from slurm_train.data.prefetch import Prefetch
from tests.support.waiting import wait_for


def test_items_come_in_order_and_so_many_are_read_ahead() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            yield number

    ahead = Prefetch(items(), depth=3)
    # Three wait in the queue and one for a place in it.
    wait_for(lambda: len(read) == 4, within_s=5, what="reading ahead", poll_s=0.01)
    assert [next(ahead) for _ in range(10)] == list(range(10))
    wait_for(lambda: len(read) == 14, within_s=5, what="reading ahead", poll_s=0.01)
    ahead.close()


def test_an_error_of_reading_comes_where_its_item_would_have_been() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    ahead = Prefetch(items(), depth=4)
    assert next(ahead) == 1
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            next(ahead)


def test_the_end_of_the_items_is_the_end() -> None:
    assert list(Prefetch(iter([1, 2, 3]), depth=2)) == [1, 2, 3]


def test_closing_ends_a_thread_that_waits_for_a_place() -> None:
    before = threading.active_count()
    ahead = Prefetch(iter(range(100)), depth=1)
    next(ahead)
    ahead.close()
    assert threading.active_count() == before
