"""What a TAB offers: as values, and by real shells."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.tools.completion import candidates
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
    "checkpoint verify ": "3f9a1c07 44aa1c07 55aa1c07 gpt-stdlib mine odd $(reboot)",
    "status gpt-stdlib/": "gpt-stdlib/3f9a1c07 gpt-stdlib/44aa1c07",
    "status --state running,fai": "running,failed",
    "status --root other ": "66aa1c07 far",
    "resume 9b1c44e0 --only failed,mi": "failed,missing",
    "resume 3f9a1c07 optim.b": "optim.betas=",
    "resume 3f9a1c07 --accept code,da": "code,data",
    "nonsense xyz": "",
    "plan optim.schedule=c": "optim.schedule=constant optim.schedule=cosine",
    "-m optim.schedule=cosine,c": "optim.schedule=cosine,constant",
    "checkpoint.every_steps=": "checkpoint.every_steps=auto checkpoint.every_steps=null",
    "model=cnn model.fe": "model.features=",
    "--config-dir site model=own model.h": "model.hidden=",
    "--config-dir site +cluster=j": "+cluster=jupiter",
    "--config-dir site --config-name s": "study",
    "~mod": "~model ~model.",
}


@pytest.mark.parametrize("line", OFFERS)
def test_a_tab_offers(line: str, project: Path) -> None:
    assert sorted(offered(line)) == sorted(OFFERS[line].split())


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


def complete_in_bash(line: str, folder: Path, env: dict[str, str]) -> list[str]:
    """Returns what bash would offer."""
    script_of("bash", folder, env)
    command = ["bash", "--norc", "-c", BASH_DRIVER, "bash", line]
    return sorted(subprocess.check_output(command, cwd=folder, env=env, text=True).splitlines())


IN_BASH = {
    # Without `$(reboot)`.
    "slurm-train checkpoint verify ": [f"{name} " for name in (*RUNS.split(), "odd")],
    "python -m slurm_train status 3": ["3f9a1c07 "],
    'slurm-train "optim.schedule=co': ['optim.schedule=constant" ', 'optim.schedule=cosine" '],
}


@pytest.mark.parametrize("line", IN_BASH)
def test_bash_completes(line: str, project: Path, programs: dict[str, str]) -> None:
    assert complete_in_bash(line, project, programs) == IN_BASH[line]
