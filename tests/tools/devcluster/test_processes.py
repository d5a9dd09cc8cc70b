from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.processes import (
    ProcessRecord,
    end_processes,
    find_marked,
    last_lines,
    mark_environment,
    read_process,
    read_record,
    spawn_daemon,
)


@pytest.fixture
def daemon(tmp_path):
    words = ["sh", "-c", "echo said; pwd; exec sleep 60"]
    started = spawn_daemon(words, record=tmp_path / "sleeper", log=tmp_path / "log", extra=mark_environment(tmp_path))
    yield started
    end_processes(lambda: [started])


def test_a_daemon_has_its_own_session_and_none_of_our_descriptors(daemon, tmp_path):
    assert os.getsid(daemon.pid) == daemon.pid
    targets = {str(Path(f"/proc/{daemon.pid}/fd/{number}").readlink()) for number in (0, 1, 2)}
    assert targets == {"/dev/null", str(tmp_path / "log")}
    assert Path(f"/proc/{daemon.pid}/cwd").readlink() == Path("/")


def test_the_record_names_the_daemon(daemon, tmp_path):
    assert read_record(tmp_path / "sleeper") == daemon == read_process(daemon.pid)
    assert daemon.is_alive()


def test_a_caller_whose_output_is_a_pipe_ends_at_once(tmp_path):
    script = (
        "from pathlib import Path; from slurm_train.tools.devcluster.processes import *\n"
        f"at = Path({str(tmp_path)!r})\n"
        "spawn_daemon(['sleep', '60'], record=at / 'r', log=at / 'l', extra=mark_environment(at))"
    )
    started = time.monotonic()
    try:
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=30)
        assert time.monotonic() - started < 20
        assert len(find_marked(tmp_path)) == 1
    finally:
        end_processes(lambda: find_marked(tmp_path))
    assert find_marked(tmp_path) == []


def test_a_later_process_with_the_same_id_is_another(daemon):
    assert not ProcessRecord(daemon.pid, daemon.start_ticks - 1).is_alive()


def test_ending_spares_the_caller_and_its_parents():
    own = [process for process in (read_process(os.getpid()), read_process(os.getppid())) if process is not None]
    end_processes(lambda: own, timeout_s=0.2)


def test_what_does_not_end_is_named(daemon, monkeypatch):
    monkeypatch.setattr(os, "kill", lambda *_: None)
    with pytest.raises(ClusterError, match=rf"processes \[{daemon.pid}\] did not end within 0 s"):
        end_processes(lambda: [daemon], timeout_s=0.1)
    monkeypatch.undo()


def test_a_directory_that_is_gone_is_a_clear_error(tmp_path):
    with pytest.raises(ClusterError, match="x did not start: no record at"):
        spawn_daemon(["true"], record=tmp_path / "gone" / "x", log=tmp_path / "log", extra={}, timeout_s=0.1)


@pytest.mark.parametrize("text", ["", "12", "a b", "1 2 3"])
def test_a_torn_record_is_none(tmp_path, text):
    (tmp_path / "record").write_text(text)
    assert read_record(tmp_path / "record") is None


def test_last_lines_are_the_end_of_the_log(tmp_path):
    log = tmp_path / "log"
    assert last_lines(log) == f"    ({log} is empty)"
    log.write_text("a\nb\nc\n")
    assert last_lines(log, count=2) == "    b\n    c"


def test_a_process_that_is_gone_is_none():
    child = subprocess.Popen(["true"])
    child.wait()
    assert read_process(child.pid) is None
