"""Lets several ranks share a GPU: Python imports it at its start where this folder is on the path.

NCCL refuses two ranks on one GPU of one host, and takes `NCCL_HOSTID` for the host. With another one for each rank they
count as hosts of their own, and exchange over sockets.
"""

from __future__ import annotations

import os

_rank = os.environ.get("RANK")
if _rank is not None:
    os.environ.setdefault("NCCL_HOSTID", f"rank{_rank}")
