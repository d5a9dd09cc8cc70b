"""Where the ranks of an attempt meet: the first host of the step, at one of a fixed list of ports.

Every rank computes the same list, so nothing has to be told; who answers is checked by a handshake.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from slurm_train.errors import ClusterError
from slurm_train.slurm.allocation import Allocation
from slurm_train.slurm.ports import candidate_ports, ephemeral_low, first_free_port

_NUM_PORTS = 32


def master_of(env: Mapping[str, str]) -> str:
    """Returns the host of rank 0: the first of the step's nodes in rank order, else MASTER_ADDR.

    Never SLURM_LAUNCH_NODE_IPADDR (where srun was called), and never localhost by accident.

    Raises:
        ClusterError: none of them is set.
    """
    # Ranks that a local launch starts inside a job carry both; their own MASTER_ADDR is the nearer one.
    if "SLURM_STEP_ID" in env and "RANK" not in env:
        return Allocation.from_env(env).nodes[0]
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if int(env.get("WORLD_SIZE", "1")) == 1:
        return "127.0.0.1"
    raise ClusterError("MASTER_ADDR is not set", hint="start ranks with srun, torchrun, or `python -m slurm_train`")


def meeting_ports(run_id: str, *, attempt: int, env: Mapping[str, str]) -> list[int]:
    """Returns the ports to try, the same list on every rank; a MASTER_PORT that was probed comes first."""
    seed = f"{run_id}.{env.get('SLURM_JOB_ID', 'local')}.{env.get('SLURM_STEP_ID', '0')}:{attempt}"
    ports = candidate_ports(seed=seed, count=_NUM_PORTS, ephemeral_low=ephemeral_low())
    # torchrun's is where its agents meet, and stays taken.
    probed = "" if is_under_torchrun(env) else env.get("MASTER_PORT", "")
    return [int(probed), *ports] if probed.isdigit() else ports


def is_under_torchrun(env: Mapping[str, str]) -> bool:
    """Returns whether torchrun, or an agent of its kind, has started this process."""
    return "TORCHELASTIC_RUN_ID" in env


def lobby_ports(name: str) -> list[int]:
    """Returns the ports at which ranks that torchrun has started meet before they know their attempt."""
    return candidate_ports(seed=name, count=_NUM_PORTS, ephemeral_low=ephemeral_low())


def probe_port(run_id: str, *, attempt: int, env: Mapping[str, str]) -> int:
    """Returns a port that is free on this machine now, for scripts that read MASTER_PORT and nothing else.

    A hint only: where all candidates are taken it is one that the kernel gives, and nothing stops an attempt here.
    """
    own = {name: value for name, value in env.items() if name != "MASTER_PORT"}
    candidates = meeting_ports(run_id, attempt=attempt, env=own)
    try:
        return first_free_port(candidates)
    except (ClusterError, OSError):
        with contextlib.suppress(OSError), socket.create_server(("", 0)) as kernels:
            return int(kernels.getsockname()[1])
    return candidates[0]
