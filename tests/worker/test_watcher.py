"""The watch over programs that make no marks, with real processes: who hangs is named, and who is busy is left alone.

The programs import no torch. Where a rank has to wait in an exchange, it calls a function of a file whose path is that
of torch's, since a path is all that a stack shows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from slurm_train.processes import descendants
from slurm_train.rundir.events import FailureMark, leave_mark, read_events
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.signs import Signs, read_remarks, read_signs
from slurm_train.worker.watched import ASK
from slurm_train.worker.watcher import (
    Counters,
    InnerRanks,
    Watcher,
    catches,
    inner_ranks,
    io_bytes,
    read_process,
    signal_main_thread,
)
from tests.support.command_line import Person, new_project
from tests.support.ledgers import ledger_lines
from tests.support.waiting import wait_for

LIMIT_S = 4.0
PROGRAM = """
import importlib.util, os, signal, subprocess, sys, threading, time

def exchange():
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch/distributed/fake_c10d.py")
    spec = importlib.util.spec_from_file_location("fake_c10d", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.barrier()

def load():
    time.sleep(1000)

def fail():
    try:
        raise ValueError("bad label 17")
    finally:
        load()

def feed():
    thread = threading.Thread(target=fail, name="feeder")
    globals()["load"] = lambda: None
    thread.start()
    thread.join()
    time.sleep(1000)

def read(path):
    open(path).read()

def work(seconds, act):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        act()

def compute():
    sum(range(10000))

def log():
    print("still here", flush=True)
    time.sleep(0.3)

def write():
    with open(f"file_{os.getpid()}", "wb") as file:
        file.write(bytes(1 << 20))
    time.sleep(0.3)

def compile():
    subprocess.run([sys.executable, "-c", "sum(range(10_000_000))"])

kind, rank = sys.argv[1], int(os.environ["RANK"])
print("begun", flush=True)
if kind == "serve":
    time.sleep(120)
elif rank == 0:
    exchange()
elif kind == "load":
    load()
elif kind == "fail":
    fail()
elif kind == "feed":
    feed()
elif kind == "read":
    read("pipe")
elif kind == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
elif rank == 1:
    work(float(sys.argv[2]), globals()[kind])
"""
EXCHANGE = "import time\ndef barrier():\n    time.sleep(1000)\n"


@pytest.fixture
def person(tmp_path: Path) -> Person:
    person = Person(new_project(tmp_path / "project"))
    (person.folder / "program.py").write_text(PROGRAM)
    folder = person.folder / "torch" / "distributed"
    folder.mkdir(parents=True)
    (folder / "fake_c10d.py").write_text(EXCHANGE)
    os.mkfifo(tmp_path / "project" / "pipe")
    return person


@contextmanager
def running(person: Person, *arguments: str, limit_s: float | None = LIMIT_S) -> Iterator[RunDirectory]:
    """Runs the program on two ranks while the body runs."""
    limit = "null" if limit_s is None else str(limit_s)
    words = ["run.processes=2", f"script=[program.py,{','.join(arguments)}]", f"health.hang_timeout_s={limit}"]
    log = person.folder / "typed.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "slurm_train", *words],
            cwd=person.folder,
            env=person.environment(),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    run: RunDirectory | None = None
    try:
        wait_for(lambda: list(person.folder.glob("runs/*/*/attempts.jsonl")), within_s=60, what="the run")
        run = RunDirectory(next(person.folder.glob("runs/*/*")))
        yield run
    finally:
        for signs in {} if run is None else read_signs(run, 0).values():
            with suppress(ProcessLookupError):
                os.kill(signs.pid, signal.SIGKILL)
        process.terminate()
        process.wait(60)


def told(person: Person, run: RunDirectory) -> str:
    status = person.types("status", run.run_id).out
    return status if "without a sign of life" in status else ""


def newest_signs(run: RunDirectory) -> dict[int, Signs]:
    signs = read_signs(run, 0)
    return signs if len(signs) == 2 else {}


@pytest.mark.parametrize(
    ("kind", "doing"),
    [
        ("load", r"is in load (program.py:"),
        ("read", r"is in read (program.py:"),
        (
            "feed",
            r"is in feed (program.py:25), after an exception has ended its thread feeder: ValueError: bad label 17, ",
        ),
        ("fail", r"is in load (program.py:12) while it handles ValueError: bad label 17, without"),
        ("stop", r"does not run (stopped), "),
    ],
)
def test_a_rank_that_hangs_is_named_with_stacks_and_ended(person: Person, kind: str, doing: str) -> None:
    with running(person, kind) as run:
        (event,) = wait_for(lambda: read_events(run, "hang"), within_s=60, what="the hang")
        assert event["sentence"].startswith(f"rank 1 on {event['host']} {doing}"), event
        assert event["sentence"].endswith("; 1 rank waits for it in barrier")
        ledger = wait_for(lambda: ledger_lines(run)[0].get("reason") and ledger_lines(run), within_s=30, what="the end")
        assert event["sentence"] in ledger[0]["note"]
        assert "in barrier" in run.stacks(0, 0).read_text()
        assert kind == "stop" or f"in {kind}" in run.stacks(0, 1).read_text()
        pids = [signs.pid for signs in read_signs(run, 0).values()]
        wait_for(lambda: not any(map(read_process, pids)), within_s=60, what="the end of the ranks")


@pytest.mark.parametrize(
    "kind",
    [
        "compute",
        pytest.param("compile", marks=pytest.mark.full),
        *(pytest.param(kind, marks=pytest.mark.campaign) for kind in ("log", "write")),
    ],
)
def test_a_rank_that_does_something_is_left_alone_while_the_other_waits(person: Person, kind: str) -> None:
    with running(person, kind, str(4 * LIMIT_S)) as run:
        # The rank that works ends by itself, long after the time-out.
        wait_for(lambda: newest_signs(run).get(1, Signs(rank=1, host="", pid=0)).has_ended, within_s=90, what="its end")
        assert not read_events(run, "hang"), (person.folder / "typed.log").read_text()


def test_silence_without_a_rank_that_waits_is_said_and_ends_nothing(person: Person) -> None:
    with running(person, "serve") as run:
        (remark,) = wait_for(lambda: read_remarks(run, 0), within_s=60, what="a remark")
        assert remark.startswith("ranks 0, 1 on ") and "it may wait for something" in remark
        # What the supervisor prints goes to the terminal, as what rank 0 prints does, and counts as a sign once.
        status = wait_for(lambda: told(person, run), within_s=60, what="a note of status")
        assert "it may wait for something" in status
        looks = newest_signs(run)[0].looks
        wait_for(lambda: newest_signs(run)[0].looks > looks + 10, within_s=60, what="further looks")
        assert not read_events(run, "hang") and all(not signs.has_ended for signs in newest_signs(run).values())


def test_without_a_time_out_nobody_watches(person: Person) -> None:
    with running(person, "compute", "0", limit_s=None) as run:
        log = run.rank_log(0, 1)
        wait_for(lambda: log.exists() and log.read_text() == "begun\n", within_s=60, what="the program")
        assert not read_signs(run, 0)


def test_stacks_stay_once_the_hang_is_on_record(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    facts = {"run": str(tmp_path), "attempt": 0, "rank": 0, "local_rank": 0, "host": "here", "pid": os.getpid()}
    threads = os.open(tmp_path / "threads", os.O_RDWR | os.O_CREAT)
    watcher = Watcher({**facts, "step_id": "", "limit_s": LIMIT_S, "descriptors": [-1, threads, -1, -1]})
    process = read_process(os.getpid())
    assert process is not None
    sample = Counters(os.getpid(), tmp_path / "log").sample(process)
    watcher._write_report("main thread", b"{}")
    watcher._keep(sample, "processor time")
    assert not run.stacks(0, 0).exists() and not run.flight(0, 0).exists(), "it went on after all"
    watcher._write_report("main thread", b"{}")
    leave_mark(run, 0, FailureMark(rank=0, host="here", exit_code=1, message="is in load (program.py:7)"))
    watcher._keep(sample, "processor time")
    assert run.stacks(0, 0).exists() and run.flight(0, 0).exists(), "it is being ended"
    os.close(threads)


@pytest.mark.parametrize(
    ("group", "waits"),
    [("default_pg", "all_reduce #8 of 1,310,720 elements"), ("x" * 2000, "all_reduce #8 of 1,310,720 elements in xxx")],
)
def test_what_a_rank_waits_in_is_whole_and_fits_its_part_of_the_file(group: str, waits: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    facts = {"run": str(tmp_path), "attempt": 0, "rank": 0, "local_rank": 0, "host": "here", "pid": os.getpid()}
    watcher = Watcher({**facts, "step_id": "", "limit_s": LIMIT_S, "descriptors": [-1, -1, -1, -1]})
    process = read_process(os.getpid())
    assert process is not None
    entry = {"pg_id": 0, "process_group": ["0", group], "collective_seq_id": 8, "input_sizes": [[1310720]]}
    status = {"last_enqueued_collective": "8", "last_completed_collective": "7"}
    record = [{"entries": [{**entry, "profiling_name": "nccl:all_reduce"}], "pg_status": {"0": status}}]
    watcher._judge(Counters(os.getpid(), tmp_path / "log").sample(process), ("", json.dumps(record).encode()))
    watcher._write("S")
    assert read_signs(run, 0)[0].waits.startswith(waits)
    assert run.signs(0, 0).stat().st_size == 1024


def test_the_counters_of_a_process_are_those_of_the_kernel(tmp_path: Path) -> None:
    burn = "import subprocess, sys, time; sum(range(3_000_000))"
    nested = f"{burn}; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); p.wait()"
    process = subprocess.Popen([sys.executable, "-c", nested])
    try:
        (child,) = wait_for(lambda: list(descendants(process.pid)), within_s=30, what="the child")

        def sleeps() -> bool:
            reading = read_process(process.pid)
            return reading is not None and reading.state == "S"

        # On a busy machine the child is there before its parent waits for it.
        wait_for(sleeps, within_s=60, what="the process to sleep")
        found, below = read_process(process.pid), read_process(child)
        assert found is not None and below is not None
        assert (found.state, found.parent, below.parent) == ("S", os.getpid(), process.pid) and found.cpu_s > 0
        assert io_bytes(process.pid) > 0 == io_bytes(2**22 + 1)
        assert not catches(process.pid, signal.SIGRTMIN + 11)
    finally:
        os.kill(child, signal.SIGKILL)
        process.wait(30)
    assert read_process(process.pid) is None


ANSWERING = """
import os, sys, threading, time
from slurm_train.worker.watched import answer_watcher

answer_watcher(os.environ)

def deep(n):
    return 0 if n == 0 else deep(n - 1)

def work():
    while True:
        deep(200)

for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
deep(100)
time.sleep(1000)
"""


def test_a_program_with_busy_threads_survives_being_asked(tmp_path: Path) -> None:
    files = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("stacks", "threads", "flight")]
    asked, ask = os.pipe()
    passed = (*files, asked)
    for descriptor in passed:
        os.set_inheritable(descriptor, True)
    process = subprocess.Popen(
        [sys.executable, "-c", ANSWERING],
        env={**os.environ, "SLURM_TRAIN_WATCH": ",".join(map(str, passed))},
        pass_fds=passed,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        # One of two to five signals ended it when the handler looked at all threads.
        for _ in range(200):
            os.ftruncate(files[0], 64)
            os.lseek(files[0], 64, os.SEEK_SET)
            signal_main_thread(process.pid, ASK)
            os.write(ask, b"?")
            wait_for(
                lambda: b"<module>" in os.pread(files[0], 1 << 16, 64),
                within_s=60,
                what="a stack",
                poll_s=0.001,
            )
            assert process.poll() is None

        def both_threads_are_named() -> bool:
            # Only the innermost 100 frames are written: a thread that was deeper than that is asked again.
            os.write(ask, b"?")
            return os.pread(files[1], 1 << 16, 0).count(b"in work") == 2

        wait_for(both_threads_are_named, within_s=60, what="all threads")
    finally:
        process.kill()
        process.communicate()
        for descriptor in (*files, asked, ask):
            os.close(descriptor)


def test_a_process_that_gets_no_cpu_is_busy() -> None:
    cpu = min(os.sched_getaffinity(0))
    burn = f"import os; os.sched_setaffinity(0, [{cpu}]); print(flush=True)\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"\n"
        os.setpriority(os.PRIO_PROCESS, processes[0].pid, 19)
        before = read_process(processes[0].pid)
        assert before is not None

        def waited_s() -> float:
            after = read_process(processes[0].pid)
            assert after is not None
            return after.busy_s(before) - (after.cpu_s - before.cpu_s)

        # By its priority it gets 1.4 % of the time, and waits for the rest.
        wait_for(lambda: waited_s() > 0.15, within_s=60, what="time in which it waited for a CPU")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_process_that_is_woken_on_a_busy_node_is_not_busy() -> None:
    before = read_process(os.getpid())
    assert before is not None
    # Being asked for its stack takes a process 0.2 ms, for which it waits 40 ms where many others run.
    after = replace(before, main_cpu_s=before.main_cpu_s + 0.0002, main_delay_s=before.main_delay_s + 0.04)
    assert after.busy_s(before) < 0.005


def test_only_a_signal_with_a_handler_is_caught() -> None:
    number = signal.SIGRTMIN + 11
    assert not catches(os.getpid(), number)
    handler = signal.signal(number, lambda *_: None)
    try:
        assert catches(os.getpid(), number)
    finally:
        signal.signal(number, handler)


# Each line starts the last one's processes below the rank, which holds RANK=1 of 2.
LAUNCH = "import os, subprocess, sys; [subprocess.Popen(['sleep', '60'], env={**os.environ, **e}) for e in %s]; input()"
OF_TORCHRUN = [{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29500"} for rank in (1, 0)]
OF_NODE_1 = [{"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_PORT": "29500"} for rank in (3, 2)]


@pytest.mark.parametrize(
    ("program", "variables", "found"),
    [
        ("torchrun", OF_TORCHRUN, InnerRanks("torchrun", 0, 2)),
        ("composer", OF_NODE_1, InnerRanks("composer", 2, 4)),
        # Workers of a loader and other helpers have the variables of the rank.
        ("train.py", [{}, {"OMP_NUM_THREADS": "1"}], None),
        ("train.py", [{"RANK": "0"}], InnerRanks("train.py", 0, 2)),
        ("srun", [{}], InnerRanks("srun", 0, 0)),
        # A script that starts its ranks itself, as a rank runs it.
        ("script_main.py /run train.py", OF_TORCHRUN, InnerRanks("train.py", 0, 2)),
    ],
)
def test_ranks_that_a_launcher_has_started_below_a_rank_are_seen(
    tmp_path: Path, program: str, variables: list[dict[str, str]], found: InnerRanks | None
) -> None:
    (tmp_path / program.split()[0]).write_text(LAUNCH % variables)
    env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "41000", "MASTER_ADDR": "node1"}
    words = ["bash", "-c", f"{sys.executable} {tmp_path / program}; true"]
    rank = subprocess.Popen(words, env=env, stdin=subprocess.PIPE)
    try:
        below = lambda: len(set(descendants(rank.pid))) == 1 + len(variables)  # noqa: E731
        wait_for(below, within_s=60, what="the processes")
        # Until it has become its program, a process has what its parent has.
        wait_for(lambda: inner_ranks(rank.pid) == found, within_s=30, what=str(found))
    finally:
        for pid in {*descendants(rank.pid), rank.pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        rank.communicate(timeout=20)
