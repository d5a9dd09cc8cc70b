"""Root's daemons read no directory that somebody else prepared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.files import require_own


def test_a_state_directory_of_our_own_is_taken(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    require_own(tmp_path)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_one_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ClusterError, match="others could write"):
        require_own(tmp_path)
    tmp_path.chmod(0o700)


def test_a_link_and_a_foreign_one_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ClusterError, match="others could write"):
        require_own(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, 12345)
        with pytest.raises(ClusterError, match="uid 12345"):
            require_own(tmp_path)
