"""PNG files of the plots; a clear word where matplotlib is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slurm_train.errors import ConfigError, RunError
from slurm_train.report.pictures import require_matplotlib, write_run_pictures, write_sweep_pictures
from slurm_train.report.plot import Plot
from slurm_train.report.record import Verdict
from tests.report.test_run_page import full, record_of
from tests.support.sweep_files import sweep_record


def distinct_colours(path: Path) -> int:
    image = pytest.importorskip("matplotlib.image", reason="matplotlib is not installed")
    pixels = image.imread(path)
    return len({tuple(pixel) for row in pixels[::3, ::3] for pixel in row})


def test_the_plots_of_a_run_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths = write_run_pictures(full(tmp_path), tmp_path / "a" / "png")
    names = [path.stem for path in paths]
    assert {"loss", "lr", "tokens_per_s", "mfu", "rank_step_time", "saves", "timeline"} <= set(names)
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
    assert all(distinct_colours(path) > 5 for path in paths if path.stem in ("loss", "timeline", "rank_step_time"))


def test_the_plots_of_a_sweep_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    paths = write_sweep_pictures(sweep_record(tmp_path), tmp_path / "png")
    assert [path.name for path in paths] == ["best.png", "runs_loss.png", "runs_eval_loss.png", "parallel.png"]
    assert distinct_colours(paths[-1]) > 5


def test_a_run_without_anything_has_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert write_run_pictures(record_of(tmp_path, Verdict("not started")), tmp_path / "png") == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"file/png cannot be written: Not a directory\nhint: name another folder"):
        write_run_pictures(full(tmp_path), tmp_path / "file" / "png")


def test_without_matplotlib_the_hint_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"(?s)--png needs matplotlib, which is not installed here.*pip install"):
        require_matplotlib()


def test_no_window_system_is_looked_for() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from slurm_train.report.curve import Curve
    from slurm_train.report.pictures import draw

    before = set(sys.modules)
    name = r"$\frac{1}{0$"
    figure = draw(
        Plot(key="a", title="A", curves=[Curve(name=name, x=[1, 2], y=[1, 2]), Curve(name="b", x=[1], y=[3])])
    )
    assert type(figure.canvas).__name__ == "FigureCanvasAgg"
    figure.canvas.draw()
    assert "matplotlib.pyplot" not in set(sys.modules) - before
