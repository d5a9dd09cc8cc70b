"""Where a run came from: words, code, versions, machine. Read by people later, never by the run itself.

Written when the job id has been printed: looking up versions takes longer than submitting.
"""

from __future__ import annotations

import getpass
import json
import socket
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from slurm_train.config.secrets import redact
from slurm_train.launch.preparation import Source
from slurm_train.rundir.files import write_atomic

_PACKAGES = ("torch", "numpy", "submitit", "hydra-core", "omegaconf", "xxhash", "safetensors")


def write_provenance(path: Path, source: Source, *, words: Sequence[str]) -> None:
    """Writes `provenance.json`.

    Args:
        path: the file.
        source: the code that was copied, and what git said about it.
        words: the command line.
    """
    facts = {
        "words": [redact(word) for word in words],
        "directory": str(source.directory),
        "user": getpass.getuser(),
        "host": socket.gethostname(),
        "python": sys.executable,
        "time_unix_s": time.time(),
        "git_commit": source.state.commit,
        "git_dirty": bool(source.state.difference),
        "git_diff": redact(source.state.difference),
        "num_files": len(source.files),
        "versions": {
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: _version(name) for name in _PACKAGES},
        },
    }
    write_atomic(path, json.dumps(facts, indent=2) + "\n", durable=False)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
