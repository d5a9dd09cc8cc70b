from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.plan import MARK
from slurm_train.tools.devcluster.system import (
    end_processes,
    find_marked,
    marked_hosts,
    names_of_others,
    read_process,
    read_record,
    run_command,
    spawn_daemon,
    with_hosts,
)
from tests.support.waiting import wait_for

_STATE = Path("/var/lib/state")
_NAMES = {"node1": "10.0.0.11", "node2": "10.0.0.12"}
_LINES = "".join(f"{address}\t{name} # slurm-train-devcluster {_STATE}\n" for name, address in _NAMES.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-program"], "`no-such-program` is not installed"),
        (["sh", "-c", "echo first >&2; echo last >&2; exit 3"], "failed with exit code 3: last"),
        (["sleep", "9"], "`sleep 9` did not end within 0 s"),
    ],
)
def test_a_failure_quotes_command_code_and_last_line(words, message):
    with pytest.raises(ClusterError, match=f"{message}\n.*`devcluster "):
        run_command(words, timeout_s=0.4)


def test_a_command_gets_its_input_and_not_the_callers_environment(monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/somewhere/else")
    assert run_command(["sh"], text='echo "$SLURM_CONF $HERE"', extra={"HERE": "1"}) == " 1\n"


@pytest.fixture
def daemon(tmp_path):
    words = ["sh", "-c", "echo said; pwd; exec sleep 60"]
    spawn_daemon(words, record=tmp_path / "sleeper", log=tmp_path / "log", extra={MARK: str(tmp_path)})
    started = read_record(tmp_path / "sleeper")
    assert started is not None
    yield started
    end_processes(lambda: [started])


def test_a_daemon_has_its_own_session_and_none_of_our_descriptors(daemon, tmp_path):
    assert daemon.is_alive() and os.getsid(daemon.pid) == daemon.pid
    targets = {str(Path(f"/proc/{daemon.pid}/fd/{number}").readlink()) for number in (0, 1, 2)}
    assert targets == {"/dev/null", str(tmp_path / "log")}
    assert Path(f"/proc/{daemon.pid}/cwd").readlink() == Path("/")


@pytest.mark.parametrize("text", ["12", "a b", "1 2 3"])
def test_a_torn_record_is_none(tmp_path, text):
    (tmp_path / "record").write_text(text)
    assert read_record(tmp_path / "record") is None


def test_ending_spares_the_caller_and_its_parents():
    own = [process for process in (read_process(os.getpid()), read_process(os.getppid())) if process is not None]
    end_processes(lambda: own, timeout_s=0.2)


def test_none_sees_another_one_end(tmp_path, monkeypatch):
    """As where the power of a node is cut."""
    kill = os.kill

    def kill_slowly(pid: int, number: int) -> None:
        kill(pid, number)
        time.sleep(0.2)

    watched = f"exec 3> >(cat; touch {tmp_path}/seen); sleep 60 3>&-"
    words = ["bash", "-c", watched]
    spawn_daemon(words, record=tmp_path / "record", log=tmp_path / "log", extra={MARK: str(tmp_path)})
    wait_for(lambda: len(find_marked(tmp_path)) == 4, within_s=60, what="all processes")
    monkeypatch.setattr(os, "kill", kill_slowly)
    end_processes(lambda: sorted(find_marked(tmp_path), key=lambda process: process.pid))
    assert not (tmp_path / "seen").exists()


def test_what_does_not_end_is_named(daemon, monkeypatch):
    monkeypatch.setattr(os, "kill", lambda *_: None)
    with pytest.raises(ClusterError, match=rf"processes \[{daemon.pid}\] did not end within 0 s"):
        end_processes(lambda: [daemon], timeout_s=0.1)
    monkeypatch.undo()


@pytest.mark.parametrize("text", ["", "127.0.0.1 localhost\n# a remark\n\n::1 ip6\n"])
def test_host_lines_come_and_go_without_touching_others(text):
    added = with_hosts(text, _NAMES, state_dir=_STATE)
    assert added == text + _LINES == with_hosts(added, _NAMES, state_dir=_STATE)
    assert with_hosts(added, {}, state_dir=_STATE) == text
    assert with_hosts(text.rstrip("\n"), _NAMES, state_dir=_STATE) == added  # a missing line end joins no lines
    assert marked_hosts(added) == {"node1": _STATE, "node2": _STATE}


def test_names_of_somebody_else_are_found():
    hosts = f"127.0.0.1 localhost\n{_LINES}10.9.9.9 box node2 # node3\n"
    assert names_of_others(hosts) == {"localhost", "box", "node2"}
