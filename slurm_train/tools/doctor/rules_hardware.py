"""What is wrong with GPUs, and who is slower than the others. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_train.tools.doctor.evidence import Evidence
from slurm_train.tools.doctor.facts import GpuFacts, NodeFacts, SpeedFacts
from slurm_train.tools.doctor.finding import Finding
from slurm_train.tools.doctor.majority import listed, median_of_others

_BUSY_MB = 2048
_SLOW = 1.6
_SLOW_LINK = 0.5
# One connection alone reaches a fraction of a fast network.
_SHARE_OF_CLAIM = 0.05
_HIGH_LATENCY_US = 500.0
_HIGH_LATENCY = 5.0


def gpu_findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields GPU_COUNT, GPU_BUSY and GPU_SICK, as far as NVML tells."""
    for node in evidence.nodes:
        given = len(node.gpus or [])
        if node.num_gpus is not None and node.num_gpus < given:
            yield Finding(
                code="GPU_COUNT",
                level="error",
                node=node.node,
                seen=f"the driver counts {node.num_gpus} GPUs, Slurm has given {given}",
                todo="a GPU has fallen off the bus: have the node drained and restarted",
                blames_node=True,
            )
        yield from _busy(node)
        yield from _sick(node)
        if node.gpu_errors:
            yield Finding(
                code="GPU_SICK",
                level="error",
                node=node.node,
                seen=f"the driver has logged {listed(node.gpu_errors, most=3)}",
                todo="have the node drained; `nvidia-smi -q` and `dmesg` there say more",
                blames_node=True,
            )


def _busy(node: NodeFacts) -> Iterator[Finding]:
    busy = [gpu for gpu in node.gpus or () if gpu.used_mb >= _BUSY_MB]
    if not busy:
        return
    worst = max(busy, key=lambda gpu: gpu.used_mb)
    holders = f" by {listed(worst.holders, most=3)}" if worst.holders else ""
    is_most = 2 * worst.used_mb > worst.total_mb
    yield Finding(
        code="GPU_BUSY",
        level="error" if is_most else "warning",
        node=node.node,
        seen=f"{worst.used_mb} of {worst.total_mb} MiB of GPU {_names(busy)} are taken{holders}",
        todo="end what is left over there (`nvidia-smi`), or ask for whole nodes: cluster.sbatch.exclusive=true",
        blames_node=is_most,
    )


def _names(gpus: Sequence[GpuFacts]) -> str:
    return listed([gpu.name for gpu in gpus], most=8)


def _sick(node: NodeFacts) -> Iterator[Finding]:
    gpus = node.gpus or []
    for texts in dict.fromkeys(tuple(gpu.errors) for gpu in gpus if gpu.errors):
        yield Finding(
            code="GPU_SICK",
            level="error",
            node=node.node,
            seen=f"GPU {_names([gpu for gpu in gpus if (*gpu.errors,) == texts])}: {listed(list(texts), most=3)}",
            todo="have the node drained; the GPU needs a reset or has to be replaced",
            blames_node=True,
        )
    for texts in dict.fromkeys(tuple(gpu.warnings) for gpu in gpus if gpu.warnings):
        yield Finding(
            code="GPU_SICK",
            level="warning",
            node=node.node,
            seen=f"GPU {_names([gpu for gpu in gpus if (*gpu.warnings,) == texts])}: {listed(list(texts), most=3)}",
            todo="expect it to be slower; tell whoever runs the cluster",
        )


def best_speeds(speeds: Sequence[SpeedFacts]) -> list[SpeedFacts]:
    """Returns the best of several measurements of each node."""
    best: dict[str, SpeedFacts] = {}
    for speed in speeds:
        old = best.get(speed.node, speed)
        rates = {peer: max(rate, old.mb_per_s.get(peer, rate)) for peer, rate in speed.mb_per_s.items()}
        latencies = {peer: min(one, old.latency_us.get(peer, one)) for peer, one in speed.latency_us.items()}
        best[speed.node] = SpeedFacts(
            node=speed.node,
            work_ms=min(speed.work_ms, old.work_ms),
            mb_per_s={**old.mb_per_s, **rates},
            latency_us={**old.latency_us, **latencies},
        )
    return list(best.values())


def speed_findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields SLOW_NODE and SLOW_LINK from what was measured on request."""
    work = {speed.node: speed.work_ms for speed in evidence.speeds}
    slow: set[str] = set()
    for node, work_ms in work.items():
        usual = median_of_others(work, node)
        if usual is not None and work_ms > _SLOW * usual:
            load = next((facts.load for facts in evidence.nodes if facts.node == node), 0.0)
            yield Finding(
                code="SLOW_NODE",
                level="warning",
                node=node,
                seen=f"computes {work_ms / usual:.1f} times as long as the others ({work_ms:.0f} ms for "
                f"{usual:.0f} ms of work, load {load:.1f})",
                todo="look for other processes and for clock limits there, or leave it out with cluster.exclude",
            )
            slow.add(node)
    # A node that computes slowly sends slowly, too.
    yield from (finding for finding in _slow_links(evidence) if finding.node not in slow)


def _slow_links(evidence: Evidence) -> Iterator[Finding]:
    # The best connection of a node: a slow partner makes the other ones slow, too.
    best = {speed.node: max(speed.mb_per_s.values()) for speed in evidence.speeds if speed.mb_per_s}
    claims = {node.node: node.network.link_mbit_per_s for node in evidence.nodes}
    for node, rate in best.items():
        usual = median_of_others(best, node)
        claim = (claims.get(node) or 0) / 8
        if usual is not None and len(best) > 2 and rate < _SLOW_LINK * usual:
            yield _slow_link(node, f"{rate:.0f} MB/s at best, the other nodes {usual:.0f}")
        elif rate < _SHARE_OF_CLAIM * claim:
            yield _slow_link(node, f"{rate:.0f} MB/s at best, its interface claims {claim:.0f}")
    nearest = {speed.node: min(speed.latency_us.values()) for speed in evidence.speeds if speed.latency_us}
    for node, latency in nearest.items():
        usual = median_of_others(nearest, node)
        if usual is not None and latency > max(_HIGH_LATENCY * usual, _HIGH_LATENCY_US):
            yield _slow_link(node, f"{latency:.0f} us to the nearest node, the other nodes {usual:.0f}")


def _slow_link(node: str, seen: str) -> Finding:
    todo = "look at the cable, the switch port and the speed that was agreed on (`ethtool`)"
    return Finding(code="SLOW_LINK", level="warning", node=node, seen=seen, todo=todo)
