from __future__ import annotations

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.teardown import tear_down


def test_nothing_to_remove_is_said(tmp_path):
    assert tear_down(tmp_path / "never") is False


def test_a_directory_that_is_not_ours_stays(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ClusterError, match="is not the state of a cluster; nothing removed"):
        tear_down(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
