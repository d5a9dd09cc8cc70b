"""A path is the same file for two processes where both see the same file system and the same place in it."""

from __future__ import annotations

from pathlib import PurePath

import pytest

from slurm_train.mounts import file_at, mount_of

MACHINE = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / /home rw,relatime shared:2 - nfs4 server:/home rw,hard
41 22 254:0 /opt/real /opt/bound rw shared:1 - ext4 /dev/vda rw
"""
CONTAINER = """\
90 1 0:77 / / rw - overlay overlay rw
91 90 0:35 /ada /home/ada rw - nfs4 server:/home rw,hard
92 90 0:78 / /env ro - squashfs /dev/loop0 ro
nonsense
"""


def test_a_file_is_known_by_its_file_system_and_its_place_in_there() -> None:
    assert file_at(PurePath("/opt/bound/python"), MACHINE) == ("254:0", PurePath("/opt/real/python"))
    assert file_at(PurePath("/opt/real/python"), MACHINE) == file_at(PurePath("/opt/bound/python"), MACHINE)
    assert file_at(PurePath("/x"), "") is None


@pytest.mark.parametrize(
    ("path", "is_same"), [("/home/ada/env/bin/python", True), ("/usr/bin/python3", False), ("/env/bin/python", False)]
)
def test_what_a_container_has_of_its_own_is_another_file(path: str, is_same: bool) -> None:
    assert (file_at(PurePath(path), CONTAINER) == file_at(PurePath(path), MACHINE)) == is_same


def test_the_mount_has_its_kind_and_options() -> None:
    mount = mount_of(PurePath("/home/ada"), MACHINE)
    assert mount is not None and (mount.kind, mount.option("hard"), mount.option("soft")) == ("nfs4", "", None)
