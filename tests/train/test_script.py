"""An unmodified script finds what torchrun would set; nothing here imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.distributed.place import RankPlace
from slurm_train.errors import ConfigError
from slurm_train.rundir.layout import RunDirectory
from slurm_train.train import script_main
from slurm_train.train.script import script_command, torchrun_env

PLACE = RankPlace(rank=5, local_rank=1, node_rank=1, world_size=6, local_world_size=2, host="n1")
MASTER = {"MASTER_ADDR": "n0", "MASTER_PORT": "12345"}


def test_ranks_are_set_as_torchrun_sets_them() -> None:
    assert torchrun_env(PLACE, {**MASTER, "HOME": "/root", "RANK": "9"}) == {
        **MASTER,
        "HOME": "/root",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
    }


def test_a_python_file_runs_under_this_interpreter_and_a_program_as_itself(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert script_command(["train.py", "--lr", "1"], code_dir=tmp_path, run=RunDirectory(tmp_path)) == [
        sys.executable,
        "-u",
        script_main.__file__,
        str(tmp_path),
        str(tmp_path / "train.py"),
        "--lr",
        "1",
    ]
    assert script_command(["sh", "-c", "true"], code_dir=tmp_path, run=RunDirectory(tmp_path))[1:] == ["-c", "true"]


@pytest.mark.parametrize(
    ("words", "text"),
    [([], "names no script"), (["no.py"], "script=no.py: no such file"), (["nosuchprogram"], "no such program")],
)
def test_what_is_not_there_is_said(tmp_path: Path, words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        script_command(words, code_dir=tmp_path, run=RunDirectory(tmp_path))


def test_a_missing_master_is_said() -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT not set"):
        torchrun_env(PLACE, {"MASTER_ADDR": "n0"})


def test_the_worker_becomes_the_script_without_torch(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(
        "import json, os, sys; e = os.environ;"
        "print(json.dumps([os.getpid(), e['RANK'], e['SLURM_TRAIN_RUN_DIR'], sys.argv[1:]])); sys.exit(3)"
    )
    code = (
        "import os, sys; from pathlib import Path; from slurm_train.distributed.place import RankPlace;"
        "from slurm_train.rundir.layout import RunDirectory;"
        "from slurm_train.train.script import run_script; assert 'torch' not in sys.modules; print(os.getpid());"
        "run_script(['show.py', 'a b'], place=RankPlace.from_env({}), code_dir=Path(sys.argv[1]),"
        " run=RunDirectory(Path(sys.argv[1])),"
        " env={'MASTER_ADDR': 'x', 'MASTER_PORT': '1'})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    pid, line = done.stdout.splitlines()
    assert json.loads(line) == [int(pid), "0", str(tmp_path), ["a b"]]
