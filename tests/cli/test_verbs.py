from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.verbs import PUBLIC_VERBS, VERBS, parse
from tests.cli.conftest import Shell
from tests.support.command_line import Person

# Prints whether heavy modules came along, after the verb has run.
MEASURE = """
import json, sys
from slurm_train.verbs import run
try:
    code = run(sys.argv[1:])
except SystemExit as err:
    code = err.code
heavy = sorted({"torch", "sklearn", "submitit", "transformers", "huggingface_hub"} & set(sys.modules))
print(json.dumps({"code": code, "heavy": heavy}), file=sys.stderr)
"""


@pytest.mark.parametrize(
    "words", [["--help"], *([verb, "--help"] for verb in PUBLIC_VERBS)], ids=lambda words: words[0]
)
def test_help_has_examples_and_imports_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    done = Person(tmp_path).runs(sys.executable, "-c", MEASURE, *words)
    assert json.loads(done.err.splitlines()[-1]) == {"code": 0, "heavy": []}
    typed = "python -m slurm_train" if words == ["--help"] else f"python -m slurm_train {words[0]}"
    examples = [line for line in done.out.splitlines() if line.startswith("  ") and typed in line]
    assert examples, done.out


def test_status_reads_no_configuration(tmp_path: Path) -> None:
    """A third of the time of `status` of 100 runs was the import of what composes one."""
    program = """
import sys
from slurm_train.verbs import run
run(["status", "--root", sys.argv[1]])
print(sorted({"yaml", "hydra", "slurm_train.config.schema"} & set(sys.modules)), file=sys.stderr)
"""
    done = Person(tmp_path).runs(sys.executable, "-c", program, str(tmp_path))
    assert done.err.splitlines()[-1] == "[]", done.err


def test_help_costs_at_most_four_times_what_hydra_costs() -> None:
    """Ratios of processor time, the least of five turns each: a busy machine slows both."""
    programs = {
        "hydra": "import hydra, omegaconf",
        "help": "from slurm_train.verbs import run; run(['evaluate', '--help'])",
    }
    user_s: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(5):
        for name, program in programs.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL, check=False)
            user_s[name].append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    assert min(user_s["help"]) < 4 * min(user_s["hydra"]), user_s


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


@pytest.mark.parametrize("words", [["resume", ""], ["cancel", ""], ["logs", "", "-f"], ["resume", "", "optim.lr=1"]])
def test_an_empty_word_does_not_stand_for_the_newest_run(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `resume "$RUN"` with a variable that is not set.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        parse(words[0], words[1:])
    assert ended.value.code == 2 and "shell variable" in capsys.readouterr().err
