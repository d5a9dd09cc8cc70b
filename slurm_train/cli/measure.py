"""`measure`: builds the model of a configuration (YAML on stdin) without its memory and prints its size as JSON.

What `plan --measure` starts in a process of its own, since it imports torch and the user's code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.config.frozen import dump_config
from slurm_train.config.schema import RunConfig, build_config
from slurm_train.errors import ConfigError

_TIMEOUT_S = 300.0


def main(words: Sequence[str]) -> int:
    """Measures; words are the samples of a micro-batch and "half" or "full"."""
    import yaml

    from slurm_train.train.measure import measure_model

    batch_size, precision = words
    config = build_config(RunConfig, yaml.safe_load(sys.stdin.read()))
    # A model may print; what is read is the last line.
    out, sys.stdout = sys.stdout, sys.stderr
    found = measure_model(config, batch_size=int(batch_size), half=precision == "half")
    print(json.dumps(found), file=out)
    return 0


def measure_apart(
    config: RunConfig, *, batch_size: int, half: bool, env: Mapping[str, str], cwd: Path
) -> dict[str, Any]:
    """Returns what `measure` prints, from a process of its own.

    Raises:
        ConfigError: the model or its data cannot be built here.
    """
    command = [sys.executable, "-m", "slurm_train", "measure", str(batch_size), "half" if half else "full"]
    # Nobody's GPU is needed, and a login node's may be somebody else's.
    apart = {**env, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command,
            input=dump_config(config),
            env=apart,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the model was not built within {_TIMEOUT_S:.0f} s", hint="leave --measure out, or try it on a node"
        ) from None
    if done.returncode:
        raise ConfigError(
            f"the model cannot be measured here: {_reason(done.stderr)}",
            hint="`plan` without --measure needs no model",
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _reason(text: str) -> str:
    """Returns our own error's line, else the last one: a traceback ends with what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (own or lines or ["it says nothing"])[-1]
