"""What is wrong with the interfaces and names that collectives would use, and what they should use instead. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from slurm_train.tools.doctor.evidence import Evidence
from slurm_train.tools.doctor.facts import NetworkFacts, NodeFacts
from slurm_train.tools.doctor.finding import Finding
from slurm_train.tools.doctor.majority import listed


def interface_findings(evidence: Evidence) -> Iterator[Finding]:
    """Yields WRONG_INTERFACE, and LOOPBACK and NAME_RESOLUTION of a node's own name."""
    for node in evidence.nodes:
        yield from _interfaces(node)
    yield from _unreached_interfaces(evidence)


def is_loopback(address: str) -> bool:
    """Returns whether an address leads back to the machine that uses it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interfaces(node: NodeFacts) -> Iterator[Finding]:
    """Yields what is wrong with the address that gloo would announce, and with interfaces that somebody has named."""
    network = node.network
    missing = _missing_interfaces(network)
    if missing:
        variable, name = missing
        yield Finding(
            code="WRONG_INTERFACE",
            level="error",
            node=node.node,
            seen=f"{variable}={name}: there is no such interface with an address, but {_names(network)}",
            todo=f"set cluster.network_interface={network.interface or 'NAME'}, or drop it",
        )
    elif not network.gloo_interface and (problem := own_name_problem(network)) is not None:
        code, seen = problem
        todo = f"mend /etc/hosts there; until then GLOO_SOCKET_IFNAME={network.interface} is set for the ranks"
        yield Finding(code=code, level="warning", node=node.node, seen=seen, todo=todo)


def _shown(network: NetworkFacts) -> list[str]:
    return [f"{name} ({address})" for name, address in network.addresses.items()] or ["none"]


def _names(network: NetworkFacts) -> str:
    return listed(list(network.addresses)) or "none"


def _missing_interfaces(network: NetworkFacts) -> tuple[str, str] | None:
    for name in network.gloo_interface.split(","):
        if name and name not in network.addresses:
            return "GLOO_SOCKET_IFNAME", name
    asked = network.nccl_interface
    # "^docker,lo" leaves out, "=eth0" is exact, "eth" is any that begins so.
    if asked and not asked.startswith("^"):
        exact, names = asked.startswith("="), asked.lstrip("=").split(",")
        if not any(own == name if exact else own.startswith(name) for own in network.addresses for name in names):
            return "NCCL_SOCKET_IFNAME", asked
    return None


def own_name_problem(network: NetworkFacts) -> tuple[str, str] | None:
    """Returns code and words for a node whose own name leads gloo astray, None where it does not."""
    name, found = network.own_name, network.own_addresses
    if not name or not network.interface:
        return None
    if not found:
        return "NAME_RESOLUTION", f"cannot resolve its own name {name}, which gloo announces"
    if all(is_loopback(address) for address in found):
        return "LOOPBACK", f"resolves its own name {name} to itself ({listed(found)}), which gloo would announce"
    if not set(found) & set(network.addresses.values()):
        seen = f"resolves its own name {name} to {listed(found)}, which is no address of it ({listed(_shown(network))})"
        return "NAME_RESOLUTION", seen
    return None


def _unreached_interfaces(evidence: Evidence) -> Iterator[Finding]:
    """Yields the addresses that gloo would announce and nobody reaches, once for each interface that was named."""
    callers = {peer: probe.node for probe in evidence.probes for peer in probe.unreached_gloo}
    # A name that leads astray is said already, and an interface that is not there has no address.
    explained = {node.node for node in evidence.nodes if any(_interfaces(node))}
    unreached = [node for node in evidence.nodes if node.node in callers and node.node not in explained]
    for name in dict.fromkeys(node.network.gloo_interface for node in unreached):
        nodes = [node for node in unreached if node.network.gloo_interface == name]
        first = nodes[0].network
        addresses = listed([node.network.gloo_address for node in nodes])
        mend = f"set cluster.network_interface={first.interface}"
        yield Finding(
            code="WRONG_INTERFACE",
            level="error" if name else "warning",
            node="" if len(nodes) == len(evidence.nodes) else ", ".join(node.node for node in nodes),
            seen=f"gloo would announce {f'{name} ({addresses})' if name else addresses}, which "
            f"{callers[nodes[0].node]} cannot reach; {first.interface} ({first.address}) answers",
            todo=mend if name else f"{mend}; until then GLOO_SOCKET_IFNAME={first.interface} is set for the ranks",
        )


def interface_choices(evidence: Evidence) -> dict[str, dict[str, str]]:
    """Returns by node the variables that its ranks should have so that collectives take the route to their peers.

    Nothing that somebody has named is changed. gloo's is set where its own choice leads nowhere; NCCL's where the node
    has several interfaces and no InfiniBand, since NCCL then takes the first one that it finds.
    """
    choices: dict[str, dict[str, str]] = {}
    for node in evidence.nodes:
        network, chosen = node.network, dict[str, str]()
        unreached = any(node.node in probe.unreached_gloo for probe in evidence.probes)
        if network.interface and not network.gloo_interface and (own_name_problem(network) or unreached):
            chosen["GLOO_SOCKET_IFNAME"] = network.interface
        several = len(network.addresses) > 1 and not network.has_infiniband
        if network.interface and not network.nccl_interface and several:
            chosen["NCCL_SOCKET_IFNAME"] = f"={network.interface}"
        if chosen:
            choices[node.node] = chosen
    return choices
