"""A program's files, threads and exit functions at its end: what plain Python leaves, each way to run it leaves."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.rundir.paths import RunDirectory
from slurm_train.worker import script_main
from slurm_train.worker.script import script_command
from tests.support.command_line import TINY, TINY_MODULE
from tests.support.warm_commands import WarmPerson

# Each of these has something in a buffer, or something to do, when the last line has run.
PROGRAM = """
import atexit, csv, ctypes, gzip, io, logging, logging.handlers, os, queue
import shelve, signal, sys, threading, time, zipfile
import helper

OUT = os.environ["OUT"]
text = open(f"{OUT}/few.txt", "w")
rows = csv.writer(open(f"{OUT}/rows.csv", "w"))
packed = io.TextIOWrapper(gzip.GzipFile(f"{OUT}/rows.gz", "wb", mtime=0))
archive = zipfile.ZipFile(f"{OUT}/rows.zip", "w")
archive_entry = zipfile.ZipInfo("a.txt")
log = logging.getLogger("results")
log.addHandler(logging.handlers.MemoryHandler(1000, target=logging.FileHandler(f"{OUT}/log.txt")))
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(libc.fopen(f"{OUT}/stream.txt".encode(), b"w"))

class Writer:
    '''As trackers do: a thread writes what comes through a queue.'''
    def __init__(self):
        self.file = open(f"{OUT}/events.txt", "w")
        self.events = queue.Queue()
        self.thread = threading.Thread(target=self.write)
        self.thread.start()
        atexit.register(self.close)
    def write(self):
        time.sleep(0.2)
        for event in iter(self.events.get, None):
            self.file.write(event)
    def close(self):
        self.file.write("closed at exit")

def handle(number, frame):
    text.write("a signal")

class Registry:
    files = []

def upload():
    time.sleep(0.3)
    with open(f"{OUT}/uploaded.txt", "w") as file:
        file.write(f"from {__name__ == '__main__' or 'an import'}"[:4])

def main(context=None):
    signal.signal(signal.SIGALRM, handle)
    local = open(f"{OUT}/local.txt", "w")
    local.write("in a variable of a function")
    state = shelve.open(f"{OUT}/state", writeback=True)
    state["best"] = [1]
    state["best"].append(2)
    Registry.files.append(open(f"{OUT}/registry.txt", "w"))
    Registry.files[0].write("in a class")
    helper.note("in a module beside it")
    text.write("accuracy 0.93")
    for number in range(2000):
        rows.writerow([number, number / 7])
        packed.write(f"{number}\\n")
    archive.writestr(archive_entry, "hello")
    log.warning("one line")
    libc.fputs(b"of a C library", stream)
    writer = Writer()
    writer.events.put("step 1")
    writer.events.put(None)
    threading.Thread(target=upload).start()
    atexit.register(lambda: open(f"{OUT}/atexit.txt", "w").write("finished"))
    if os.environ["END"] == "raises":
        raise RuntimeError("boom")
    if os.environ["END"] == "exits":
        sys.exit(0)

if __name__ == "__main__":
    main()
"""
HELPER = """
import os
notes = open(os.environ["OUT"] + "/notes.txt", "w")
def note(text): notes.write(text)
"""
CALLS = """
from slurm_train.train.callbacks import Callback
import results
class Calls(Callback):
    def on_step_end(self, trainer):
        if trainer.position.step == 2:
            results.main()
"""
ENDS = ("returns", "exits", "raises")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, text in (("results", PROGRAM), ("helper", HELPER), ("tiny", TINY_MODULE), ("calls", CALLS)):
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def plain(project: Path) -> dict[str, dict[str, bytes]]:
    """What plain Python leaves, by how the program ends."""
    left = {}
    for end in ENDS:
        out = project / f"plain_{end}"
        out.mkdir()
        env = {**os.environ, "OUT": str(out), "END": end}
        subprocess.run([sys.executable, project / "results.py"], env=env, capture_output=True, check=False, timeout=60)
        left[end] = contents(out)
    assert len(left["returns"]["rows.csv"].splitlines()) == len(gzip.decompress(left["returns"]["rows.gz"]).split())
    return left


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("words", [["results.py"], ["-m", "results"]], ids=["script", "module"])
def test_a_script_leaves_what_plain_python_leaves(
    words: list[str], end: str, project: Path, plain: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    command = script_command(words, code_dir=project, run=RunDirectory(tmp_path / "run"))
    out = tmp_path / "out"
    out.mkdir()
    env = {**os.environ, "OUT": str(out), "END": end, "PYTHONPATH": ":".join([str(project), *sys.path])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert contents(out) == plain[end], done.stderr
    assert done.returncode == (1 if end == "raises" else 0), done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("end", ENDS)
def test_a_function_leaves_what_plain_python_leaves(
    end: str, project: Path, plain: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    words = ("task._target_=results.main", "run.processes=1", f"run.root={tmp_path / 'runs'}", f"run.name={end}")
    done = WarmPerson(project).types(*words, env={"OUT": str(out), "END": end})
    assert contents(out) == plain[end], done.err
    assert done.code == (1 if end == "raises" else 0), done.err


@pytest.mark.distributed
@pytest.mark.parametrize("end", ["returns", "raises"])
def test_a_callback_leaves_what_plain_python_leaves(
    end: str, project: Path, plain: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    words = (*TINY, "callbacks=[{_target_:calls.Calls}]", "run.processes=1", f"run.root={tmp_path / 'runs'}")
    done = WarmPerson(project).types(*words, f"run.name={end}", env={"OUT": str(out), "END": end})
    assert contents(out) == plain[end], done.err


HANGS = """
import atexit, os, threading, time
from slurm_train.session import ending
ending._FAILED_ENDS_WITHIN_S = 0.2
text = open(os.environ["OUT"] + "/few.txt", "w")
text.write("accuracy 0.93")
threading.Thread(target=threading.Event().wait, name="uploader").start()
raise RuntimeError("boom")
"""


def test_a_program_that_has_failed_ends_although_a_thread_does_not(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    command = [sys.executable, script_main.__file__, str(tmp_path), str(tmp_path / "hangs.py")]
    env = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "uploader" in done.stderr, done.stderr
    assert (tmp_path / "few.txt").read_text() == "accuracy 0.93"


PARQUET = """
import os, pyarrow, pyarrow.parquet
table = pyarrow.table({"step": list(range(2000))})
writer = pyarrow.parquet.ParquetWriter(os.environ["OUT"] + "/rows.parquet", table.schema)
def main():
    writer.write_table(table)
main()
"""


def test_a_writer_of_a_library_closes_its_file(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows.py").write_text(PARQUET)
    command = [sys.executable, script_main.__file__, str(tmp_path), str(tmp_path / "rows.py")]
    subprocess.run(command, env={**os.environ, "OUT": str(tmp_path)}, check=True, timeout=60)
    assert parquet.read_table(tmp_path / "rows.parquet").num_rows == 2000
