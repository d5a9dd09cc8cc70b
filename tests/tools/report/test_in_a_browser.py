"""The pages in a real browser: nothing on the console, nobody asked, everything drawn, and what moves does move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_train.tools.report.page import render
from tests.support.browser import Browser, missing_browser, open_browser
from tests.support.documents import HOSTILE
from tests.support.run_documents import document_of, full_document, hostile_document
from tests.support.run_files import ended, steps
from tests.support.sweep_files import sweep_document_of

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        bool(missing_browser()),
        reason=f"a browser test needs {missing_browser()} (apt-get install chromium chromium-driver)",
    ),
]

# The share of the pixels of a plot's canvas that are drawn.
INK = """
const c = document.querySelector(%r + ' canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n / (c.width * c.height);
"""
SHOWN = "return document.body.innerText"
ROWS = "return [...document.querySelectorAll('table.runs tbody tr:not(.off)')].map(r => r.dataset.run)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


def show(browser: Browser, document: dict[str, Any], folder: Path) -> None:
    path = folder / "page.html"
    path.write_text(render(document), encoding="utf-8")
    browser.complaints()
    browser.asked_for(path)
    browser.open(path)
    assert browser.complaints() == []
    assert browser.asked_for(path) == [path.resolve().as_uri()]
    assert "cannot be shown" not in browser.run(SHOWN)


def middle(browser: Browser, selector: str) -> tuple[float, float]:
    """Scrolls to an element and returns the middle of it in the window."""
    return tuple(
        browser.run(
            f"const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2];"
        )
    )


def test_every_figure_of_a_run_is_drawn_and_follows_the_pointer(browser: Browser, tmp_path: Path) -> None:
    show(browser, full_document(tmp_path), tmp_path)
    plots = browser.run("return [...document.querySelectorAll('figure.plot')].map(f => f.id)")
    assert len(plots) == 10
    assert [key for key in plots if browser.run(INK % f"#{key}") < 0.005] == []
    assert browser.run("return document.querySelectorAll('#plot-stragglers path.h4').length") == 1
    assert browser.run("return document.querySelectorAll('.timeline .bar').length") == 3
    assert browser.run("return [...document.querySelectorAll('#plot-loss .mark')].map(m => m.title)") == [
        *("attempt 1", "attempt 2", "hang at step 50")
    ]
    browser.point(*middle(browser, "#plot-loss .u-over"))
    said = browser.run("return document.querySelector('#plot-loss .u-legend').innerText")
    # The middle of steps 1 to 100.
    assert "50" in said and "2.1" in said
    browser.point(*middle(browser, "#plot-stragglers svg"))
    assert "1 on node1\n" in browser.run("return document.getElementById('readout').innerText")


STATES: list[tuple[str, tuple[str, str], dict[str, Any], list[str]]] = [
    ("never begun", ("not started", ""), {}, ["nothing is on record yet", "No attempt has begun yet"]),
    ("queued", ("queued", "waits: Priority"), {}, ["waits: Priority", "queued"]),
    ("one step", ("running", ""), {"ledger": ended(0)[:1], "metrics": steps(1, 1)}, ["1.0 %", "node[1-2]"]),
    ("out of all bounds", ("running", ""), {"metrics": steps(1, 9, loss=1e300, lr=1e-300)}, ["nothing is on record"]),
    ("config of another version", ("running", ""), {"config": None}, ["config.yaml cannot be read"]),
]


@pytest.mark.parametrize(("state", "files", "texts"), [case[1:] for case in STATES], ids=[case[0] for case in STATES])
def test_a_run_in_any_state_is_shown(
    state: tuple[str, str], files: dict[str, Any], texts: list[str], browser: Browser, tmp_path: Path
) -> None:
    show(browser, document_of(tmp_path, *state, **files), tmp_path)
    shown = browser.run(SHOWN)
    assert [text for text in texts if text not in shown] == []


def test_what_a_damaged_file_holds_costs_one_section(browser: Browser, tmp_path: Path) -> None:
    document = full_document(tmp_path)
    document["changes"], document["events"] = [{"names": 1}], [{"event": 3, "time_unix_s": "now", "step": None}]
    path = tmp_path / "page.html"
    path.write_text(render(document), encoding="utf-8")
    browser.open(path)
    assert browser.complaints() == [] and browser.run(SHOWN).count("cannot be shown") == 1


def test_a_brush_keeps_the_runs_that_pass_and_letting_go_brings_all_back(browser: Browser, tmp_path: Path) -> None:
    show(browser, sweep_document_of(tmp_path), tmp_path)
    ink = browser.run(INK % "#plot-runs_loss")
    x, y = middle(browser, ".axis-line[data-axis='0']")
    height = browser.run("return document.querySelector('.axis-line').getBoundingClientRect().height")
    browser.drag((x, y - 0.1 * height), (x, y), (x, y + 0.1 * height))
    assert browser.run(ROWS) == ["1", "4"]
    assert browser.run("return document.getElementById('chosen').textContent") == "2 of 6 runs"
    assert browser.run("return document.querySelectorAll('path.run-line.off').length") == 4
    drawn = "return document.querySelectorAll('#plot-runs_loss .u-legend .u-off').length"
    assert browser.run(drawn) == 3, "of five curves two are left"
    browser.press(x, y + 0.3 * height)
    assert len(browser.run(ROWS)) == 6
    assert browser.run(INK % "#plot-runs_loss") == pytest.approx(ink, abs=0.01)


def test_hostile_texts_are_shown_and_do_nothing(browser: Browser, tmp_path: Path) -> None:
    text = " ".join(HOSTILE) + "</script><script>document.title='taken'</script>"
    show(browser, hostile_document(tmp_path, text), tmp_path)
    assert browser.run("return document.title") != "taken"
    assert browser.run("return document.querySelectorAll('img, main script').length") == 0
    assert text in browser.run("return document.querySelector('h1').textContent")


def test_a_script_that_is_not_ours_is_not_run(browser: Browser, tmp_path: Path) -> None:
    """The policy holds even if a text got through: it is tried with one that did."""
    path = tmp_path / "page.html"
    broken = render(full_document(tmp_path)).replace("<main>", "<main><script>document.title='taken'</script>", 1)
    path.write_text(broken, encoding="utf-8")
    browser.open(path)
    assert browser.run("return document.title") != "taken"
    assert any("Content Security Policy" in text for text in browser.complaints())


def test_a_page_that_asks_somebody_is_found(browser: Browser, tmp_path: Path) -> None:
    path, other = tmp_path / "page.html", "http://127.0.0.1:9/x.png"
    path.write_text(f"<!DOCTYPE html><title>x</title><img src='{other}'>")
    browser.open(path)
    assert other in browser.asked_for(path)
    assert any("ERR_" in text for text in browser.complaints())
