"""A session of tests reads and changes nothing of the person who starts it, and leaves nothing on the machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_line import REPOSITORY, write
from tests.support.session_environment import session_environment
from tests.support.waiting import wait_for

# What a person, a batch script, a launcher, a git hook or a CI service may have set.
TRAPS = {
    "CI": "trap",
    "COLUMNS": "17",
    "FORCE_COLOR": "17",
    "GIT_DIR": "/trap",
    "HYDRA_FULL_ERROR": "17",
    "LC_TIME": "trap",
    "MASTER_ADDR": "trap",
    "NO_COLOR": "trap",
    "OMP_NUM_THREADS": "17",
    "PIP_INDEX_URL": "https://trap.invalid/",
    "PYTHONHASHSEED": "17",
    "RANK": "17",
    "SALLOC_PARTITION": "trap",
    "SBATCH_PARTITION": "trap",
    "SLURM_CONF": "/trap",
    "SLURM_JOB_ID": "17",
    "SRUN_CPU_BIND": "trap",
    "TERM": "trap",
    "WANDB_API_KEY": "trap",
    "WORLD_SIZE": "17",
    "XDG_CONFIG_HOME": "/trap",
}
_HOOK = "#!/bin/sh\ntouch {home}/hook-ran\n"
_SITECUSTOMIZE = "import sys\nwith open({log!r}, 'a') as file:\n    print(sys.orig_argv[-1], file=file)\n"
_ENTER = """
import os, subprocess, sys, time
from pathlib import Path
from tests.support.session_namespaces import enter_session_namespaces
enter_session_namespaces(Path(sys.argv[1]))
"""
needs_namespaces = pytest.mark.usefixtures("slurm_room")


def test_a_child_sees_no_variable_and_no_file_of_the_person(tmp_path: Path) -> None:
    """Has its meaning in the session of the next test, where there are traps."""
    program = "import json, os, sys; print(json.dumps([dict(os.environ), sys.path]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    variables, search_path = json.loads(done.stdout)
    assert {name for name, value in TRAPS.items() if variables.get(name) == value} == set()
    assert not any("trap" in folder for folder in search_path)
    subprocess.run(["git", "init", "--quiet", "."], cwd=tmp_path, check=True)
    assert not (tmp_path / ".git/hooks/post-commit").exists()
    listed = subprocess.run(["git", "config", "--list", "--show-origin"], cwd=tmp_path, capture_output=True, text=True)
    origins = {line.split("\t")[0] for line in listed.stdout.splitlines()}
    assert origins == {f"file:{Path.home()}/.gitconfig", "file:.git/config"}
    (tmp_path / "new").touch()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o644


def test_traps_of_the_person_change_no_test_and_stay_as_they_are(tmp_path: Path) -> None:
    """Where no namespaces can be had, which the last line says."""
    home, startup, log = tmp_path / "trap", tmp_path / "trap-path", tmp_path / "log"
    files = {
        ".config/slurm_train/site/here.yaml": "- this is no site file -",
        ".cache/huggingface/token": "trap",
        ".netrc": "trap",
        ".gitconfig": f"[init]\n\ttemplateDir = {home}/template\n",
        "template/hooks/post-commit": _HOOK.format(home=home),
    }
    write(home, files)
    write(startup, {"sitecustomize.py": _SITECUSTOMIZE.format(log=str(log))})
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": str(startup), **TRAPS}
    # A root that may mount nothing, as in most containers; for others this changes nothing.
    words = ["setpriv", "--bounding-set=-sys_admin", sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider"]
    words.append("--listed-skips")
    if os.geteuid() != 0:
        del words[:2]
    words += [
        f"{__file__}::{test_a_child_sees_no_variable_and_no_file_of_the_person.__name__}",
        str(REPOSITORY / "tests/cli/test_plan_verb.py::test_json_holds_all_of_it_and_nothing_else_is_printed"),
        str(REPOSITORY / "tests/tools/devcluster/test_lifecycle.py::test_up_is_idempotent_and_down_leaves_no_trace"),
    ]
    done = subprocess.run(words, cwd=REPOSITORY, env=environment, umask=0o077, capture_output=True, text=True)
    verdict = done.stdout.splitlines()[-1]
    assert "2 passed" in verdict and "1 left out, no real Slurm: " in verdict, done.stdout
    assert done.returncode == 1 and "1 skipped tests are not listed" in done.stdout
    assert len(log.read_text().splitlines()) == 1, "only the session's own process has begun outside"
    assert {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file()} == files


def test_only_what_the_libraries_of_a_machine_need_is_kept(tmp_path: Path) -> None:
    machine = {"PATH": "/bin", "TMPDIR": "/scratch", "LD_LIBRARY_PATH": "/lib", "CUDA_HOME": "/cuda"}
    kept = session_environment({**machine, **TRAPS, "ANYTHING_ELSE": "1"}, home=tmp_path)
    added = {"HOME": str(tmp_path), "LANG": "C.UTF-8", "GIT_CONFIG_NOSYSTEM": "1", "PIP_CONFIG_FILE": "/dev/null"}
    assert kept == {**machine, **added}


@needs_namespaces
def test_a_session_has_processes_network_and_configuration_of_its_own(tmp_path: Path) -> None:
    program = f"""{_ENTER}
Path("/etc/slurm/slurm.conf").touch()
subprocess.run(["ip", "link", "add", "slurmtrain0", "type", "bridge"], check=True)
Path(sys.argv[1] + ".parent").write_text(str(os.getppid()))
sys.exit(7)
"""
    place = tmp_path / "place"
    place.mkdir()
    before = _facts_of_the_machine()
    done = subprocess.run([sys.executable, "-c", program, str(place)], cwd=REPOSITORY, check=False)
    assert done.returncode == 7 and not place.exists()
    assert (tmp_path / "place.parent").read_text() == "1", "it has the first process of its namespace as its parent"
    assert _facts_of_the_machine() == before


@needs_namespaces
def test_a_name_that_no_file_has_is_answered_at_once() -> None:
    """Where a name server were asked that cannot be reached, torch would warn on each connection."""
    with pytest.raises(socket.gaierror) as caught:
        socket.getaddrinfo("no-such-host.invalid", 80)
    assert caught.value.errno == socket.EAI_NONAME


def _facts_of_the_machine() -> tuple[object, ...]:
    configuration = sorted(Path("/etc/slurm").iterdir())
    return Path("/etc/hosts").read_text(), configuration, socket.if_nameindex(), socket.gethostname()


@needs_namespaces
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 128 + 15)])
def test_all_that_a_session_has_started_ends_with_it(number: int, code: int, tmp_path: Path) -> None:
    mark = str(tmp_path / "daemon")
    program = f"""{_ENTER}
subprocess.run(["setsid", "--fork", "sh", "-c", "sleep 600; exit", {mark!r}], check=True)
time.sleep(300)
"""
    place = tmp_path / "place"
    place.mkdir()

    def is_running() -> bool:
        listed = subprocess.run(["ps", "-ww", "-e", "-o", "args="], capture_output=True, text=True, check=True)
        return f"sh -c sleep 600; exit {mark}" in listed.stdout.splitlines()

    session = subprocess.Popen([sys.executable, "-c", program, str(place)], cwd=REPOSITORY)
    wait_for(is_running, within_s=60, what="the start of a daemon")
    session.send_signal(number)
    assert session.wait(60) == code
    wait_for(lambda: not is_running(), within_s=60, what="the end of the daemon")
