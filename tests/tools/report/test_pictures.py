"""PNG files of the figures; an error with the remedy where matplotlib is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.tools.report.page import Curve, plot
from slurm_train.tools.report.pictures import write_pictures
from tests.support.extras import NEEDS_MATPLOTLIB
from tests.support.run_documents import document_of, full_document
from tests.support.sweep_files import sweep_document_of

pytestmark = NEEDS_MATPLOTLIB


def has_drawing(path: Path) -> bool:
    from matplotlib import image

    return len({tuple(pixel) for row in image.imread(path)[::3, ::3] for pixel in row}) > 5


def test_the_figures_of_a_run_and_of_a_sweep_are_written(tmp_path: Path) -> None:
    paths = write_pictures(full_document(tmp_path / "run"), tmp_path / "a" / "png")
    assert {"loss", "rank_step_time", "stragglers", "timeline", "saves"} <= {path.stem for path in paths}
    paths += write_pictures(sweep_document_of(tmp_path / "sweep"), tmp_path / "png")
    assert [path.name for path in paths[-4:]] == ["best.png", "runs_loss.png", "runs_eval_loss.png", "parallel.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and has_drawing(path) for path in paths)


def test_a_run_without_anything_has_no_picture_and_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    assert write_pictures(document_of(tmp_path, "not started"), tmp_path / "png") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/png cannot be written: Not a directory\nhint: name another folder"):
        write_pictures(full_document(tmp_path / "run"), tmp_path / "file" / "png")


def test_no_window_system_is_looked_for_and_a_name_is_no_formula(tmp_path: Path) -> None:
    before = set(sys.modules)
    block = plot("../a", r"$\frac{1}{0$", [Curve(name=r"$\frac{1}{0$", x=[1], y=[1]), Curve(name="b", x=[1], y=[3])])
    (path,) = write_pictures({"plots": {"a": [block]}}, tmp_path)
    assert path == tmp_path / ".._a.png" and has_drawing(path)
    assert "matplotlib.pyplot" not in set(sys.modules) - before
