from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from slurm_train.launch.local import LocalRanks, start_local
from slurm_train.rundir.paths import RunDirectory
from tests.support.waiting import wait_for


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.attempt_logs(0).mkdir(parents=True)
    return run


def start(run: RunDirectory, code: str, *, num_ranks: int = 2) -> LocalRanks:
    env = {**os.environ, "RUN": str(run.path), "MASTER_PORT": "1"}
    return start_local([sys.executable, "-c", code], run=run, attempt=0, num_ranks=num_ranks, env=env)


def test_each_rank_knows_its_place_and_writes_to_its_log(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
    code = f"import os, sys; print(*(os.environ[name] for name in {names})); print('err', file=sys.stderr)"
    assert start(run, code, num_ranks=3).wait() == 0
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("0 0 0 3 3 1\n", "err\n"), "rank 0 has the terminal"
    assert [run.rank_log(0, rank).stat().st_size > 0 for rank in range(3)] == [False, True, True]
    assert sorted(run.rank_log(0, 2).read_text().splitlines()) == ["2 2 0 3 3 1", "err"]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [("0 0", 0), ("0 3", 3), ("75 75", 75), ("75 0", 75), ("75 1", 1), ("-9 0", 137), ("0 -15", 143)],
)
def test_the_exit_code_of_the_whole(codes: str, expected: int, run: RunDirectory) -> None:
    code = (
        f"import os; code = int('{codes}'.split()[int(os.environ['RANK'])]);"
        "os.kill(os.getpid(), -code) if code < 0 else os._exit(code)"
    )
    assert start(run, code).wait() == expected


WAITING = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(os.environ["RUN"]), os.environ["RANK"]
def note(number, frame):
    (folder / f"signal_{rank}").write_text(str(number))
    os._exit(75)
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, note)
(folder / f"ready_{rank}").touch()
if rank == os.environ.get("FAILS"):
    while not all((folder / f"ready_{other}").exists() for other in range(2)):
        time.sleep(0.01)
    os._exit(9)
time.sleep(60)
"""


def test_the_first_failing_rank_ends_the_rest(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    began = time.monotonic()
    assert start(run, WAITING).wait() == 9
    assert (run.path / "signal_0").read_text() == str(int(signal.SIGTERM)), "asked, so that it can write what it knows"
    assert time.monotonic() - began < 20


def test_a_rank_that_does_not_listen_is_killed(run: RunDirectory) -> None:
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "os._exit(5) if os.environ['RANK'] == '1' else time.sleep(60)"
    )
    ranks = start(run, code)
    ranks.kill_after_s = 0.2
    assert ranks.wait() == 5
    assert all(process.returncode is not None for process in ranks.processes)


def test_a_stop_request_reaches_every_rank(run: RunDirectory) -> None:
    ranks = start(run, WAITING)
    wait_for(lambda: len(list(run.path.glob("ready_*"))) == 2, within_s=20, what="both ranks", poll_s=0.02)
    # Ctrl-C on the terminal does not reach them.
    assert all(os.getsid(process.pid) == process.pid for process in ranks.processes)
    ranks.interrupt()
    assert ranks.wait() == 75
    assert {path.read_text() for path in run.path.glob("signal_*")} == {str(int(signal.SIGUSR2))}
