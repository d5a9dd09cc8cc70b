"""`--on HOST` through a real sshd, in front of a real Slurm: one connection, and what is left when it is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.rundir.lookup import list_runs
from slurm_train.tools.devcluster.system import SYSTEM_PATH
from tests.support.command_line import Person
from tests.support.slurm_runs import command, wait_until_finished
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.full]

SSHD = shutil.which("sshd", path=SYSTEM_PATH)
PORT = 2222


@pytest.fixture
def home(slurm_room: None, person: Person, tmp_path: Path) -> Iterator[Path]:
    """The home, on the host `hpc`, of an account whose shell has this package."""
    if SSHD is None:
        pytest.skip("needs sshd")
    home = tmp_path / "home"
    python = home / ".slurm_train" / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for key in ("host_key", "key"):
        command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / key))
    # /etc is the session's own.
    with Path("/etc/passwd").open("a") as accounts:
        accounts.write(f"laura:*:0:0::{home}:/bin/bash\n")
    server = tmp_path / "sshd_config"
    server.write_text(
        f"Port {PORT}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host_key\nPidFile none\nStrictModes no\n"
        f"PermitRootLogin yes\nAuthorizedKeysFile {tmp_path}/key.pub\n"
    )
    client = tmp_path / "ssh_config"
    client.write_text(
        f"Host hpc\n  HostName 127.0.0.1\n  Port {PORT}\n  User laura\n  IdentityFile {tmp_path}/key\n"
        f"  UserKnownHostsFile {tmp_path}/known_hosts\n  StrictHostKeyChecking accept-new\n"
    )
    # OpenSSH takes the home of its config from passwd.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {client} "$@"\n')
    (tmp_path / "bin" / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with (tmp_path / "sshd.log").open("w") as log:
        daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", str(server)], stderr=log)
    wait_for(lambda: "listening" in (tmp_path / "sshd.log").read_text(), within_s=20, what="sshd")
    yield home
    daemon.terminate()
    daemon.wait(20)


def test_a_run_is_submitted_once_from_another_machine_also_when_connections_are_lost(
    home: Path, person: Person, tmp_path: Path
) -> None:
    (person.folder / "train.py").write_text("print('hello')\n")
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    words = ("--on", "hpc", "+cluster=1x1", "script=[train.py]")
    _, run = person.types(*words, env=env).job_and_run
    wait_until_finished(run)
    assert run.path.is_relative_to(home / "slurm_train" / person.folder.name / "runs")
    # The processes of the connection end at some moment of the next submission.
    log = tmp_path / "sshd.log"
    before = log.read_text().count("Accepted")
    typed = [person.python, "-m", "slurm_train", *words, "run.name=cut"]
    cut = subprocess.Popen(typed, cwd=person.folder, env=person.environment() | env, stderr=subprocess.PIPE)
    wait_for(lambda: log.read_text().count("Accepted") > before, within_s=60, what="the connection")
    for pid in map(int, command("pgrep", "-f", "sshd: laura", must=False).split()):
        os.kill(pid, signal.SIGKILL)
    _, err = cut.communicate(timeout=60)
    assert cut.returncode != 0 and b"hint: " in err
    again = person.types(*words, "run.name=cut", env=env)
    assert again.code == 0, again.err
    [run] = [run for run in list_runs(run.path.parent.parent) if run.path.parent.name == "cut"]
    wait_until_finished(run)
    names = wait_for(lambda: _jobs_named("cut-"), within_s=60, what="the account of the job")
    assert len(names) == 1


def _jobs_named(start: str) -> list[str]:
    return [name for name in command("sacct", "-X", "-n", "-o", "jobname%60").split() if name.startswith(start)]
