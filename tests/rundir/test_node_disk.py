"""Folders of one user on a disk that all users of a node write to; the caches of torch and Triton in them."""

from __future__ import annotations

import getpass
import multiprocessing.util
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir import node_disk
from slurm_train.rundir.node_disk import compile_obstacles, has_room_for_sockets, kernel_variables, open_private
from tests.support.command_line import REPOSITORY

KERNELS = f"kernels-{Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}"
PRINT_CACHES = """
import torch
from torch._inductor.codecache import _HEADER_DIR
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir
print("caches", cache_dir(), triton_cache_dir(0), _HEADER_DIR if config.cpp_cache_precompile_headers else "none")
"""


def open_run(base: Path) -> Path:
    return open_private(base, "run", "node", key="checkpoint.local_dir")


def test_the_users_folder_is_private_and_found_again(tmp_path: Path) -> None:
    folder = open_run(tmp_path)
    assert folder == tmp_path / f"slurm_train-{os.geteuid()}" / "run" / "node" and folder.stat().st_mode & 0o077 == 0
    assert open_run(tmp_path) == folder
    folder.chmod(0o777)
    with pytest.raises(RunError, match="must be a folder that only you can enter"):
        open_run(tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(RunError, match="must be a folder that only you can enter"):
        open_run(tmp_path)
    with pytest.raises(RunError, match=r"checkpoint\.local_dir=.* is not a folder on this node"):
        open_run(tmp_path / "absent")


def make_open(taken: Path) -> None:
    taken.mkdir()
    taken.chmod(0o777)


def link_elsewhere(taken: Path) -> None:
    elsewhere = taken.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700, exist_ok=True)
    taken.symlink_to(elsewhere)


def give_away(taken: Path) -> None:
    taken.mkdir(mode=0o755)
    os.chown(taken, 65534, 65534)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making a file of another user needs root")
OBSTACLES = [make_open, link_elsewhere, Path.touch, pytest.param(give_away, marks=needs_root)]


@pytest.mark.parametrize("obstruct", OBSTACLES)
def test_a_name_that_is_taken_keeps_nobody_out(tmp_path: Path, obstruct: Callable[[Path], None]) -> None:
    taken = tmp_path / f"slurm_train-{os.geteuid()}"
    obstruct(taken)
    folder = open_run(tmp_path)
    assert folder.parent.parent.name.startswith(f"{taken.name}.")
    assert open_run(tmp_path) == folder, "it is found again"
    assert not taken.is_dir() or list(taken.iterdir()) == []


@pytest.mark.parametrize("name", [".", ".."])
def test_a_folder_where_anybody_may_exchange_ours_is_refused(tmp_path: Path, name: str) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / name).chmod(0o777)
    with pytest.raises(RunError, match="anybody may put a folder in the place of yours"):
        open_run(base)
    (base / name).chmod(0o1777)
    assert open_run(base).is_dir()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a node has for /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize("name", [f"torchinductor_{getpass.getuser()}", f"slurm_train-{os.geteuid()}"])
@pytest.mark.parametrize("obstruct", OBSTACLES)
def test_kernels_are_loaded_from_no_folder_that_somebody_else_has_made(
    tmp_path: Path, temporary: Path, obstruct: Callable[[Path], None], name: str
) -> None:
    obstruct(temporary / name)
    variables = kernel_variables({}, instead=tmp_path / "instead")
    caches = [Path(variables[key]).parent for key in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "QUACK_CACHE_DIR")]
    assert len(set(caches)) == 1 and caches[0] == open_private(temporary, KERNELS, key="TMPDIR")
    is_torchs = name.startswith("torchinductor")
    assert variables.get("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS") == ("0" if is_torchs else None)


def test_torchs_own_folder_is_made_before_anybody_else_makes_it(tmp_path: Path, temporary: Path) -> None:
    assert "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS" not in kernel_variables({}, instead=tmp_path)
    assert (temporary / f"torchinductor_{getpass.getuser()}").stat().st_mode & 0o777 == 0o700


def test_kernels_are_compiled_anew_after_a_power_cut(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It empties what was not synced."""
    folders = []
    for boot in ("1c0ffee0-77", "2c0ffee0-77", "1c0ffee0-77"):
        (tmp_path / "boot_id").write_text(f"{boot}\n")
        monkeypatch.setattr(node_disk, "_BOOT_ID", tmp_path / "boot_id")
        folders.append(kernel_variables({}, instead=tmp_path)["TORCHINDUCTOR_CACHE_DIR"])
    assert folders[0] == folders[2] != folders[1]


def test_what_a_person_has_set_stays(tmp_path: Path, temporary: Path) -> None:
    variables = kernel_variables({"TORCHINDUCTOR_CACHE_DIR": "/scratch/mine"}, instead=tmp_path)
    assert set(variables) == {"TRITON_CACHE_DIR", "QUACK_CACHE_DIR"}
    assert variables["TRITON_CACHE_DIR"].startswith(f"{temporary}/")


def test_what_came_from_another_node_is_chosen_again(tmp_path: Path, temporary: Path) -> None:
    """A rank there has submitted a job, which gets torch's variables as a person may have set them."""
    there = f"/tmp/slurm_train-{os.geteuid()}.0123456789abcdef/kernels-1c0ffee0/inductor"
    variables = kernel_variables({"TORCHINDUCTOR_CACHE_DIR": there}, instead=tmp_path)
    assert variables["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{temporary}/")


def test_where_names_are_not_kept_the_run_directory_has_the_kernels(tmp_path: Path, temporary: Path) -> None:
    temporary.chmod(0o777)
    variables = kernel_variables({}, instead=tmp_path / "instead")
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "instead" / "inductor")
    assert variables["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"


@pytest.mark.timeout(300)
def test_ranks_and_scripts_do_not_load_kernels_from_a_strangers_folder(tmp_path: Path, temporary: Path) -> None:
    pytest.importorskip("torch")
    make_open(temporary / f"torchinductor_{getpass.getuser()}")
    (tmp_path / "caches.py").write_text(PRINT_CACHES)
    typed = [sys.executable, "-W", "ignore", "-m", "slurm_train", "script=[caches.py]", "run.name=caches"]
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHIND", "TRITON"))}
    env = {**unset, "TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(typed, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
    (line,) = [line.split() for line in done.stdout.splitlines() if line.startswith("caches ")]
    folder = temporary / f"slurm_train-{os.geteuid()}" / KERNELS
    assert line == ["caches", str(folder / "inductor"), str(folder / "triton"), "none"], done.stderr


def make_compiler(folder: Path, name: str) -> dict[str, str]:
    (folder / name).touch(mode=0o755)
    return {"PATH": str(folder)}


@pytest.fixture
def with_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Python's headers in a folder of the test."""
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(headers)})
    return headers


@pytest.mark.parametrize(
    ("program", "on_gpu", "env", "obstacles"),
    [
        ("gcc", True, {}, []),
        ("clang", True, {}, []),
        ("g++", True, {}, ["no C compiler (gcc or clang)"]),
        ("gcc", False, {}, ["no C++ compiler (g++)"]),
        ("g++", False, {}, []),
        ("gcc", True, {"CC": "icx -O2"}, ["no C compiler (CC=icx -O2)"]),
        ("icx", True, {"CC": "icx -O2"}, []),
    ],
)
def test_torch_compiles_with_the_compiler_of_its_kind_of_kernels(
    program: str, on_gpu: bool, env: dict[str, str], obstacles: list[str], tmp_path: Path, with_headers: Path
) -> None:
    assert compile_obstacles({**make_compiler(tmp_path, program), **env}, on_gpu=on_gpu) == obstacles


def test_torch_compiles_only_with_headers_and_a_folder_whose_files_can_be_loaded(
    tmp_path: Path, with_headers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {**make_compiler(tmp_path, "gcc"), "TRITON_CACHE_DIR": str(tmp_path / "cache" / "triton")}
    (with_headers / "Python.h").unlink()
    seen: list[Path] = []

    def noexec(path: Path) -> SimpleNamespace:
        seen.append(path)
        return SimpleNamespace(f_flag=os.ST_NOEXEC)

    monkeypatch.setattr(os, "statvfs", noexec)
    expected = [f"no Python.h in {with_headers}", f"{tmp_path / 'cache' / 'triton'} is mounted noexec"]
    assert compile_obstacles(env, on_gpu=True) == expected
    assert seen == [tmp_path], "the nearest folder that is there"


def test_a_folder_has_room_for_the_sockets_of_multiprocessing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Newer Pythons choose another folder by themselves.
    monkeypatch.delattr(multiprocessing.util, "_get_base_temp_dir", raising=False)
    for length, is_long in ((75, False), (76, True)):
        folder = "/" + "a" * (length - 1)
        with socket.socket(socket.AF_UNIX) as listener, pytest.raises(OSError) as caught:
            listener.bind(f"{folder}/pymp-abcdefgh/listener-abcdefgh")
        assert ("too long" in str(caught.value)) is is_long
        assert has_room_for_sockets(folder) is not is_long
    assert not has_room_for_sockets("/" + "\u00e9" * 40), "bytes count"
    monkeypatch.setattr(multiprocessing.util, "_get_base_temp_dir", lambda _: "/tmp", raising=False)
    assert has_room_for_sockets("/" + "a" * 200)
