from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.verbs import PUBLIC_VERBS, VERBS
from tests.cli.conftest import Shell
from tests.support.command_line import Person

# Prints the user time and whether heavy modules came along, after the verb has run.
MEASURE = """
import json, resource, sys
from slurm_train.verbs import run
try:
    code = run(sys.argv[1:])
except SystemExit as err:
    code = err.code
seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime
heavy = sorted({"torch", "sklearn"} & set(sys.modules))
print(json.dumps({"code": code, "user_s": seconds, "heavy": heavy}), file=sys.stderr)
"""


def measure(folder: Path, *words: str) -> dict[str, object]:
    done = Person(folder).runs(sys.executable, "-c", MEASURE, *words)
    facts: dict[str, object] = json.loads(done.err.splitlines()[-1])
    return facts | {"out": done.out}


@pytest.mark.parametrize(
    "words", [["--help"], *([verb, "--help"] for verb in PUBLIC_VERBS)], ids=lambda words: words[0]
)
def test_help_is_quick_has_examples_and_imports_no_torch(words: list[str], tmp_path: Path) -> None:
    facts = measure(tmp_path, *words)
    assert (facts["code"], facts["heavy"]) == (0, [])
    assert isinstance(facts["user_s"], float) and facts["user_s"] < 0.5
    out = str(facts["out"])
    typed = "python -m slurm_train" if words == ["--help"] else f"python -m slurm_train {words[0]}"
    examples = [line for line in out.splitlines() if line.startswith("  ") and typed in line]
    assert examples, out


def test_every_verb_of_the_table_has_its_function_and_refuses_other_flags(shell: Shell) -> None:
    assert all(callable(verb.load()) for verb in VERBS.values())
    for verb in PUBLIC_VERBS:
        err = shell.refuses("", f"{verb} --no-such-flag")
        assert "--no-such-flag" in err or "usage:" in err


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """What `... | head` does to a command that still prints."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "slurm_train", "--help"],
        cwd=tmp_path,
        env=Person(tmp_path).environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
