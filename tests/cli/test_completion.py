"""What a TAB offers: as values, and by real shells."""

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
from typing import Any

import pytest

from slurm_train.tools.completion import candidates
from slurm_train.verbs import PUBLIC_VERBS
from tests.support.command_line import Person, write


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with runs of two names, a sweep, and configurations of its own."""
    for run in ("gpt-stdlib/3f9a1c07", "gpt-stdlib/44aa1c07", "mine/55aa1c07", "sweeps/9b1c44e0"):
        (tmp_path / "runs" / run).mkdir(parents=True)
    (tmp_path / "runs" / "odd" / "$(reboot)").mkdir(parents=True)
    (tmp_path / "other" / "far" / "66aa1c07").mkdir(parents=True)
    own = {"study.yaml": "", "model/own.yaml": "_target_: x\nhidden: 3\n", "cluster/jupiter.yaml": ""}
    write(tmp_path / "site", own)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offered(line: str) -> list[str]:
    """Returns what a line ending at the cursor is completed to, e.g. for "status 3f"."""
    *words, current = line.split(" ")
    return [text for text, _ in candidates(words, current)]


RUNS = "3f9a1c07 44aa1c07 55aa1c07 gpt-stdlib mine"
OFFERS = {
    "che": "checkpoint checkpoint.",
    "checkpoint ": "diff export gc ls verify",
    "checkpoint verify ": "3f9a1c07 44aa1c07 55aa1c07 gpt-stdlib mine odd $(reboot)",
    "status gpt-stdlib/": "gpt-stdlib/3f9a1c07 gpt-stdlib/44aa1c07",
    "status --": "--help --json --last --root --since --state --watch --where",
    "status --state running,fai": "running,failed",
    "status --root other ": "66aa1c07 far",
    "status --root ot": "other/",
    "logs 3f9a1c07 ": "",
    "resume 9": "9b1c44e0",
    "resume 9b1c44e0 --only failed,mi": "failed,missing",
    "resume 9b1c44e0 --only=failed,mi": "--only=failed,missing",
    "resume 3f9a1c07 optim.b": "optim.betas=",
    "resume 3f9a1c07 --accept code,da": "code,data",
    "collate ": "9b1c44e0",
    "scaling --st": "--steps",
    "scaling +cl": "+cluster=",
    "devcluster k": "kill-node",
    "nonsense xyz": "",
    "optim.sch": "optim.schedule=",
    "plan optim.schedule=c": "optim.schedule=constant optim.schedule=cosine",
    "-m optim.schedule=cosine,c": "optim.schedule=cosine,constant",
    "opti": "optim. optim=",
    "optim=": "optim=adamw optim=custom optim=muon optim=sgd",
    "optim=sgd optim.m": "optim.min_lr_ratio= optim.momentum=",
    "optim._": "optim._target_=",
    "checkpoint.every_steps=": "checkpoint.every_steps=auto checkpoint.every_steps=null",
    "mod": "model. model=",
    "model=": "model=cnn model=custom model=gpt model=gpt2-124m model=hf model=llama3-70b model=llama3-8b",
    "model=cnn model.fe": "model.features=",
    "--config-dir site model=own model.h": "model.hidden=",
    "--config-dir site +cluster=j": "+cluster=jupiter",
    "--config-dir site --config-name s": "study",
    "+cluster=4": "+cluster=4x8",
    "cluster.en": "cluster.env.",
    "+experiment=": "+experiment=digits",
    "~mod": "~model ~model.",
    "hydra/s": "hydra/sweeper=",
    "--cfg ": "all hydra job",
    "--info defaults": "defaults defaults-tree",
}


@pytest.mark.parametrize("line", OFFERS)
def test_a_tab_offers(line: str, project: Path) -> None:
    assert sorted(offered(line)) == sorted(OFFERS[line].split())


def test_sites_are_those_of_the_persons_own_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project / "home"))
    (project / "home" / ".config" / "slurm_train" / "site").mkdir(parents=True)
    (project / "home" / ".config" / "slurm_train" / "site" / "jupiter.yaml").touch()
    assert offered("plan site=") == ["site=jupiter", "site=none"]
    assert offered("plan container=") == ["container=apptainer", "container=pyxis"]
    assert offered("plan launch=in") == ["launch=interactive"]


def test_an_empty_word_offers_verbs_groups_and_sections(project: Path) -> None:
    found = offered("")
    assert {*PUBLIC_VERBS, "+cluster=", "model=", "data=", "+experiment=", "optim.", "train."} <= set(found)
    assert len(found) < 60, "a screen"
    assert offered("status --root nowhere x") == []


def test_what_is_offered_is_accepted(shell: Any) -> None:
    """No section, key or value is offered that the configuration does not have."""
    from slurm_train.config.compose import compose
    from slurm_train.config.words import read_words

    keys = [word for head in offered("") if head.endswith(".") for word in offered(head)]
    for key in keys:
        values = offered(key) if key.endswith("=") and not key.startswith(("hydra", "run.root", "data.path")) else []
        for word in values:
            needed = {"cluster": ["+cluster=1x1"], "container": ["container=pyxis", "container.image=x"]}
            if not word.startswith("cluster.python"):
                compose(read_words([*needed.get(word.partition(".")[0], []), word]))
    assert len(keys) > 80


MEASURE = """
import json, resource, sys
from slurm_train.verbs import run
run(["complete", "zsh", *sys.argv[1:]])
user_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
heavy = sorted({"torch", "hydra", "omegaconf", "yaml", "argparse", "subprocess"} & set(sys.modules))
print(json.dumps({"user_s": user_s, "heavy": heavy}), file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["status", ""], ["optim.l"], ["+cluster="], ["model=cnn", "model."]])
def test_an_answer_is_quick_and_imports_nothing_heavy(words: list[str], project: Path) -> None:
    done = Person(project).runs(sys.executable, "-c", MEASURE, *words)
    facts = json.loads(done.err)
    assert facts["heavy"] == [] and facts["user_s"] < 0.15 and done.out


# Real shells


# Answers a TAB; what a person sends off is only repeated.
PROGRAM = """#!/bin/sh
case " $* " in *" complete "*|*" completion "*) exec {python} {module} "$@";; esac
echo "typed:" "$@"
"""


@pytest.fixture
def programs(project: Path) -> dict[str, str]:
    """An environment in which slurm-train and python are found."""
    folder = project / "bin"
    folder.mkdir()
    for name, module in (("slurm-train", "-m slurm_train"), ("python", "")):
        program = folder / name
        program.write_text(PROGRAM.format(python=sys.executable, module=module))
        program.chmod(0o755)
    person = Person(project).environment()
    return person | {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(project), "TERM": "xterm"}


def script_of(shell_name: str, folder: Path, env: dict[str, str]) -> Path:
    path = folder / f"completion.{shell_name}"
    path.write_text(subprocess.check_output(["slurm-train", "completion", shell_name], text=True, env=env, cwd=folder))
    return path


def require(shell_name: str) -> None:
    if shutil.which(shell_name) is None:
        pytest.skip(f"{shell_name} is not installed")


BASH_DRIVER = """
source completion.bash
COMP_LINE=$1 COMP_POINT=${#1} COMP_WORDBREAKS=$' \\t\\n"\\'><=;|&(:'
read -ra COMP_WORDS <<<"$1"
[[ $1 == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
function=$(complete -p "${COMP_WORDS[0]}" | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function "${COMP_WORDS[0]}" "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete_in_bash(line: str, folder: Path, env: dict[str, str], *, before: str = "") -> list[str]:
    """Returns what bash would offer; `before` is run before the line is typed, or before the script is sourced."""
    script_of("bash", folder, env)
    command = ["bash", "--norc", "-c", before + BASH_DRIVER, "bash", line]
    return sorted(subprocess.check_output(command, cwd=folder, env=env, text=True).splitlines())


IN_BASH = {
    "slurm-train sta": ["status "],
    "slurm-train +cluster=4": ["4x8 "],
    "slurm-train optim.sch": ["optim.schedule="],
    "slurm-train resume 9b1c44e0 --only=failed,mi": ["failed,missing "],
    # Without `$(reboot)`.
    "slurm-train checkpoint verify ": [f"{name} " for name in (*RUNS.split(), "odd")],
    "python -m slurm_train status 3": ["3f9a1c07 "],
    'slurm-train "optim.schedule=co': ['optim.schedule=constant" ', 'optim.schedule=cosine" '],
}


@pytest.mark.parametrize("line", IN_BASH)
def test_bash_completes(line: str, project: Path, programs: dict[str, str]) -> None:
    assert complete_in_bash(line, project, programs) == IN_BASH[line]


def test_bash_completes_an_alias_and_leaves_other_words_to_python_s_own(
    project: Path, programs: dict[str, str]
) -> None:
    alias = "source completion.bash; complete -F _slurm_train learn; "
    assert complete_in_bash("learn sta", project, programs, before=alias) == ["status "]
    theirs = "_before() { COMPREPLY=(theirs); }; complete -F _before python; "
    assert complete_in_bash("python scri", project, programs, before=theirs) == ["theirs"]


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
    ("bash", ["bash", "--norc", "--noprofile", "-i"], "PS1='rea''dy> '; source completion.bash\n"),
    ("zsh", ["zsh", "-f", "-i"], "PS1='rea''dy> '; autoload -Uz compinit; compinit -u; source completion.zsh\n"),
]
# What is typed before each TAB, and what the shell adds.
KEYS = (
    [("sta", "tus"), ("3f", "9a1c07"), ("--j", "son")],
    [("plan optim.sch", "edule="), ("cos", "ine"), ("+cluster=4", "x8")],
)


@pytest.mark.parametrize(("name", "argv", "start"), SHELLS)
def test_a_person_types_tab(
    name: str,
    argv: list[str],
    start: str,
    project: Path,
    programs: dict[str, str],
    terminals: list[Terminal],
) -> None:
    require(name)
    program = "python -m slurm_train"
    script_of(name, project, programs)
    terminal = Terminal(argv, project, programs)
    terminals.append(terminal)
    terminal.types(start)
    terminal.waits_for("ready> ")
    for line in KEYS:
        terminal.types(f"{program} ")
        for typed, added in line:
            terminal.types(f"{typed}\t")
            terminal.waits_for(added)
        terminal.types("\n")
        words = " ".join(typed + added for typed, added in line).replace("= ", "=")
        terminal.waits_for(f"typed: {program.partition(' ')[2]} {words}".replace("  ", " "))
        terminal.waits_for("ready> ")


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("slurm-train sta", ["status"]),
        ("slurm-train status 3", ["3f9a1c07"]),
        ("python -m slurm_train resume 9b1c44e0 --only fa", ["failed"]),
        ("slurm-train +cluster=4", ["+cluster=4x8"]),
    ],
)
def test_fish_completes(line: str, texts: list[str], project: Path, programs: dict[str, str]) -> None:
    require("fish")
    script_of("fish", project, programs)
    command = f"source completion.fish; complete -C '{line}'"
    out = subprocess.check_output(["fish", "--no-config", "-c", command], text=True, env=programs, cwd=project)
    assert [text.partition("\t")[0] for text in out.splitlines()] == texts
