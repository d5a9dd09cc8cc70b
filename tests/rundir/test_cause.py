from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_train.rundir.cause import GPU_MEMORY, HANG, KILLED, KINDS, LOST_PEER, NODE_FAILURE, NOT_CREATED, Cause
from slurm_train.rundir.events import Finding
from slurm_train.rundir.ledger import End, Reason, read_ledger, record_end
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.records import NO_STEP, violent_end

MEMORY = "OutOfMemoryError: CUDA out of memory. Tried to allocate {} MiB"
PLACE = "model.py:41 in forward"


def test_each_kind_has_a_name_of_its_own_and_says_something() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    for kind in KINDS:
        assert re.compile(kind.pattern)
        assert not kind.advice.startswith((" ", ";")) and not kind.advice.endswith((".", " ")), kind.name


@pytest.mark.parametrize(
    ("cause", "sentence", "kind", "blames_node"),
    [
        (Cause.of("Killed", ranks=(3,), node="node2"), "rank 3 on node2: Killed", KILLED, True),
        (Cause.of("Killed", ranks=(0, 2, 3), node="node1"), "ranks 0,2-3 on node1: Killed", KILLED, True),
        (Cause.of_lost_nodes(["node2"]), "node failure on node2", NODE_FAILURE, True),
        (Cause.of_lost_nodes(["node2", "node3"]), "node failure on node2,node3", NODE_FAILURE, False),
        (
            Cause.of_hang({"sentence": "rank 2 on node1 is in step", "ranks": [2], "host": "node1"}),
            *("rank 2 on node1 is in step", HANG, True),
        ),
        (Cause.of_hang({"sentence": "they wait"}), "they wait", HANG, False),
        (Cause.of("srun: unrecognized option '--x'"), "srun: unrecognized option '--x'", "srun_option", False),
        (
            Cause.of("RuntimeError: Connection closed by peer", ranks=(0,), node="a"),
            *("rank 0 on a: RuntimeError: Connection closed by peer", LOST_PEER, False),
        ),
        (Cause.of("ValueError: odd", ranks=(0,), node="a"), "rank 0 on a: ValueError: odd", "", True),
    ],
)
def test_a_cause_is_a_value_and_its_sentence_is_made_of_it(
    cause: Cause, sentence: str, kind: str, blames_node: bool
) -> None:
    assert (str(cause), cause.kind, cause.blames_node) == (sentence, kind, blames_node)


def test_a_step_that_was_not_made_is_known_by_the_words_of_srun_and_of_the_supervisor() -> None:
    end = violent_end(f"srun: error: {NO_STEP} for job 7: it still has 7.0 of an earlier attempt\n")
    assert end is not None and Cause.of(end.words).kind == NOT_CREATED


@pytest.mark.parametrize(
    ("code", "blames_node", "lasting"),
    [("GPU_COUNT", False, True), ("GPU_COUNT", True, False), ("CLOCK_SKEW", False, False)],
)
def test_what_the_preflight_finds_lasts_unless_a_node_is_at_fault(code: str, blames_node: bool, lasting: bool) -> None:
    finding = Finding(code=code, level="error", seen="2 of 4", todo="look", node="node1", blames_node=blames_node)
    cause = finding.cause
    assert (str(cause), cause.kind, cause.node, cause.lasting) == (finding.line, code, "node1", lasting)


def test_the_same_exception_is_one_at_the_same_place_that_does_not_pass() -> None:
    first = Cause.of("ValueError: odd", place=PLACE)
    assert first.is_like(Cause.of("ValueError: odd", ranks=(3,), node="a", place=PLACE))
    assert not first.is_like(Cause.of("ValueError: odd")) and not Cause.of("x").is_like(Cause.of("x"))
    assert not Cause.of("OSError: gone", place=PLACE, lasting=False).is_like(Cause.of("OSError: gone", place=PLACE))
    # The numbers differ from time to time.
    full = [Cause.of(MEMORY.format(size), place=PLACE) for size in (20, 24)]
    assert full[0].is_like(full[1]) and full[0].kind == GPU_MEMORY


@pytest.mark.parametrize(
    ("note", "ranks", "node"),
    [
        ("rank 3 on node2: ValueError: no; the ranks are started again in this allocation", (3,), "node2"),
        ("3 failures in a row without a new checkpoint: ranks 4-7 on n-2.x: Killed", (4,), "n-2.x"),
        ("srun itself was killed by signal 9; the ranks are started again", (), ""),
        ("the ranks ended with code 1; see the logs of this attempt", None, ""),
    ],
)
def test_the_ledger_has_causes_and_older_lines_name_them_in_their_notes(
    note: str, ranks: tuple[int, ...] | None, node: str, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    record_end(run, 0, End(time_unix_s=9.0, reason=Reason.FAILED, note=note))
    written = Cause.of("Killed", ranks=(5, 6), node="node3")
    record_end(run, 1, End(time_unix_s=9.0, reason=Reason.FAILED, note=note, cause=written))
    record_end(run, 2, End(time_unix_s=9.0, reason=Reason.PREEMPTED, note=note))
    older, newer, preempted = (attempt.end for attempt in read_ledger(run))
    assert older is not None and newer is not None and preempted is not None
    found = older.cause
    assert (found is None) == (ranks is None)
    assert found is None or (found.ranks, found.node) == (ranks, node)
    assert newer.cause == written and preempted.cause is None
