"""Two gloo ranks that run one small program, forked from a process that knows torch."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from tests.support.warm_ranks import start_rank

_TIMEOUT_S = 240.0


def run_pair(folder: Path, program: str, *words: str) -> list[Any]:
    """Runs the program as rank 0 and as rank 1 and returns what each has left as JSON in the file OUT names.

    Args:
        folder: where the program and the two files are put.
        program: Python source; it opens the process group itself and ends with `os._exit(0)`.
        words: its command line.
    """
    path = folder / "program.py"
    path.write_text(program)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    outs = [folder / f"rank_{rank}.json" for rank in range(2)]
    ranks = [
        start_rank(path, *words, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "OUT": str(outs[rank])})
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=_TIMEOUT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(texts)
    return [json.loads(out.read_text()) for out in outs]
