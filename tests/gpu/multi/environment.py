"""What ranks of these tests have in their environment, where several GPUs, one or none are."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.command_line import REPOSITORY

SHARES = "GPU_TESTS_SHARE"
"""Set to anything: all ranks on one GPU."""
ON_CPU = "GPU_TESTS_ON_CPU"
"""Set to anything: the ranks are on the CPU and exchange over gloo, which tries the tests."""
_SHARE = Path(__file__).with_name("share")
_NCCL = {
    # Ranks of one GPU that count as several hosts have sockets alone.
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    # Kernels of two ranks wait for each other on the same processors.
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    # NCCL 2.30 has a switch for it.
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
}


def rank_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of ranks, from that of the tests."""
    shares = bool(env.get(SHARES)) and not env.get(ON_CPU)
    # What this Python finds, its ranks find: wheels in a folder, too.
    paths = [*([str(_SHARE)] if shares else []), str(REPOSITORY), *filter(None, sys.path)]
    found = {**env, "PYTHONPATH": os.pathsep.join(paths)}
    if env.get(ON_CPU):
        return {**found, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**found, **_NCCL} if shares else found
