"""What limits a run at its largest size, whether more nodes pay, and which way of exchanging helps: in words. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_train.scaling.measure import Measured
from slurm_train.scaling.model import Model, fit, ring_bytes

# Throughput per node of twice the nodes, over that of one node.
_PAYS, _HARDLY = 0.7, 0.5
_WORTH_A_WORD = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Everything that was measured, sorted."""

    local: tuple[Measured, ...]
    """Fixed local batch, plain exchange, by size."""
    whole: tuple[Measured, ...]
    """Fixed global batch, plain exchange, by size."""
    others: tuple[Measured, ...]
    """Other ways of exchanging, fixed local batch."""
    model: Model | None

    @property
    def largest(self) -> Measured:
        """The largest size at a fixed local batch."""
        return self.local[-1]


def sort_study(measured: Sequence[Measured], *, comm: str) -> Study:
    """Returns the study.

    Args:
        measured: all runs that said something; at least one at a fixed local batch.
        comm: the way of exchanging that counts as plain.
    """
    ordered = sorted(measured, key=lambda one: one.size.ranks)
    local = tuple(one for one in ordered if one.point.comm == comm and "local" in one.point.modes)
    whole = tuple(one for one in ordered if one.point.comm == comm and "global" in one.point.modes)
    others = tuple(one for one in ordered if one.point.comm != comm)
    return Study(local=local, whole=whole, others=others, model=fit(local))


def efficiency(one: Measured, base: Measured) -> float:
    """Returns throughput per rank over that of the smallest size, 1 for perfect scaling."""
    return (one.per_s / one.size.ranks) / (base.per_s / base.size.ranks)


def shares(study: Study) -> dict[str, float]:
    """Returns what the largest size's step goes into, as parts of it: "network", "uneven", "data", "crowd", "compute".

    "crowd" is what computing takes longer than on one rank alone: ranks that share memory, cores or a GPU.
    """
    one, base = study.largest, study.local[0]
    step_s = max(one.step_s, one.compute_s + one.data_s + one.comm_s + one.uneven_s, 1e-12)
    crowd_s = min(max(one.compute_s - base.compute_s, 0.0), one.compute_s)
    parts = {
        "network": one.comm_s,
        "uneven": one.uneven_s,
        "data": one.data_s,
        "crowd": crowd_s,
        "compute": one.compute_s - crowd_s,
    }
    return {name: seconds / step_s for name, seconds in parts.items()}


def verdict(study: Study) -> list[str]:
    """Returns the sentences, the most important first."""
    return [*_what_limits(study), *_more_nodes(study), *_ways(study)]


_LIMITS = {
    "network": "the network limits: {share:.0%} of a step is spent on the exchange of gradients",
    "exchange": "the exchange of gradients within the node limits: it is {share:.0%} of a step",
    "uneven": "uneven ranks limit: {share:.0%} of a step is spent waiting for the slower ones (`status` names them)",
    "data": "reading limits: {share:.0%} of a step is spent waiting for data (data.num_workers, data.prefetch)",
    "crowd": "the ranks of a node limit each other: {share:.0%} of a step is what computing takes longer than on one "
    "rank alone (shared cores, memory or power)",
}


def _what_limits(study: Study) -> list[str]:
    one = study.largest
    found = shares(study)
    losses = {name: share for name, share in found.items() if name != "compute"}
    worst = max(losses, key=lambda name: losses[name])
    nodes = f"{one.size.nodes} node{'s' * (one.size.nodes > 1)}"
    head = f"at {nodes} x {one.size.per_node} a step takes {in_time(one.step_s)}"
    if losses[worst] < _WORTH_A_WORD:
        return [f"{head}; computing limits ({found['compute']:.0%} of it), and nothing else takes a tenth of it"]
    limit = _LIMITS["exchange" if worst == "network" and one.size.nodes == 1 else worst]
    sentences = [f"{head}; {limit.format(share=losses[worst])}"]
    if worst == "network" and study.model is not None:
        sentences.append(_network(study, study.model))
    return sentences


def _network(study: Study, model: Model) -> str:
    one = study.largest
    sent = ring_bytes(one.size.ranks, one.sent_bytes)
    if math.isinf(model.bytes_per_s):
        return f"the exchange costs {in_time(model.alpha_s)} for each doubling of the ranks, whatever its size: latency"
    return (
        f"each rank sends {in_bytes(sent)} per step at an effective {in_bits(model.bytes_per_s)}, which takes "
        f"{in_time(sent / model.bytes_per_s)}; each doubling of the ranks costs {in_time(model.alpha_s)} more"
    )


def _more_nodes(study: Study) -> list[str]:
    one, base = study.largest, study.local[0]
    said = [f"efficiency {efficiency(one, base):.0%} of {base.size.ranks} rank at a fixed local batch"]
    if study.model is None or one.size.nodes < 2:
        return said
    alone = next((other for other in study.local if other.size.nodes == 1 and other.size != base.size), base)
    if one.per_s <= alone.per_s:
        said.append(f"{one.size.nodes} nodes are no faster than one: {one.per_s:,.0f} against {alone.per_s:,.0f} per s")
    longer_s = study.model.comm_s(2 * one.size.ranks, one.sent_bytes) - one.comm_s
    gain = 2 * one.step_s / max(one.step_s + longer_s, 1e-12)
    left = efficiency(one, alone) * gain / 2
    words = "pay" if left >= _PAYS else "hardly pay" if left >= _HARDLY else "do not pay"
    said.append(
        f"more nodes {words}: {2 * one.size.nodes} would have {gain:.2f}x the throughput of {one.size.nodes}, and each "
        f"of them {left:.0%} of what one alone has"
    )
    return said


def _ways(study: Study) -> list[str]:
    at_full = [other for other in study.others if other.size == study.largest.size]
    if not at_full:
        return []
    best = max(at_full, key=lambda other: other.per_s)
    gain = best.per_s / study.largest.per_s
    if gain < 1 + _WORTH_A_WORD / 2:
        return [f"no other way of exchanging is faster here; the best is ddp.comm={best.point.comm} ({gain:.2f}x)"]
    return [
        f"ddp.comm={best.point.comm} is {gain:.2f}x as fast here; see what it does to your loss before you rely on it"
    ]


def limit_s(one: Measured, model: Model) -> float:
    """Returns what the bytes of one way of exchanging take at the model's bandwidth, and nothing else."""
    return ring_bytes(one.size.ranks, one.sent_bytes) / model.bytes_per_s


def in_time(seconds: float) -> str:
    """Returns seconds for people, e.g. "812 ms"."""
    for least, factor, unit in ((1.0, 1.0, "s"), (1e-4, 1e3, "ms")):
        if seconds >= least:
            return f"{seconds * factor:.3g} {unit}"
    return f"{1e6 * seconds:.2g} us"


def in_bytes(number: float) -> str:
    """Returns bytes for people, e.g. "5.2 MB"."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} B"


def in_bits(bytes_per_s: float) -> str:
    """Returns a bandwidth for people, e.g. "96 Mbit/s"."""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
