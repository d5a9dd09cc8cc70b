"""Gathers what a rank reports of itself, and the first rank of a node of its node. Reads /proc, sockets and files."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

from slurm_train.config.schema import RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.layout import RunDirectory
from slurm_train.tools.doctor.facts import NetworkFacts, NodeFacts, RankFacts
from slurm_train.tools.doctor.gpus import logged_errors, read_gpus, visible_gpus
from slurm_train.tools.doctor.interfaces import has_infiniband, interface_addresses, link_speed_mbit, resolve, route_to
from slurm_train.tools.doctor.places import read_disks, read_files
from slurm_train.tools.doctor.versions import read_versions

_MIB = 1 << 20


def read_rank(place: RankPlace, env: Mapping[str, str]) -> RankFacts:
    """Returns what this rank knows of itself.

    Args:
        place: where it stands.
        env: its environment.
    """
    task = env.get("SLURM_PROCID", "")
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        node_rank=place.node_rank,
        world_size=place.world_size,
        local_world_size=place.local_world_size,
        node=place.host,
        pid=os.getpid(),
        slurm_rank=int(task) if task.isdigit() and "SLURM_STEP_ID" in env else None,
        visible_gpus=_count_gpus(env),
        cpus=sorted(os.sched_getaffinity(0)),
        max_open_files=_soft_limit(resource.RLIMIT_NOFILE),
        max_locked_mb=_in_mib(_soft_limit(resource.RLIMIT_MEMLOCK)),
    )


def _count_gpus(env: Mapping[str, str]) -> int | None:
    names = visible_gpus(env.get("CUDA_VISIBLE_DEVICES"))
    if names is None:
        return None
    # Bound one by one each task sees a single one; Slurm knows how many its step has on the node.
    on_node = env.get("SLURM_GPUS_ON_NODE", "")
    return max(len(names), int(on_node) if on_node.isdigit() and len(names) == 1 else 0)


def _soft_limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _in_mib(size: int | None) -> int | None:
    return None if size is None else size // _MIB


def read_network(place: RankPlace, env: Mapping[str, str], *, master: str, peer: str, probe_port: int) -> NetworkFacts:
    """Returns how this node is reached.

    Args:
        place: this rank.
        env: its environment.
        master: host name of rank 0's node.
        peer: host name of another node, which decides the route; rank 0's but on rank 0's node itself.
        probe_port: where this node answers probes.
    """
    if not place.spans_nodes:
        return NetworkFacts(master_addresses=["127.0.0.1"], address="127.0.0.1", probe_port=probe_port)
    addresses, own_name = interface_addresses(), socket.gethostname()
    found, error = resolve(master)
    towards = found if peer == master else resolve(peer)[0]
    interface, address = route_to(towards[0], addresses) if towards else ("", "")
    if interface == "" and len(addresses) == 1:
        # Whatever leads this node astray, there is but one way out of it.
        ((interface, address),) = addresses.items()
    return NetworkFacts(
        addresses=addresses,
        interface=interface,
        address=address,
        own_name=own_name,
        own_addresses=resolve(own_name)[0],
        master_addresses=found,
        master_error=error,
        gloo_interface=env.get("GLOO_SOCKET_IFNAME", ""),
        nccl_interface=env.get("NCCL_SOCKET_IFNAME", ""),
        has_infiniband=has_infiniband(),
        link_mbit_per_s=link_speed_mbit(interface) if interface else None,
        probe_port=probe_port,
    )


def read_node(
    run: RunDirectory, config: RunConfig, place: RankPlace, env: Mapping[str, str], *, network: NetworkFacts
) -> NodeFacts:
    """Returns what the first rank of a node knows of the node.

    Args:
        run: the run.
        config: its configuration, as read here.
        place: this rank.
        env: its environment.
        network: what `read_network` gave.
    """
    gpus, num_gpus, driver = read_gpus(visible_gpus(env.get("CUDA_VISIBLE_DEVICES")))
    return NodeFacts(
        node=place.host,
        node_rank=place.node_rank,
        num_cpus=os.cpu_count() or 0,
        load=os.getloadavg()[0],
        network=network,
        files=read_files(run, config, directory=Path.cwd()),
        disks=read_disks(run, config, env),
        gpus=gpus,
        num_gpus=num_gpus,
        gpu_errors=logged_errors(),
        versions=read_versions(driver=driver),
    )
