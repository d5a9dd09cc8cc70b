"""Which node to do without: a pure function of the ledger.

A program that fails, fails anywhere; a node that is broken fails again and again. Two fruitless failures in a row on
the same node are taken for the node's. If it was the program after all, the third failure elsewhere ends the run as
before: a change of nodes adds nothing to the budget.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slurm_train.requeue.budget import is_fruitful

_ON_NODE = re.compile(r"^(?:ranks? [\d,-]+ on|node failure on|no answer from) (?P<node>[^\s:,\[\]]+)(?::| within |$)")


def node_of(cause: str) -> str:
    """Returns the node in words like "rank 3 on node2: Killed", "" where none or several are named."""
    match = _ON_NODE.match(cause)
    return match["node"] if match else ""


def last_bad_node(ledger: Sequence[Mapping[str, Any]]) -> str:
    """Returns the node that the newest attempt failed on in vain, "" where it did otherwise."""
    if not ledger or ledger[-1].get("reason") != "failed":
        return ""
    newest = ledger[-1]
    if is_fruitful(newest):
        return ""
    return str(newest.get("failed_on", ""))
