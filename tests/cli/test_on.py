"""`--on HOST` with a stand-in for ssh, which runs the command in another home: what is sent, what comes back."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import slurm_train
from slurm_train.cli import on
from slurm_train.code.git import SENT_FILE
from slurm_train.errors import ConfigError, RunError
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.command_line import Person
from tests.support.waiting import wait_for

SCRIPT = "import json, sys\nimport helper\n\nprint(json.dumps([helper.NAME, *sys.argv[1:]]))\n"
HOSTILE = ["a b", "it's", '"', "$HOME", "`id`", "!x", "a\nb", "*", "ä", "\\", "~", "#", ";", "(", "=c", "%s", "", "-n"]


class Host:
    """Another machine that a stand-in for ssh reaches.

    Args:
        folder: an empty folder.
        shell: the login shell there.
    """

    def __init__(self, folder: Path, shell: str = "sh") -> None:
        self.home = folder / "home"
        self.python = self.home / ".slurm_train" / "env" / "bin" / "python"
        self.project = Person(folder / "laptop" / "project")
        for place in (self.python.parent, self.project.folder, folder / "bin"):
            place.mkdir(parents=True)
        self.set_python(f'exec {sys.executable} "$@"')
        (self.home / ".bash_profile").write_text("echo Welcome\n")
        ssh = folder / "bin" / "ssh"
        # As ssh does: the words behind the host go to the login shell as one text.
        ssh.write_text(
            f"#!/bin/sh\nfor word; do case $word in -G|-O) exit 0;; esac; done\n"
            f'while [ "$1" != -- ]; do shift; done\nshift 2\nHOME={self.home} exec {shell} -c "$1"\n'
        )
        ssh.chmod(0o755)
        self.env = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}

    def set_python(self, command: str) -> None:
        self.python.write_text(f"#!/bin/sh\n{command}\n")
        self.python.chmod(0o755)

    @property
    def trees(self) -> list[Path]:
        return sorted(path for path in (self.home / "slurm_train" / "project" / "trees").glob("*"))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    (host.project.folder / "train.py").write_text(SCRIPT)
    (host.project.folder / "helper.py").write_text("NAME = 'first'\n")
    return host


SHELLS = ["sh", "bash", *(pytest.param(name, marks=pytest.mark.full) for name in ("zsh", "fish"))]


@pytest.mark.parametrize("shell", SHELLS)
def test_no_shell_on_the_way_changes_a_word(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    host = Host(tmp_path, shell)
    host.set_python('for word; do last=$word; done; echo "$last"')
    monkeypatch.setenv("PATH", host.env["PATH"])
    with on.Connection("hpc") as ssh:
        process = ssh.start_request({"words": HOSTILE}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate()
    assert json.loads(base64.urlsafe_b64decode(out))["words"] == HOSTILE
    # What a profile prints is no output of the words.
    assert err == b"Welcome\n"


@pytest.mark.full
def test_the_same_words_are_the_same_run_there_and_run_the_code_of_here(host: Host) -> None:
    folder = host.project.folder
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "-A"], ["commit", "--quiet", "-m", "first"]):
        host.project.runs(*git, *words)
    commit = host.project.runs("git", "rev-parse", "HEAD").out.strip()
    (folder / "helper.py").write_text("NAME = 'second'\n")
    words = ("--on", "hpc", "run.processes=1", "script=[train.py,'a b']")
    done = host.project.types(*words, env=host.env)
    assert done.code == 0 and '["second", "a b"]' in done.out + done.err, done.err
    [plan] = (host.home / "slurm_train" / "project" / "runs").glob("*/*/provenance.json")
    facts = json.loads(plan.read_text())
    assert facts["git_commit"] == commit and "+NAME = 'second'" in facts["git_diff"]
    assert not (folder / "runs").exists()
    again = host.project.types(*words, env=host.env)
    assert again.code == 0 and "finished" in again.err and len(host.trees) == 1
    (folder / "helper.py").write_text("NAME = 'third'\n")
    report = host.project.types("--on", "hpc", "report", env=host.env)
    assert (report.code, report.out) == (0, "report-newest.html\n"), report.err
    assert "<html" in (folder / "report-newest.html").read_text()
    # What has not changed is there already.
    other = host.project.types("--on", "hpc", "plan", *words[2:], env=host.env)
    assert other.code == 0 and len(host.trees) == 2, other.err
    assert len({(tree / "train.py").stat().st_ino for tree in host.trees}) == 1


@pytest.mark.parametrize("words", [("data.path=books",), ("script=[train.py,data/books]",)])
def test_a_file_of_this_machine_that_is_no_code_is_refused(words: tuple[str, ...], host: Host) -> None:
    for place in ("books", "data/books"):
        (host.project.folder / place).parent.mkdir(exist_ok=True)
        (host.project.folder / place).write_bytes(b"text")
    done = host.project.types("--on", "hpc", "plan", *words, env=host.env)
    assert done.code == 2 and "books" in done.err and "hpc" in done.err
    assert host.trees == []


def test_exit_codes_and_errors_are_those_of_the_words(host: Host) -> None:
    done = host.project.types("--on", "hpc", "statsu", env=host.env)
    assert done.code == 2 and "`status`" in done.err
    host.python.unlink()
    done = host.project.types("--on", "hpc", "status", env=host.env)
    assert done.code != 0 and "--on hpc init" in done.err
    done = host.project.types("--on", "-oProxyCommand=touch x", "status", env=host.env)
    assert done.code == 2 and not (host.project.folder / "x").exists()


def test_a_run_there_waits_for_another_one_and_hints_name_the_host(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    programs = SlurmPrograms(tmp_path / "slurm")
    (host.home / ".bash_profile").write_text(f"PATH={programs.path}\n")
    monkeypatch.setenv("PATH", host.env["PATH"])
    monkeypatch.chdir(host.project.folder)
    words = ["+cluster=1x1", "script=[train.py]"]
    first = slurm_train.submit(words, verbose=True, on="hpc")
    run_id = Path(first.path).name
    assert f"python -m slurm_train --on hpc status {run_id}\n" in capfd.readouterr().err
    programs.queue("4711", "PENDING")
    programs.next_job(4712)
    second = slurm_train.submit([*words, "run.name=second"], after=[first], on="hpc")
    assert Path(second.path).parent.name == "second" and capfd.readouterr().err == ""
    assert "--dependency=afterok:4711" in (programs.said("submitted_words") or "")
    for place in ({}, {"on": "other"}):
        with pytest.raises(ConfigError, match="is not a run of"):
            slurm_train.submit(words, after=[first], **place)  # type: ignore[call-overload]


def test_another_version_there_is_named(host: Host) -> None:
    host.set_python("""echo 'slurm_train: {"version": "0.0.9"}'""")
    done = host.project.types("--on", "hpc", "status", env=host.env)
    assert "0.0.9" in done.err and "--on hpc init" in done.err


@pytest.mark.full
def test_ctrl_c_interrupts_the_words_there(host: Host) -> None:
    host.set_python(f'echo $$ >{host.home}/pid; exec {sys.executable} "$@"')
    (host.project.folder / "train.py").write_text(f"import time\n\nopen('{host.home}/begun', 'w')\ntime.sleep(300)\n")
    # In the background of a script, as these tests may be, Ctrl-C is ignored.
    typing = ["env", "--default-signal=INT", sys.executable, "-m", "slurm_train"]
    words = [*typing, "--on", "hpc", "run.processes=1", "script=[train.py]"]
    env = host.project.environment() | host.env
    typed = subprocess.Popen(words, cwd=host.project.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for((host.home / "begun").exists, within_s=60, what="the run")
    typed.send_signal(signal.SIGINT)
    typed.communicate(timeout=60)
    assert typed.returncode != 0
    pid = (host.home / "pid").read_text().strip()
    wait_for(lambda: not Path("/proc", pid).exists(), within_s=30, what="the end there")


# --- the receiving end ---


class Sender(io.BytesIO):
    """Sends the header of some code, and of its files those that are asked for; the last bytes are lost."""

    def __init__(self, code: on.CodeToSend, lost_bytes: int) -> None:
        super().__init__(code.header)
        self.code = code
        self.lost_bytes = lost_bytes
        self.asked: list[str] = []

    def reply(self, missing: list[str], absent: list[str]) -> None:
        self.asked = missing
        data = b"".join(self.code.contents[digest] for digest in missing)
        super().__init__(self.code.header + data[: len(data) - self.lost_bytes])
        self.seek(len(self.code.header))


def received(folder: Path, monkeypatch: pytest.MonkeyPatch, *, lost_bytes: int = 0) -> tuple[Path, int]:
    """Receives the code of the present folder; returns the tree's place, and how many files were sent."""
    code = on.read_code([])
    sender = Sender(code, lost_bytes)
    monkeypatch.setattr(on, "_reply", sender.reply)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(sender))
    folder.mkdir(exist_ok=True)
    tree = folder / "trees" / code.tree
    assert on._receive(tree, {"num_header_bytes": len(code.header), "paths": []})
    return tree, len(sender.asked)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder there; one with code is the current one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("train.py").write_text("1\n")
    Path("run.sh").write_text("true\n")
    Path("run.sh").chmod(0o755)
    Path("__init__.py").touch()
    return tmp_path / "there"


def test_a_tree_has_its_name_when_all_of_it_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for lost_bytes in (1, 3, 7):
        with pytest.raises(RunError):
            received(folder, monkeypatch, lost_bytes=lost_bytes)
        assert list((folder / "trees").glob("[!.]*")) == []
    tree, _ = received(folder, monkeypatch)
    assert (tree / "train.py").read_text() == "1\n" and os.access(tree / "run.sh", os.X_OK)
    assert not (tree / "train.py").stat().st_mode & 0o222
    assert sorted(json.loads((tree / SENT_FILE).read_text())["files"]) == ["__init__.py", "run.sh", "train.py"]
    assert (tree / "__init__.py").read_text() == ""


def test_a_tree_that_somebody_has_changed_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, _ = received(folder, monkeypatch)
    (tree / "train.py").unlink()
    (tree / "train.py").write_text("2\n")
    assert received(folder, monkeypatch) == (tree, 1)
    assert (tree / "train.py").read_text() == "1\n"
    assert received(folder, monkeypatch) == (tree, 0)


def test_what_nobody_has_used_for_a_month_is_removed_but_not_what_a_run_began_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, _ = received(folder, monkeypatch)
    Path("train.py").write_text("22\n")
    unused, _ = received(folder, monkeypatch)
    (folder / "runs" / "a" / "b").mkdir(parents=True)
    (folder / "runs" / "a" / "b" / "provenance.json").write_text(json.dumps({"directory": str(used)}))
    for tree in (used, unused):
        os.utime(tree, (0, 0))
    Path("train.py").write_text("333\n")
    newest, _ = received(folder, monkeypatch)
    assert {tree.name for tree in (folder / "trees").iterdir()} == {used.name, newest.name}


@pytest.mark.parametrize(
    ("words", "takes_code"),
    [
        ("", True),
        ("+cluster=1x1", True),
        ("-m seed=1,2", True),
        ("plan seed=1", True),
        ("resume gpt", True),
        ("scaling +cluster=1x1", True),
        ("status -w", False),
        ("checkpoint ls gpt", False),
        ("report", False),
        ("prepare a --out b", False),
        ("--help", False),
    ],
)
def test_code_is_sent_for_words_that_look_at_it(words: str, takes_code: bool) -> None:
    assert on._takes_code(words.split()) == takes_code


def test_new_runs_lie_beside_the_trees_unless_the_words_say_where() -> None:
    assert on._with_root(["+cluster=1x1"], Path("/r")) == ["+cluster=1x1", "run.root=/r"]
    assert on._with_root(["plan"], Path("/r")) == ["plan", "run.root=/r"]
    assert on._with_root(["resume", "gpt"], Path("/r")) == ["resume", "gpt"]
    assert on._with_root(["run.root=/mine"], Path("/r")) == ["run.root=/mine"]
