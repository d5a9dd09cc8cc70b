"""torch's elastic agent on one node: it starts the node's ranks, and starts them again when one of them fails.

This is what torchrun runs. Here it runs in a thread, so that its process can hear the signals that Slurm sends: the
agent's own handlers would kill the ranks after 30 s, while they are saving. The thread installs none.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_train.errors import EXIT_DONE, EXIT_FAILURE


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRanks:
    """The ranks of one node, and where their nodes meet."""

    run_id: str
    """Tells this step from others at the same place."""
    num_nodes: int
    node_rank: int
    """0 on the node that holds the meeting point."""
    host: str
    """Name by which the others reach this node."""
    num_ranks: int
    """Of this node."""
    endpoint: str
    """ "host:port" on the first node."""
    max_restarts: int
    timeout_s: float
    """For the nodes to come together."""


def run_ranks(node: NodeRanks, command: Sequence[str]) -> int:
    """Runs this node's ranks to their end and returns an exit code: 0 when all ended well. On every node, together.

    Args:
        node: the ranks.
        command: what each of them runs.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=node.num_nodes,
        max_nodes=node.num_nodes,
        nproc_per_node=node.num_ranks,
        run_id=node.run_id,
        role="ranks",
        rdzv_backend="c10d",
        rdzv_endpoint=node.endpoint,
        rdzv_configs={
            "is_host": node.node_rank == 0,
            "join_timeout": int(node.timeout_s),
            "read_timeout": int(node.timeout_s),
        },
        max_restarts=node.max_restarts,
        monitor_interval=0.5,
        local_addr=node.host,
    )
    # It warns, at each start of the ranks, that it hears no signals: that is what the thread is for.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_is_worth_saying)
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as err:
        failures = ", ".join(f"rank {rank}: exit code {failure.exitcode}" for rank, failure in err.failures.items())
        print(f"error: ranks failed after {node.max_restarts} restarts on {node.host}: {failures}", file=sys.stderr)
        return EXIT_FAILURE
    except Exception:
        # Whatever it is, the other nodes wait for this one's exit code.
        traceback.print_exc()
        return EXIT_FAILURE
    return EXIT_DONE


def _is_worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Failed to register signal handlers")
