"""Where the ranks of an attempt meet: the first host of the step, at one of a fixed list of ports.

Every rank computes the same list per job, step and attempt, so nothing has to be exchanged; who answers is checked by a
handshake. The ports are below the range from which the kernel hands out ports by itself, or in the one that a site
opens. A free one is found by binding it, on the node of rank 0; nothing reserves it between that test and its use.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_train.config.schema import ClusterSection
from slurm_train.errors import ClusterError, ConfigError
from slurm_train.slurm.allocation import Allocation

NODE = "%N"
"""Slurm's name of the node in `cluster.rendezvous_address`."""
PORTS = "SLURM_TRAIN_PORTS"
"""Variable of a job with `cluster.rendezvous_ports`: every process of it computes the same list of ports."""
_NUM_PORTS = 32
_LOW = 10000
_DEFAULT_EPHEMERAL_LOW = 32768
# Fewer than this many ports below the ephemeral range: the site has widened it, and staying below is no use.
_MIN_SPAN = 1000
# Registered or customary on compute nodes: NFS, kubelet, memcached, databases, exporters, and the default of torchrun.
_CUSTOMARY = frozenset(
    {10000, 10050, 10051, 10110, 11211, 11214, 11215, 11311, 11434, 12345, 15672, 16379, 19999, 20048, 20049, 24224}
    | {25672, 26379, 27017, 27018, 27019, 29400, 29500, 30000}
    | set(range(10248, 10260))
)
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def master_of(env: Mapping[str, str]) -> str:
    """Returns the host of rank 0: MASTER_ADDR of our supervisor, else the first of the step's nodes, else MASTER_ADDR.

    Never SLURM_LAUNCH_NODE_IPADDR (where srun was called), and never localhost by accident.

    Raises:
        ClusterError: none of them is set.
    """
    # A NodeName need not be a name that resolves; whoever starts an attempt has looked.
    if env.get("SLURM_TRAIN_ATTEMPT") and env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    # Ranks that a local launch starts inside a job carry both; their own MASTER_ADDR is the nearer one.
    if "SLURM_STEP_ID" in env and "RANK" not in env:
        return Allocation.from_env(env).nodes[0]
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if int(env.get("WORLD_SIZE", "1")) == 1:
        return "127.0.0.1"
    raise ClusterError("MASTER_ADDR is not set", hint="start ranks with srun, torchrun, or `python -m slurm_train`")


def chosen_address(cluster: ClusterSection, node: str, *, address_on: Callable[[str], str]) -> str:
    """Returns where `cluster.rendezvous_address` has the ranks meet on a node; "" for the node's name.

    Args:
        cluster: the settings.
        node: Slurm's name of the node.
        address_on: returns the address of one of its interfaces, "" where it has none.
    """
    name = cluster.rendezvous_address or ""
    if NODE in name:
        return name.replace(NODE, node)
    return address_on(cluster.rendezvous_interface) if cluster.rendezvous_interface else ""


def read_ports(text: str) -> range:
    """Returns the ports of a range, e.g. those of "20000-20100"; the last one belongs to it.

    Raises:
        ConfigError: it is no range of ports that a user may listen at.
    """
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text.strip())
    low, high = (0, 0) if match is None else (int(match[1]), int(match[2] or match[1]))
    if not 1024 <= low <= high <= 65535:
        raise ConfigError(
            f"cluster.rendezvous_ports={text} is no range of ports from 1024 to 65535",
            hint="write the first and the last one: cluster.rendezvous_ports=20000-20100",
        )
    return range(low, high + 1)


def is_under_torchrun(env: Mapping[str, str]) -> bool:
    """Returns whether torchrun, or an agent of its kind, has started this process."""
    return "TORCHELASTIC_RUN_ID" in env


def meeting_ports(run_id: str, *, attempt: int, env: Mapping[str, str]) -> list[int]:
    """Returns the ports to try, the same list on every rank; a MASTER_PORT that was probed comes first."""
    seed = f"{run_id}.{env.get('SLURM_JOB_ID', 'local')}.{env.get('SLURM_STEP_ID', '0')}:{attempt}"
    ports = candidate_ports(seed, within=env.get(PORTS, ""))
    # torchrun's is where its agents meet, and stays taken.
    probed = "" if is_under_torchrun(env) else env.get("MASTER_PORT", "")
    return [int(probed), *ports] if probed.isdigit() else ports


def probe_port(run_id: str, *, attempt: int, env: Mapping[str, str]) -> int:
    """Returns a port that is free on this machine now, for scripts that read MASTER_PORT and nothing else.

    A hint only: where all candidates are taken it is one that the kernel gives, and nothing stops an attempt here.
    """
    variables = {name: value for name, value in env.items() if name != "MASTER_PORT"}
    candidates = meeting_ports(run_id, attempt=attempt, env=variables)
    for port in (*candidates, 0):
        # No SO_REUSEADDR: a port in TIME_WAIT is not worth the risk while there are others.
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    return candidates[0]


def candidate_ports(seed: str, *, ephemeral_low: int | None = None, within: str = "") -> list[int]:
    """Returns different ports in the order in which to try them; equal arguments give equal lists.

    Args:
        seed: distinguishes this attempt from all others, made of run id, job, step and attempt.
        ephemeral_low: lowest port that the kernel hands out by itself; default: that of this machine's kernel.
        within: the range that a site opens, as `read_ports` takes it, of which every port counts; "" for none.
    """
    if within:
        opened = read_ports(within)
        first = _drawn(seed, 0) % len(opened)
        return [*opened[first:], *opened[:first]][:_NUM_PORTS]
    high = min(_kernels_lowest() if ephemeral_low is None else ephemeral_low, 65536)
    if high - _LOW < _MIN_SPAN:
        high = _DEFAULT_EPHEMERAL_LOW
    ports: dict[int, None] = {}
    draw = 0
    while len(ports) < _NUM_PORTS:
        port = _LOW + _drawn(seed, draw) % (high - _LOW)
        if port not in _CUSTOMARY:
            ports[port] = None
        draw += 1
    return list(ports)


def _drawn(seed: str, draw: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{draw}".encode(), digest_size=8).digest(), "big")


def _kernels_lowest() -> int:
    try:
        return int(_RANGE_FILE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _DEFAULT_EPHEMERAL_LOW
