"""What a TAB offers: the words of the scripts, and what real shells make of them."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from slurm_train.config.schema import OptimSection, all_keys
from slurm_train.tools.completion import settings_words
from slurm_train.tools.trackers import NAMES
from slurm_train.verbs import PUBLIC_VERBS, VERBS
from tests.support.command_line import Person

SCHEDULE_KINDS = get_args(all_keys(OptimSection)["schedule"])
RUNS = "3f9a1c07 44aa1c07 55aa1c07 9b1c44e0 gpt-stdlib mine odd"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs of several names, one of them with an id that shells would expand, and a sweep."""
    for run in ("gpt-stdlib/3f9a1c07", "gpt-stdlib/44aa1c07", "mine/55aa1c07", "sweeps/9b1c44e0", "odd/$(reboot)"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_settings_that_are_offered_are_accepted() -> None:
    """No key or value is offered that the configuration does not have."""
    from slurm_train.config.compose import compose
    from slurm_train.config.words import read_words

    words = settings_words()
    assert {"optim.lr=", "optim.schedule=cosine", "model=gpt", "+cluster=1x8", "cluster.env.", "model.width="} <= {
        *words
    }
    values: dict[str, list[str]] = {}
    for word in words:
        key, _, value = word.partition("=")
        if value and not key.startswith("hydra"):
            values.setdefault(key, []).append(word)
    # All keys at once, each with its first value, then each with its last.
    for place in (0, -1):
        settings = [group[place] for key, group in values.items() if "." in key]
        compose(read_words(["+cluster=1x1", "container=pyxis", "container.image=x", *settings]))


def test_sites_are_those_of_the_persons_own_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project / "home"))
    (project / "home" / ".config" / "slurm_train" / "site").mkdir(parents=True)
    (project / "home" / ".config" / "slurm_train" / "site" / "jupiter.yaml").touch()
    assert {"site=jupiter", "site=none"} <= {*settings_words()}


def test_all_trackers_are_offered() -> None:
    (only,) = [argument for argument in VERBS["track"].arguments or () if argument.names == ("--only",)]
    assert sorted(only.takes.split("|")) == sorted(NAMES)


MEASURE = """
import json, sys
from slurm_train.verbs import run
run(["complete"])
heavy = sorted({"torch", "hydra", "omegaconf", "yaml", "argparse", "subprocess", "shtab"} & set(sys.modules))
print(json.dumps(heavy), file=sys.stderr)
"""


def test_runs_are_named_and_nothing_heavy_is_imported(project: Path) -> None:
    done = Person(project).runs(sys.executable, "-c", MEASURE)
    assert json.loads(done.err) == []
    assert sorted(done.out.split()) == RUNS.split()


# Real shells


# What a person sends off is only repeated.
PROGRAM = """#!/bin/sh
echo "typed:" "$@"
"""


@pytest.fixture
def programs(project: Path) -> dict[str, str]:
    """An environment in which slurm-train is found."""
    folder = project / "bin"
    folder.mkdir()
    program = folder / "slurm-train"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    person = Person(project).environment()
    return person | {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(project), "TERM": "xterm"}


def write_script(shell_name: str, folder: Path, env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "slurm_train", "completion", shell_name]
    script = subprocess.check_output(command, text=True, env=env, cwd=folder)
    (folder / f"completion.{shell_name}").write_text(script)


def require(shell_name: str) -> None:
    if shutil.which(shell_name) is None:
        pytest.skip(f"{shell_name} is not installed")


# Prints what bash would offer at the end of each line.
BASH_DRIVER = """
eval "$(<completion.bash)"
complete -F _slurm_train learn
for COMP_LINE in "$@"; do
  COMP_POINT=${#COMP_LINE} COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
  read -ra COMP_WORDS <<<"${COMP_LINE//=/ = }"
  [[ $COMP_LINE == *' ' ]] && COMP_WORDS+=("")
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  function=$(complete -p "${COMP_WORDS[0]}" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
  $function "${COMP_WORDS[0]}" "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}" 2>/dev/null
  printf '%s ' "${COMPREPLY[@]}"
  echo
done
"""
IN_BASH = {
    "slurm-train sta": "status",
    "learn sta": "status",
    "slurm-train optim.sch": " ".join(
        f"optim.schedule={name}" for kind in SCHEDULE_KINDS if get_origin(kind) is Literal for name in get_args(kind)
    ),
    "slurm-train optim.schedule=co": "constant cosine",
    "slurm-train optim.schedule=cosine parallel.dp_r": "parallel.dp_replicate=",
    "slurm-train -m +cluster=4": "4x8",
    "slurm-train plan optim.l": "optim.lr= optim.lr_global_size= optim.lr_retune=linear optim.lr_retune=none "
    "optim.lr_retune=sqrt",
    "slurm-train optim.lr=3e-4 --mu": "--multirun",
    "slurm-train --cfg ": "all hydra job",
    # Without `$(reboot)`.
    "slurm-train checkpoint verify ": RUNS,
    "slurm-train status 3": "3f9a1c07",
    "slurm-train resume 9b1c44e0 optim.b": "optim.betas=",
    "slurm-train resume 9b1c44e0 --only fa": "failed",
    "slurm-train doctor +cl": "+cluster=1x1 +cluster=1x4 +cluster=1x8 +cluster=2x8 +cluster=4x8 +cluster=8x8",
    "slurm-train devcluster k": "kill-node",
    "slurm-train nonsense xyz": "",
    'slurm-train "optim.w': "optim.warmup_samples= optim.weight_decay=",
}


def test_bash_completes(project: Path, programs: dict[str, str]) -> None:
    write_script("bash", project, programs)
    command = ["bash", "--norc", "-c", BASH_DRIVER, "bash", *IN_BASH]
    lines = subprocess.check_output(command, cwd=project, env=programs, text=True).splitlines()
    offers = {line: " ".join(sorted(words.split())) for line, words in zip(IN_BASH, lines, strict=True)}
    wanted = {line: " ".join(sorted(words.split())) for line, words in IN_BASH.items()}
    assert offers == wanted
    first_words = subprocess.check_output([*command[:5], "slurm-train "], cwd=project, env=programs, text=True)
    assert {*PUBLIC_VERBS, "optim.lr="} <= {*first_words.split()}


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])", "", text)


class Terminal:
    """A shell at a terminal of its own.

    Args:
        argv: the shell.
        folder: where it starts.
        env: its environment.
    """

    def __init__(self, argv: list[str], folder: Path, env: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=env, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def types(self, text: str) -> None:
        self.seen = ""
        os.write(self.master, text.encode())

    def waits_for(self, text: str, *, within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while text not in _without_colours(self.seen):
            assert time.monotonic() < deadline, f"waited for {text!r}, saw {self.seen!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 4096).decode(errors="replace")

    def leaves(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for one in opened:
        one.leaves()


SHELLS = [
    ("bash", ["bash", "--norc", "--noprofile", "-i"], "PS1='rea''dy> '; eval \"$(<completion.bash)\"\n"),
    ("zsh", ["zsh", "-f", "-i"], "PS1='rea''dy> '; autoload -Uz compinit; compinit -u; eval \"$(<completion.zsh)\"\n"),
]
# What is typed before each TAB, and what the shell adds.
KEYS = (
    [("sta", "tus"), ("3f", "9a1c07"), ("--j", "son")],
    [("plan optim.sch", "edule="), ("cos", "ine"), ("+cluster=4", "x8"), ("--ran", "ks")],
    [("-m optim.grad", "_clip_norm="), ("0.5 train.max_s", "teps=")],
)


# `make test` installs no other shells.
@pytest.mark.parametrize(
    ("name", "argv", "start"),
    [pytest.param(*shell, marks=() if shell[0] == "bash" else pytest.mark.full) for shell in SHELLS],
)
def test_a_person_types_tab(
    name: str,
    argv: list[str],
    start: str,
    project: Path,
    programs: dict[str, str],
    terminals: list[Terminal],
) -> None:
    require(name)
    write_script(name, project, programs)
    terminal = Terminal(argv, project, programs)
    terminals.append(terminal)
    terminal.types(start)
    terminal.waits_for("ready> ")
    for line in KEYS:
        terminal.types("slurm-train ")
        for typed, added in line:
            terminal.types(f"{typed}\t")
            terminal.waits_for(added)
        terminal.types("\n")
        words = " ".join(typed + added for typed, added in line).replace("= ", "=")
        terminal.waits_for(f"typed: {words}")
        terminal.waits_for("ready> ")


IN_FISH = {
    "slurm-train sta": "status",
    "slurm-train status 3": "3f9a1c07",
    "slurm-train resume 9b1c44e0 --only fa": "failed",
    "slurm-train +cluster=4": "+cluster=4x8",
    "slurm-train -m seed=3 optim.schedule=c": "optim.schedule=constant optim.schedule=cosine",
    "slurm-train plan seed=3 optim.b": "optim.betas=",
}


@pytest.mark.full
def test_fish_completes(project: Path, programs: dict[str, str]) -> None:
    require("fish")
    write_script("fish", project, programs)
    for line, words in IN_FISH.items():
        command = f"source completion.fish; complete -C '{line}'"
        out = subprocess.check_output(["fish", "--no-config", "-c", command], text=True, env=programs, cwd=project)
        assert [text.partition("\t")[0] for text in out.splitlines()] == words.split()
