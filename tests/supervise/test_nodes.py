"""Which nodes an attempt uses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_train.supervise.nodes import NodePool


def pool(*, held: int = 5, sizes: tuple[int, ...] = (4,), doubtful: tuple[str, ...] = ()) -> NodePool:
    return NodePool(
        nodes=tuple(f"n{number}" for number in range(1, held + 1)),
        sizes=sizes,
        ranks_per_node=(2,) * sizes[-1],
        tasks_per_node=(2,) * sizes[-1],
        doubtful=frozenset(doubtful),
    )


CHOICES = {
    "as many as the run has": (pool(), (), "n1 n2 n3 n4"),
    "a spare one for a lost one": (pool(), ("n2",), "n1 n3 n4 n5"),
    "two are lost, and one was to spare": (pool(), ("n2", "n3"), ""),
    "what was found bad before is used last": (pool(doubtful=("n1",)), (), "n2 n3 n4 n5"),
    "and used where it is needed": (pool(doubtful=("n1",)), ("n5",), "n1 n2 n3 n4"),
    "of a range what was granted": (pool(held=3, sizes=(2, 3, 4)), (), "n1 n2 n3"),
    "a range without a lost node": (pool(held=4, sizes=(2, 3, 4)), ("n1",), "n2 n3 n4"),
    "a range and a spare node": (pool(sizes=(2, 3, 4)), ("n4",), "n1 n2 n3 n5"),
    "a size that does not fit is left out": (pool(held=4, sizes=(2, 4)), ("n4",), "n1 n2"),
    "fewer than the fewest": (pool(held=4, sizes=(2, 3, 4)), ("n1", "n2", "n3"), ""),
}


@pytest.mark.parametrize("name", CHOICES)
def test_an_attempt_uses_the_most_nodes_that_are_well_and_that_fit(name: str) -> None:
    nodes, unwell, chosen = CHOICES[name]
    assert " ".join(nodes.choose(without=unwell)) == chosen


def test_a_job_comes_back_with_what_it_has_asked_for() -> None:
    assert [pool().fewest, pool(sizes=(2, 3, 4)).fewest, pool(sizes=(2, 3, 4)).num_ranks(3)] == [5, 2, 6]


@given(
    st.integers(1, 9), st.sets(st.integers(1, 9), min_size=1), st.sets(st.integers(1, 9)), st.sets(st.integers(1, 9))
)
def test_no_larger_choice_was_possible(held: int, sizes: set[int], unwell: set[int], doubtful: set[int]) -> None:
    nodes = pool(held=held, sizes=tuple(sorted(sizes)), doubtful=tuple(f"n{number}" for number in doubtful))
    lost = {f"n{number}" for number in unwell}
    chosen = nodes.choose(without=lost)
    num_well = len(set(nodes.nodes) - lost)
    assert len(chosen) == max((size for size in sizes if size <= num_well), default=0)
    assert not set(chosen) & lost
    assert list(chosen) == sorted(chosen)
    # None that was found bad before has a place while a better one waits.
    waiting = set(nodes.nodes) - lost - set(chosen)
    assert not (set(chosen) & nodes.doubtful and waiting - nodes.doubtful)
