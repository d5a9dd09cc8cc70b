from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.layout import RunDirectory, require_room


def test_a_path_that_leaves_no_room_for_the_files_is_refused(tmp_path: Path) -> None:
    require_room(RunDirectory(tmp_path / "a" / "b"))
    with pytest.raises(RunError, match=r"the path of the run has \d+ bytes, at most 3840 can be used"):
        require_room(RunDirectory(tmp_path.joinpath(*["x" * 200] * 20) / "a" / "b"))
    with pytest.raises(RunError, match=r"a name in the run's path has 256 bytes, at most 255 can be used"):
        require_room(RunDirectory(tmp_path / ("x" * 256) / "b"))
