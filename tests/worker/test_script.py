"""An unmodified script finds what torchrun would set, without torch, and runs as it would by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from slurm_train.distributed.place import RankPlace
from slurm_train.errors import ConfigError
from slurm_train.rundir.events import first_mark, read_events
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.signs import read_group
from slurm_train.worker import apart, script_main
from slurm_train.worker.apart import ApartWatch
from slurm_train.worker.script import edited_arguments, script_command, script_env, torchrun_env

PLACE = RankPlace(rank=5, local_rank=1, node_rank=1, world_size=6, local_world_size=2, host="n1")
MASTER = {"MASTER_ADDR": "n0", "MASTER_PORT": "12345"}


def test_ranks_are_set_as_torchrun_sets_them() -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT not set"):
        torchrun_env(PLACE, {"MASTER_ADDR": "n0"})
    assert torchrun_env(PLACE, {**MASTER, "HOME": "/root", "RANK": "9"}) == {
        **MASTER,
        "HOME": "/root",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
    }


def test_ranks_of_a_node_share_its_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def variables(env: dict[str, str], place: RankPlace = PLACE) -> dict[str, str]:
        return script_env(place, {**MASTER, **env}, code_dir=tmp_path, run=RunDirectory(tmp_path))

    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(12)))
    assert variables({})["OMP_NUM_THREADS"] == "6"
    assert variables({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in variables({}, replace(PLACE, local_world_size=1))


def test_a_python_within_a_shell_keeps_no_lines_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert script_env(PLACE, MASTER, code_dir=tmp_path, run=run)["PYTHONUNBUFFERED"] == "1"
    own = {**MASTER, "PYTHONUNBUFFERED": ""}
    assert script_env(PLACE, own, code_dir=tmp_path, run=run)["PYTHONUNBUFFERED"] == ""


@pytest.mark.parametrize(
    ("words", "text"),
    [([], "names no script"), (["no.py"], "script=no.py: no such file"), (["nosuchprogram"], "no such program")],
)
def test_what_is_not_there_is_said(tmp_path: Path, words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        script_command(words, code_dir=tmp_path, run=RunDirectory(tmp_path))


def test_a_shell_file_runs_as_typed_with_and_without_a_permission_or_a_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "code"
    code.mkdir()
    file = code / "train.sh"
    file.write_text("echo step $1\n")
    worker = WORKER.replace('["show.py", "a b"]', '[sys.argv[2], "7"]').replace("sys.argv[2:]", "sys.argv[3:]")
    for mode in (0o644, 0o755):
        file.chmod(mode)
        (tmp_path / "train.sh").unlink(missing_ok=True)
        for name in ("train.sh", "./train.sh"):
            words = [sys.executable, "-c", worker, str(code), name]
            done = subprocess.run(words, capture_output=True, text=True)
            assert done.stdout.splitlines()[-1] == "step 7", (mode, name, done.stderr)
    (code / "data").write_text("")
    with pytest.raises(ConfigError, match=r"script=data may not be executed\nhint: chmod \+x "):
        script_command(["data"], code_dir=code, run=RunDirectory(tmp_path))


def test_the_directory_of_the_run_is_put_into_the_words(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["train.py", "--out=$SLURM_TRAIN_RUN_DIR/out", "$SLURM_TRAIN_RUN_DIRECTORY", r"\1"]
    command = script_command(words, code_dir=tmp_path, run=RunDirectory(tmp_path / r"a\1"))
    assert command[-3:] == [f"--out={tmp_path}/a\\1/out", "$SLURM_TRAIN_RUN_DIRECTORY", r"\1"]


def test_a_file_of_an_argument_that_was_edited_is_named(tmp_path: Path) -> None:
    code = tmp_path / "code"
    for place in (code, tmp_path):
        (place / "config").mkdir(parents=True)
        for name in ("same.py", "edited.py"):
            (place / "config" / name).write_text("lr = 1")
    (tmp_path / "config" / "edited.py").write_text("lr = 2")
    (tmp_path / "data.bin").touch()
    words = [
        "train.py",
        "config/edited.py",
        "--a=config/same.py",
        "--b=config/edited.py",
        "data.bin",
        "config",
        "x" * 999,
    ]
    words += ["a\0b", str(tmp_path / "config" / "edited.py")]
    assert edited_arguments(words, code_dir=code, folder=tmp_path) == ["config/edited.py", "config/edited.py"]


WORKER = """
import os, signal, sys
from pathlib import Path
from slurm_train.config.schema import RunConfig
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.signals import StopFlag, install
from slurm_train.worker.script import run_script

folder = Path(sys.argv[1])
stop = StopFlag()
install(stop)
for number in sys.argv[2:]:
    os.kill(os.getpid(), int(number))
assert "torch" not in sys.modules
print(os.getpid())
env = {"MASTER_ADDR": "x", "MASTER_PORT": "1"}
config = RunConfig(script=["show.py", "a b"])
run = RunDirectory(folder)
run_script(config, place=RankPlace.from_env({}), env=env, code_dir=folder, run=run, attempt=0, stop=stop)
"""


def test_the_worker_becomes_the_script_without_torch(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(
        "import json, os, sys; e = os.environ;"
        "print(json.dumps([os.getpid(), e['RANK'], e['SLURM_TRAIN_RUN_DIR'], sys.argv[1:]])); sys.exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", WORKER, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    pid, line = done.stdout.splitlines()
    assert json.loads(line) == [int(pid), "0", str(tmp_path), ["a b"]]


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_script_does_not_begin_after_a_request_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "show.py").write_text("print('begun')")
    words = [sys.executable, "-c", WORKER, str(tmp_path), str(int(number))]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == -number and "begun" not in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", (0, "", "", True)),
        ("raise SystemExit(75)", (75, "", "", True)),
        ("raise SystemExit(2)", (2, "the script ended with code 2", "", True)),
        # The system would keep the lowest byte.
        ("raise SystemExit(256)", (1, "the script ended with code 1", "", True)),
        ("raise ValueError('odd')", (1, "ValueError: odd", "train.py:1 in <module>", True)),
        ("raise ConnectionError('away')", (1, "ConnectionError: away", "train.py:1 in <module>", False)),
        (
            "from slurm_train import errors\nraise errors.ConfigError('odd', hint='do')",
            (2, "ConfigError: odd", "train.py:2 in <module>", True),
        ),
        ("assert 1 > 2", (1, "AssertionError", "train.py:1 in <module>", True)),
    ],
)
def test_how_it_failed_is_told_in_a_few_words_and_to_what_runs_at_exit(
    tmp_path: Path, line: str, found: tuple[int, str, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    (tmp_path / "train.py").write_text(line)
    assert script_main.run(str(tmp_path / "train.py")) == found
    assert (sys.last_value is not None) == bool(found[1])


LOSES_CHILDREN = """
import os, signal

def gone(number, frame):
    raise RuntimeError("a process of the loader is gone")

class Odd(Exception):
    def __str__(self):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return "odd"

signal.signal(signal.SIGCHLD, gone)
raise Odd
"""


def test_a_failure_is_told_although_children_end_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSES_CHILDREN)
    begin = f"import sys\nsys.argv = ['x', '{tmp_path}']\nfrom slurm_train.worker import script_main\n"
    line = f"{begin}print(script_main.run('{tmp_path}/train.py'))"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "(1, 'Odd: odd', 'train.py:16 in <module>', True)\n", done.stderr


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("open(Path(__file__).parent / 'data' / 'x.bin')", "data/x.bin"),
        ("raise RuntimeError(f'no images in {Path(__file__).parent}/data: none')", "data"),
        ("open(os.path.join(os.path.dirname(__file__), '../beside/y.txt'))", "../beside/y.txt"),
        ("os.makedirs(Path(__file__).parent / 'data' / 'raw')\nraise OSError('no such address')", "data"),
        ("open(Path(__file__).parent / 'data' / 'no.bin')", ""),
        ("raise ValueError(__file__)", ""),
        ("open('data/no.bin')", ""),
    ],
)
def test_data_beside_the_code_that_the_copy_lacks_are_named(tmp_path: Path, line: str, found: str) -> None:
    run = tmp_path / "runs" / "a"
    here = tmp_path / "work" / "here"
    for folder in (run / "code", here / "data", here.parent / "beside"):
        folder.mkdir(parents=True)
    for file in (here / "data" / "x.bin", here.parent / "beside" / "y.txt"):
        file.touch()
    script = run / "code" / "train.py"
    script.write_text(f"import os\nfrom pathlib import Path\n{line}\n")
    command = [sys.executable, script_main.__file__, str(run), str(script)]
    env = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=60, check=False)
    (*_, last) = done.stderr.splitlines()
    assert done.returncode == 1 and last.startswith("slurm_train:") == bool(found), done.stderr
    if found:
        assert last.startswith(f"slurm_train: {os.path.normpath(here / found)} exists, and the run's copy"), last


def test_the_supervisor_learns_which_rank_failed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    run.attempt_logs(2).mkdir(parents=True)
    for rank in ("3", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("SLURM_TRAIN_ATTEMPT", "2")
        script_main.leave_failure_mark(str(tmp_path), 2, "ValueError: odd\nand more", place="train.py:3 in main")
    mark = first_mark(run, 2)
    assert mark is not None and (mark.rank, mark.exit_code, mark.message) == (3, 2, "ValueError: odd")
    assert mark.place == "train.py:3 in main"


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("print(__name__, sys.argv[1:], beside.VALUE); sys.exit(3)", 3, "__main__ ['--lr', '1'] 7\n", ""),
        ("sys.exit('no data')", 1, "", "no data\n"),
        ("os._exit(5)", 5, "", ""),
        ("raise ValueError('odd')", 1, "", "ValueError: odd\n"),
        (
            "atexit.register(print, 'last')\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\nprint('end')",
            0,
            "end\nthread\nlast\n",
            "",
        ),
        (
            "def work(q): q.put(42)\nif __name__ == '__main__':\n"
            "    ctx = mp.get_context('spawn')\n    q = ctx.Queue()\n    p = ctx.Process(target=work, args=(q,))\n"
            "    p.start()\n    print(q.get())\n    p.join()",
            0,
            "42\n",
            "",
        ),
    ],
    ids=["name, arguments and neighbours", "words", "at once", "exception", "threads and exit functions", "spawned"],
)
def test_a_script_runs_and_ends_as_it_would_by_itself(tmp_path: Path, line: str, code: int, out: str, err: str) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = tmp_path / "train.py"
    script.write_text(f"import atexit, os, sys, threading, time, beside\nimport multiprocessing as mp\n{line}\n")
    command = [sys.executable, script_main.__file__, str(tmp_path), str(script), "--lr", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, out) and done.stderr.endswith(err), done.stderr
    assert "runpy" not in done.stderr and "script_main" not in done.stderr


@pytest.mark.parametrize(
    ("line", "code", "out", "err"),
    [
        ("print(__name__, sys.argv[1:], VALUE, Path(sys.argv[0]).name)", 0, "__main__ ['--lr', '1'] 7 train.py\n", ""),
        ("raise ValueError('odd')", 1, "", "ValueError: odd\n"),
        (
            "def work(q): q.put(42)\nif __name__ == '__main__':\n"
            "    ctx = mp.get_context('spawn')\n    q = ctx.Queue()\n    p = ctx.Process(target=work, args=(q,))\n"
            "    p.start()\n    print(q.get())\n    p.join()",
            0,
            "42\n",
            "",
        ),
    ],
    ids=["name, arguments and neighbours", "exception", "spawned"],
)
def test_a_module_runs_as_by_python_m(tmp_path: Path, line: str, code: int, out: str, err: str) -> None:
    package = tmp_path / "code" / "mine"
    package.mkdir(parents=True)
    (package / "beside.py").write_text("VALUE = 7\n")
    (package / "train.py").write_text(
        f"import sys\nimport multiprocessing as mp\nfrom pathlib import Path\nfrom .beside import VALUE\n{line}\n"
    )
    run = RunDirectory(tmp_path / "run")
    command = script_command(["-m", "mine.train", "--lr", "1"], code_dir=tmp_path / "code", run=run)
    env = {"PYTHONPATH": ":".join([str(tmp_path / "code"), *sys.path])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, out) and done.stderr.endswith(err), done.stderr
    assert "runpy" not in done.stderr and "script_main" not in done.stderr
    assert ("train.py" in done.stderr) == bool(err)


HANDLES = "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: None); me = os.getpid()"


@pytest.mark.parametrize(
    ("line", "asked_by"),
    [
        (f"{HANDLES}; os.kill(me, signal.SIGTERM)", ["TERM"]),
        (f"{HANDLES}; os.kill(me, signal.SIGTERM); sys.exit(0)", ["TERM"]),
        (f"{HANDLES}; os.kill(me, signal.SIGTERM); sys.exit(75)", []),
        # A pool ends its processes so.
        (f"{HANDLES}; child = os.fork(); child or os.kill(os.getpid(), signal.SIGTERM); child and os.wait()", []),
        (HANDLES, []),
    ],
    ids=["handled", "exit 0", "exit 75", "of a child", "no signal"],
)
def test_a_stop_signal_before_an_end_with_0_is_on_record(tmp_path: Path, line: str, asked_by: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{line}\n")
    env = {"RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, script_main.__file__, str(tmp_path), str(script)]
    subprocess.run(command, env=env, timeout=60, check=False)
    assert [event["asked_by"] for event in read_events(RunDirectory(tmp_path), "signal")] == asked_by


GROUP = "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)"
JAX = (
    "import types; jax = types.SimpleNamespace(global_state=types.SimpleNamespace(client=%s)); sys.modules['jax'] = sys"
)
TO_THE_END = "has not opened torch.distributed, to the end: its 2 ranks do not know"


@pytest.mark.parametrize(
    ("line", "rank", "num_ranks", "said"),
    [
        ("import torch", 0, 2, TO_THE_END),
        ("import torch", 1, 2, ""),
        ("import torch", 0, 1, ""),
        ("print('no torch')", 0, 2, ""),
        ("import torch; sys.modules['jax'] = sys", 0, 2, ""),
        ("sys.modules['jax'] = sys", 0, 2, ""),
        (f"{JAX % None}; sys.modules['jax._src.distributed'] = jax", 0, 2, "has not called jax.distributed.initialize"),
        (f"{JAX % 1}; sys.modules['jax._src.distributed'] = jax", 0, 2, ""),
        ("import torch; from slurm_train import session; session.join()", 0, 2, ""),
        ("import torch; sys.exit(75)", 0, 2, ""),
        (f"import torch; {GROUP}; time.sleep(1.1)", 0, 2, "torch.distributed has 1 rank, and the run has 2"),
        (f"import torch; sys.modules['ray'] = sys; {GROUP}; time.sleep(1.1)", 0, 2, ""),
    ],
    ids=[
        *("two ranks", "said once", "one rank", "no torch", "another way"),
        *("JAX that does not tell", "JAX alone", "JAX", "joined", "stopped"),
        *("a group of its own", "a library that makes groups"),
    ],
)
def test_ranks_that_do_not_know_of_each_other_are_told(
    tmp_path: Path, line: str, rank: int, num_ranks: int, said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys, time\n{line}\n")
    env = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, script_main.__file__, str(tmp_path), str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    group = read_group(RunDirectory(tmp_path), 0)
    if said:
        assert group is not None and said in group.remark and group.remark in done.stderr, done.stderr
    else:
        assert "slurm_train: " not in done.stderr and (group is None or not group.remark), done.stderr


@pytest.mark.parametrize(
    ("file", "function", "said"),
    [
        ("importlib/_bootstrap.py", "step", ""),
        ("site-packages/datasets/load.py", "wrapper", ""),
        ("site-packages/torch/utils/data/dataloader.py", "step", ""),
        ("site-packages/torch/autograd/graph.py", "_engine_run_backward", ""),
        ("site-packages/torch/optim/adamw.py", "__init__", ""),
        (
            "site-packages/torch/optim/optimizer.py",
            "wrapper",
            "the program trains, and has not opened torch.distributed",
        ),
        ("site-packages/torch/multiprocessing/spawn.py", "join", "the program has spawned processes, and has not"),
    ],
)
def test_a_program_is_spoken_of_before_its_end_only_where_it_is_seen_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, function: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("half imported"))
    monkeypatch.setattr(apart, "_LOOK_EVERY_S", 0.001)
    run = RunDirectory(tmp_path)
    watch = ApartWatch({"RANK": "0", "WORLD_SIZE": "8"}, str(tmp_path), trains_for_s=0.0)
    # The main thread is in code of that path, for half a second where nothing is to be said.
    end_s = time.monotonic() + (60.0 if said else 0.5)
    names = {"more": lambda: time.monotonic() < end_s and read_group(run, 0) is None, "sleep": time.sleep}
    program = f"def {function}():\n    while more():\n        sleep(0.01)\n{function}()"
    exec(compile(program, f"/venv/{file}", "exec"), names)
    group = read_group(run, 0)
    assert (group.remark if group is not None else "").startswith(said) and bool(group) == bool(said)
    if not said:
        watch.end()
