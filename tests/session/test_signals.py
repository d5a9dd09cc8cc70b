"""The stop flag: idempotent, silent, and its own process's only; and the end of an orphaned rank."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_train.session import signals
from slurm_train.session.signals import (
    FENCE_EVERY_S,
    STOP_SIGNALS,
    NodeLeader,
    StopFlag,
    install,
    start_orphan_watchdog,
)
from tests.support.command_line import REPOSITORY
from tests.support.process_faults import wait_until_gone
from tests.support.waiting import wait_for


@pytest.fixture(autouse=True)
def restored_handlers() -> Iterator[None]:
    numbers = (*STOP_SIGNALS, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_three_signals_are_one_request(number: signal.Signals) -> None:
    flag = StopFlag()
    install(flag)
    for _ in range(3):
        os.kill(os.getpid(), number)
    assert (flag.requested, flag.signal_number) == (1, number)


def test_the_first_requester_is_named_and_a_withdrawal_takes_back_its_own_request_alone() -> None:
    flag = StopFlag()
    flag.request("clock")
    flag.request("callback")
    flag.withdraw("callback")
    assert flag.requested and flag.ask() == ("clock", 0.0)
    flag.withdraw("clock")
    assert not flag.requested
    flag.request("callback")
    flag.receive(signal.SIGTERM)
    flag.withdraw("callback")
    assert flag.requested and flag.ask()[0] == "TERM"


def test_the_time_of_a_signal_is_that_of_the_first_one_of_its_number() -> None:
    flag = StopFlag()
    flag.receive(signal.SIGUSR2)
    warned_s = flag.signal_at
    flag.receive(signal.SIGTERM)
    first_s = flag.signal_at
    flag.receive(signal.SIGTERM)
    assert warned_s < first_s == flag.signal_at


def forked_child() -> int:
    """Forks a child that waits for signals until this process has ended; returns its number."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        while os.getppid() == parent:
            time.sleep(0.01)
        os._exit(0)
    return child


def ended_by(child: int) -> int:
    return os.WTERMSIG(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("is_loader_worker", [False, True])
def test_a_forked_child_ignores_what_its_parent_gets_as_well(
    is_loader_worker: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaders = SimpleNamespace(get_worker_info=lambda: is_loader_worker or None)
    monkeypatch.setitem(sys.modules, "torch.utils.data", loaders)
    flag = StopFlag()
    install(flag)
    child = forked_child()
    for number in STOP_SIGNALS:
        os.kill(child, number)
    if not is_loader_worker:
        os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(20):
        time.sleep(0.01)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    flag.let_children_end()
    os.kill(child, signal.SIGTERM)
    assert os.waitpid(child, 0)[1] == (0 if is_loader_worker else signal.SIGTERM)


WITH_WORKERS = """
import multiprocessing, multiprocessing.forkserver, os, signal, sys, time
from torch.utils.data import DataLoader
from slurm_train.session.signals import StopFlag, install

if __name__ == "__mp_main__":
    # The signals come while a process imports what it needs.
    time.sleep(1)

class Slow:
    def __len__(self):
        return 24
    def __getitem__(self, number):
        time.sleep(0.02)
        return number

if __name__ == "__main__":
    flag = StopFlag()
    install(flag)
    loader = DataLoader(
        Slow(), batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context=sys.argv[1]
    )
    multiprocessing.set_forkserver_preload(["json"])
    batches = iter(loader)
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGTERM):
        for pid in [worker.pid for worker in batches._workers] + [server] * (server is not None):
            os.kill(pid, number)
        os.kill(os.getpid(), number)
    read = list(batches)
    assert all(worker.is_alive() for worker in batches._workers)
    print(flag.requested, sorted(number for batch in read for number in batch.tolist()) == list(range(24)))
    flag.let_children_end()
    for worker in batches._workers:
        worker.terminate()
        worker.join(5)
        print(worker.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_a_loader_of_torch_outlive_the_stop_signals_of_all_processes(method: str, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(WITH_WORKERS)
    done = subprocess.run([sys.executable, program, method], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["1", "True", "0", "0"], done.stdout + done.stderr


WITH_PROCESSES = """
import multiprocessing, multiprocessing.forkserver, os, signal, sys
from slurm_train.session.signals import StopFlag, install

def answer(connection):
    while connection.recv():
        connection.send(os.getpid())

def answer_below(method, connection):
    # A process of this process answers.
    child = multiprocessing.get_context(method).Process(target=answer, args=(connection,))
    child.start()
    child.join()

if __name__ == "__main__":
    flag = StopFlag()
    install(flag)
    context = multiprocessing.get_context(sys.argv[1])
    near, far = context.Pipe()
    direct = context.Process(target=answer, args=(far,))
    near_2, far_2 = context.Pipe()
    above = context.Process(target=answer_below, args=(sys.argv[1], far_2))
    direct.start()
    above.start()
    pids = [above.pid]
    for connection in (near, near_2):
        connection.send(True)
        pids.append(connection.recv())
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    for number in (signal.SIGUSR2, signal.SIGTERM):
        for pid in [*pids, *([] if server is None else [server]), os.getpid()]:
            os.kill(pid, number)
    for connection in (near, near_2):
        connection.send(True)
        print(connection.recv() in pids)
    near_2.send(False)
    above.join()
    another = context.Process(target=print, args=("started",))
    another.start()
    another.join()
    flag.let_children_end()
    direct.terminate()
    direct.join()
    print(flag.requested, above.exitcode, direct.exitcode, flush=True)
"""


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_processes_outlive_the_stop_signals_of_all_processes_however_they_are_started(
    method: str, tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.write_text(WITH_PROCESSES)
    done = subprocess.run([sys.executable, program, method], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "True", "started", "1", "0", "-15"], done.stdout + done.stderr


def test_a_forked_child_is_ended_by_a_term_that_it_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_PATIENCE_S", 0.1)
    flag = StopFlag()
    install(flag)
    # The signal comes while the child is forked, or soon after that.
    for _ in range(20):
        child = forked_child()
        os.kill(child, signal.SIGTERM)
        assert ended_by(child) == signal.SIGTERM
    # The warning of the limit is for ranks. Of two signals that wait Python handles this one first.
    child = forked_child()
    os.kill(child, signal.SIGUSR2)
    os.kill(child, signal.SIGTERM)
    assert ended_by(child) == signal.SIGTERM
    assert flag.requested == 0


def test_stop_file_is_looked_at_once_a_second(tmp_path: Path) -> None:
    now = [10.0]
    flag = StopFlag(clock=lambda: now[0])
    stop_file = tmp_path / "STOP"
    flag.check_file(stop_file)
    stop_file.touch()
    now[0] = 10.9
    flag.check_file(stop_file)
    assert flag.requested == 0
    now[0] = 11.0
    flag.check_file(stop_file)
    assert flag.requested == 1


@pytest.mark.parametrize(
    ("orphaned", "overtaken", "event"), [(3, 99, "orphaned"), (99, 2, "overtaken"), (0, 0, "orphaned")]
)
def test_an_orphan_and_an_overtaken_rank_are_ended_once(orphaned: int, overtaken: int, event: str) -> None:
    """The looks at which it is found, of those at the parent and at newer attempts; the first of these is refused."""
    events, looks, parents = list[str](), itertools.count(), itertools.count()

    def is_overtaken() -> bool:
        look = next(looks)
        if look == 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return look >= overtaken

    # Every look finds the clock as far on as after a stop.
    clock = itertools.count(step=FENCE_EVERY_S)
    start_orphan_watchdog(
        parent=7,
        is_overtaken=is_overtaken,
        on_orphaned=lambda: events.append("orphaned"),
        on_overtaken=lambda: events.append("overtaken"),
        every_s=0.001,
        parent_now=lambda: 1 if next(parents) >= orphaned else 7,
        clock=lambda: next(clock),
    ).join(timeout=60)
    assert events == [event]


CHILD = """
import os, signal, sys
from pathlib import Path
from slurm_train.session.signals import start_orphan_watchdog
def leave():
    os._exit(71)
start_orphan_watchdog(
    parent=os.getppid(), is_overtaken=lambda: False, on_orphaned=leave, on_overtaken=leave, every_s=0.05
)
Path(sys.argv[1]).write_text(str(os.getpid()))
signal.pause()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def test_a_process_whose_parent_is_killed_ends(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(file)], env=env)
    wait_for(lambda: file.exists() and file.read_text(), within_s=30, what="the child", poll_s=0.02)
    parent.kill()
    parent.wait()
    wait_until_gone(int(file.read_text()), within_s=60)


LEADER = """
import sys
from slurm_train.session.signals import NodeLeader
leader = NodeLeader(sys.argv[1])
for _ in sys.stdin:
    print(leader.leads(), flush=True)
"""


def test_one_rank_of_a_node_leads_until_it_ends_or_is_stopped(tmp_path: Path) -> None:
    """The next one leads then, so no newer attempt goes unseen; a third one never leads beside a leader that runs."""
    words = [sys.executable, "-c", LEADER, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin is not None and first.stdout is not None
        second, third, other = NodeLeader(str(tmp_path)), NodeLeader(str(tmp_path)), NodeLeader(f"{tmp_path}/2")
        for _ in range(3):  # each takes the questions off; 300 are more than the socket keeps
            print(file=first.stdin, flush=True)
            assert first.stdout.readline() == "True\n"
            assert not any(second.leads() for _ in range(100))
        assert other.leads()
        first.send_signal(signal.SIGSTOP)
        wait_for(second.leads, within_s=60, what="the stopped leader to be noticed")
        first.send_signal(signal.SIGCONT)
        wait_for(lambda: not second.leads(), within_s=60, what="the leader to go on")
        first.kill()
    assert second.leads() and not third.leads() and second.leads()
    for leader in (second, other):
        leader.close()


def test_a_name_is_kept_by_one_process_until_it_ends_also_while_it_is_stopped(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LEADER, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin is not None and first.stdout is not None
        print(file=first.stdin, flush=True)
        assert first.stdout.readline() == "True\n"
        first.send_signal(signal.SIGSTOP)
        # It has taken nobody's question off.
        assert not any(NodeLeader(str(tmp_path)).keeps() for _ in range(400))
        first.kill()
    last = NodeLeader(str(tmp_path))
    assert last.keeps()
    last.close()


def test_a_leader_that_has_ended_leads_no_more_though_a_process_of_its_own_has_its_socket(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(writer)
        leader = NodeLeader(str(tmp_path))
        leads = leader.leads()
        if os.fork() == 0:
            os.read(reader, 1)
        os._exit(not leads)
    try:
        # It stays a zombie until the end of the test.
        ended = os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert ended is not None and ended.si_status == 0
        assert NodeLeader(str(tmp_path)).leads()
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(first, 0)
