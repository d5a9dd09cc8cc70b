"""What is wrong with the ways between nodes: rank 0's address, ports, absent nodes, clocks. Pure.

Packets that do not arrive are put down to one node only where the others reach each other; of two nodes nobody can say
which one is to blame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_train.tools.doctor.evidence import Asked, Evidence
from slurm_train.tools.doctor.facts import NetworkFacts, Trouble
from slurm_train.tools.doctor.finding import Finding
from slurm_train.tools.doctor.majority import common_end, listed
from slurm_train.tools.doctor.rules_interfaces import interface_findings, is_loopback

_SKEW_S = 2.0
_OPEN_PORTS = "open the ports between the nodes in firewall and routing (`nft list ruleset`, `ip route get` on both)"


def network_findings(evidence: Evidence, asked: Asked) -> Iterator[Finding]:
    """Yields NAME_RESOLUTION, LOOPBACK, WRONG_MASTER, PORT_*, WRONG_INTERFACE, NODE_MISSING and CLOCK_SKEW."""
    yield from _ways_to_master(evidence, asked)
    yield from _port_in_use(evidence, asked)
    yield from _absent(evidence)
    if len(asked.nodes) > 1:
        yield from interface_findings(evidence)
        yield from _blocked_pairs(evidence)
    yield from _clocks(evidence)


def _ways_to_master(evidence: Evidence, asked: Asked) -> Iterator[Finding]:
    astray = {trouble.node: _astray(trouble, evidence, asked) for trouble in evidence.troubles}
    yield from (finding for finding in astray.values() if finding is not None)
    blocked = [trouble for trouble in evidence.troubles if astray[trouble.node] is None]
    if len(blocked) > 1 and len(blocked) == len(asked.nodes) - 1:
        yield _blocked_at_master(blocked, asked)
    else:
        yield from (_blocked_master(trouble, evidence, asked) for trouble in blocked)


def _astray(trouble: Trouble, evidence: Evidence, asked: Asked) -> Finding | None:
    """Returns what is wrong with the address at which a node looks for rank 0, None where it is rank 0's."""
    node, master = trouble.node, asked.nodes[0]
    own = next((facts.network for facts in evidence.nodes if facts.node == master), NetworkFacts())
    hosts = f"compare `getent hosts {master}` there and on {master}, mend /etc/hosts or the name server"
    if not trouble.address:
        seen = f"cannot resolve {master}, where rank 0 is: {trouble.error}"
        return Finding(code="NAME_RESOLUTION", level="error", node=node, seen=seen, todo=hosts, blames_node=True)
    if is_loopback(trouble.address):
        seen = f"resolves {master}, where rank 0 is, to itself ({trouble.address})"
        return Finding(code="LOOPBACK", level="error", node=node, seen=seen, todo=hosts, blames_node=True)
    known = {*own.addresses.values(), own.address} - {""}
    if known and trouble.address not in known:
        seen = f"looks for rank 0 at {trouble.address}, but {master} has {listed(sorted(known))}"
        return Finding(code="WRONG_MASTER", level="error", node=node, seen=seen, todo=hosts, blames_node=True)
    return None


def _blocked_at_master(troubles: Sequence[Trouble], asked: Asked) -> Finding:
    first = troubles[0]
    reach = "; they reach each other" if any(trouble.reached for trouble in troubles) else ""
    return Finding(
        code="PORT_BLOCKED",
        level="error",
        node=asked.nodes[0],
        seen=f"no other node reaches rank 0 at {first.address}:{first.port}: {first.error}{reach}",
        todo=_OPEN_PORTS,
        blames_node=bool(reach),
    )


def _blocked_master(trouble: Trouble, evidence: Evidence, asked: Asked) -> Finding:
    master = asked.nodes[0]
    others = "".join(
        f"; it {verb} {listed(names)}"
        for verb, names in (("reaches", trouble.reached), ("does not reach", trouble.unreached))
        if names
    )
    # Somebody else has come to rank 0, and this node gets to nobody.
    came = {rank.node for rank in evidence.ranks} - {master, trouble.node}
    return Finding(
        code="PORT_BLOCKED",
        level="error",
        node=trouble.node,
        seen=f"does not reach rank 0 at {trouble.address}:{trouble.port} ({master}): {trouble.error}{others}",
        todo=_OPEN_PORTS,
        blames_node=bool(came) and not trouble.reached,
    )


def _port_in_use(evidence: Evidence, asked: Asked) -> Iterator[Finding]:
    port = evidence.port
    if port is None or not port.asked or port.bound == port.asked:
        return
    holder = f" by {port.holder}" if port.holder else ""
    is_fatal = asked.needs_port or not port.bound
    instead = f", the ranks meet at {port.bound}" if port.bound else ", and so are all others on the list"
    yield Finding(
        code="PORT_IN_USE",
        level="error" if is_fatal else "warning",
        node=asked.nodes[0],
        seen=f"port {port.asked} was free and is held{holder} now{instead}",
        todo="the next attempt takes another port" if is_fatal else "nothing: your own code should not count on it",
    )


def _absent(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.silent:
        yield Finding(
            code="NODE_MISSING",
            level="error",
            node=node,
            seen=f"ranks of it have not come within {evidence.waited_s:.0f} s and left no word",
            todo="look at their logs and at the node; a slow start is given more time by train.start_timeout_s",
            blames_node=True,
        )
    for node in evidence.mute:
        yield Finding(
            code="PORT_BLOCKED",
            level="error",
            node=node,
            seen="connects to rank 0, and nothing larger arrives from it: a report of a few kB was lost",
            todo="compare the MTU of the nodes and of what lies between them (`ip link`, `ping -M do -s 1472`)",
            blames_node=len(evidence.mute) == 1 and len(evidence.nodes) > 2,
        )
    for node in evidence.late:
        yield Finding(
            code="NODE_MISSING",
            level="warning",
            node=node,
            seen=f"did not answer what it was asked within {evidence.waited_s:.0f} s, so less is known of it",
            todo="raise preflight.budget_s if the nodes are busy at the start",
        )


def _blocked_pairs(evidence: Evidence) -> Iterator[Finding]:
    pairs = [(probe.node, peer, why) for probe in evidence.probes for peer, why in probe.unreached.items()]
    culprit = common_end([pair[:2] for pair in pairs], num_nodes=len(evidence.nodes))
    if culprit:
        yield _blocked(culprit, pairs, evidence, blames_node=True)
        return
    for two in dict.fromkeys(tuple(sorted(pair[:2])) for pair in pairs):
        both = [pair for pair in pairs if {*pair[:2]} == {*two}]
        yield _blocked(", ".join(two), both, evidence, blames_node=False)


def _blocked(node: str, pairs: Sequence[tuple[str, str, str]], evidence: Evidence, *, blames_node: bool) -> Finding:
    def place(peer: str) -> str:
        facts = next((facts.network for facts in evidence.nodes if facts.node == peer), NetworkFacts())
        return f"{facts.address}:{facts.probe_port}"

    shown = [f"{caller} does not reach {peer} at {place(peer)} ({why})" for caller, peer, why in pairs]
    return Finding(
        code="PORT_BLOCKED",
        level="error",
        node=node,
        seen=listed(shown, most=3),
        todo="the collectives take ports from /proc/sys/net/ipv4/ip_local_port_range: open them between the nodes",
        blames_node=blames_node,
    )


def _clocks(evidence: Evidence) -> Iterator[Finding]:
    for probe in evidence.probes:
        offset, error = probe.clock_offset_s, probe.clock_error_s
        if offset is not None and abs(offset) - error > _SKEW_S:
            way = "ahead of" if offset > 0 else "behind"
            yield Finding(
                code="CLOCK_SKEW",
                level="warning",
                node=probe.node,
                seen=f"its clock is {abs(offset):.1f} s {way} rank 0's",
                todo="see `chronyc tracking` or `timedatectl` there; times in logs and files of the two do not compare",
            )
