"""Python's packages on the nodes' own disks: the script that the nodes run, under a fake srun on two nodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slurm_train.supervise.staging import stage_python

NODES = ("node1", "node2")
# Each node has a disk of its own: the folder that is asked for, below the node's name.
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
folder=$5
for node in node1 node2; do
  SLURMD_NODENAME=$node "${@:1:4}" "$DISKS/$node" "${@:6}"
done
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A Python with one installed package, and two nodes; returns the job's environment."""
    package = tmp_path / "env" / "site-packages" / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("x = 1\n")
    (package / "data").symlink_to("__init__.py")
    monkeypatch.setattr(sys, "path", ["", str(package.parent), str(tmp_path / "gone" / "site-packages")])
    for node in NODES:
        (tmp_path / node).mkdir()
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(SRUN)
    srun.chmod(0o755)
    (tmp_path / "runs").mkdir()
    return {"PATH": f"{srun.parent}:/usr/bin:/bin", "DISKS": str(tmp_path)}


def stage(site: dict[str, str]) -> dict[str, str]:
    return stage_python("/disk", Path(site["DISKS"]) / "runs", NODES, site)


def places(site: dict[str, str]) -> list[Path]:
    return [place for node in NODES for place in Path(site["DISKS"]).glob(f"{node}/slurm_train_{os.getuid()}/*")]


def test_every_node_gets_a_copy_once(site: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = stage(site)
    assert found["SLURM_TRAIN_STAGE"].startswith(f"/disk/slurm_train_{os.getuid()}/")
    assert "on 2 of 2 nodes" in capsys.readouterr().err
    assert len(places(site)) == 2
    for place in places(site):
        copied = Path(f"{place}{site['DISKS']}/env/site-packages/mine")
        assert (copied / "__init__.py").read_text() == "x = 1\n" and (copied / "data").is_symlink()
        (copied / "mark").touch()
    assert stage(site) == found and len(places(site)) == 2, "what is there is used again"
    (Path(site["DISKS"]) / "env" / "site-packages" / "mine" / "__init__.py").write_text("x = 12\n")
    changed = stage(site)
    assert changed != found and len(places(site)) == 4


def test_a_node_that_cannot_unpack_imports_as_before(site: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = stage(site)
    (archive,) = (Path(site["DISKS"]) / "runs").glob(".environments_*/*.tar")
    archive.write_bytes(archive.read_bytes()[:700])
    place = next(place for place in places(site) if "node2" in str(place))
    place.rename(Path(site["DISKS"]) / "elsewhere")
    assert stage(site) == found, "the other node has its copy"
    said = capsys.readouterr().err
    assert "node2 (1 of 2) could not unpack" in said and "tar: " in said
    assert [place for place in places(site) if "node2" in str(place)] == [], "nothing half unpacked is left"


@pytest.mark.parametrize("what", ["writable by others", "a link"])
def test_a_folder_that_others_can_fill_is_not_used(
    site: dict[str, str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    top = Path(site["DISKS"]) / "node2" / f"slurm_train_{os.getuid()}"
    if what == "a link":
        (Path(site["DISKS"]) / "theirs").mkdir()
        top.symlink_to(Path(site["DISKS"]) / "theirs")
    else:
        top.mkdir()
        top.chmod(0o777)
    assert stage(site) == {}
    assert "node2 (1 of 2) have a folder of another user" in capsys.readouterr().err


def test_an_archive_folder_of_somebody_else_is_not_read(site: dict[str, str]) -> None:
    folder = Path(site["DISKS"]) / "runs" / f".environments_{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    assert stage(site) == {} and list(folder.iterdir()) == []
