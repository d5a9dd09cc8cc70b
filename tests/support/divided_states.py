"""What ranks hold, drawn at random: alike, on some ranks only, or different; and which of it no checkpoint can keep.

The rules are written down here a second time, from docs/callbacks.md, as an oracle for the product's own.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.support.warm_ranks import start_rank

MOST_RANKS = 4
RANK_PROGRAM = Path(__file__).parents[1] / "checkpoint" / "dividing_ranks.py"
VALUE = "value"
# More and less than what is shared out.
KINDS = ("float32 400", "float32 3x2", "float64 20x20", "int64", "float32 401")
_STATES = ("all", "none", "first", "last", "some", "own names", "other sizes", "other types", "value or tensor")

Held = list[dict[str, str]]
"""What each rank holds: kind by full name, e.g. {"model.head": "float32 3x2"}; "shard ..." is a part of it."""


@st.composite
def examples(draw: Any) -> dict[str, Any]:
    """Draws ranks, their stages, and what each holds in two saves, one after the other."""
    num_ranks = draw(st.integers(1, MOST_RANKS))
    layout = draw(st.sampled_from(("replicated", "sharded", "pipeline") if num_ranks > 1 else ("replicated",)))
    stages = [rank * 2 // num_ranks if layout == "pipeline" else 0 for rank in range(num_ranks)]
    weights = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5))
    saves = []
    for _ in range(2):
        held: Held = [{} for _ in range(num_ranks)]
        for number, kind in enumerate(weights):
            _add_weight(held, number, kind, layout=layout, stages=stages)
        for number in range(draw(st.integers(0, 3))):
            name, kind = f"callbacks.{number} own.Mine.x", draw(st.sampled_from((*KINDS, VALUE)))
            _add(held, name, kind, draw(st.sampled_from(_STATES)), draw)
        if draw(st.integers(0, 5)) == 0:
            where = draw(st.sampled_from(("model.extra", "optimizer.state.w0.extra")))
            _add(held, where, draw(st.sampled_from(KINDS)), draw(st.sampled_from(_STATES)), draw)
        streams = draw(st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks))
        states = [{"place": place} | ({"more": [place]} if place % 2 else {}) for place in streams]
        saves.append({"held": held, "streams": states, "wrong": wrong_names(held, stages)})
    return {"stages": stages, "saves": saves}


def _add_weight(held: Held, number: int, kind: str, *, layout: str, stages: Sequence[int]) -> None:
    is_cut = layout == "sharded" and " " in kind
    for rank, of_rank in enumerate(held):
        if layout == "pipeline" and number % 2 != stages[rank]:
            continue
        cut = "shard " if is_cut else ""
        of_rank[f"model.w{number}"] = cut + kind
        of_rank[f"optimizer.state.w{number}.moment"] = cut + kind
        of_rank[f"optimizer.state.w{number}.step"] = "float32"
        of_rank["optimizer.rate"] = VALUE


def _add(held: Held, name: str, kind: str, state: str, draw: Any) -> None:
    """Gives ranks something under a name."""
    num_ranks = len(held)
    some = draw(st.sets(st.integers(0, num_ranks - 1)))
    ranks = {"none": set(), "first": {0}, "last": {num_ranks - 1}, "some": some}.get(state, set(range(num_ranks)))
    others = {"other sizes": "float32 7", "other types": "float16 400", "value or tensor": VALUE}
    for rank in ranks:
        name_here = f"{name}{rank}" if state == "own names" else name
        held[rank][name_here] = others.get(state, kind) if rank in some else kind


def wrong_names(held: Held, stages: Sequence[int]) -> list[str]:
    """Returns the names that no checkpoint can keep."""
    wrong = []
    for name in sorted({name for of_rank in held for name in of_rank}):
        kinds = {of_rank[name] for of_rank in held if name in of_rank}
        holders = {rank for rank, of_rank in enumerate(held) if name in of_rank}
        if name.startswith("callbacks."):
            lacks = VALUE in kinds and 0 not in holders
        else:
            of_stages = {stages[rank] for rank in holders}
            lacks = any(stage in of_stages and rank not in holders for rank, stage in enumerate(stages))
        if len(kinds) > 1 or lacks:
            wrong.append(name)
    return wrong


def problems_of(tried: Sequence[dict[str, Any]], *, is_careless: bool = False) -> list[list[str]]:
    """Lets four ranks make the saves of some examples; returns what is wrong with each.

    Args:
        tried: the examples.
        is_careless: each rank divides by what it holds itself.
    """
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="divided-", dir=memory) as name:
        folder = Path(name)
        (folder / "examples.json").write_text(json.dumps(tried))
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
        words = [(str(rank), str(MOST_RANKS), name, str(int(is_careless))) for rank in range(MOST_RANKS)]
        ranks = [start_rank(RANK_PROGRAM, *of_rank, env=env) for of_rank in words]
        try:
            texts = [rank.communicate(timeout=300)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        problems: list[list[str]] = [[] for _ in tried]
        for rank in range(MOST_RANKS):
            path = folder / f"{rank}.json"
            told = json.loads(path.read_text()) if path.exists() else []
            for of_example, texts_of_rank in zip(problems, told, strict=False):
                of_example += [f"rank {rank}: {text}" for text in texts_of_rank]
            for of_example in problems[len(told) :]:
                of_example.append(f"rank {rank} has ended before: {texts[rank][-2000:]}")
        return problems
