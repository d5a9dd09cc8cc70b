"""The pages in a real browser: nothing on the console, nobody asked, and the parts that move do move."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.report.run_page import run_page
from slurm_train.report.sweep_page import sweep_page
from tests.report.test_markup import HOSTILE
from tests.report.test_run_page import full, hostile_record
from tests.support.browser import Browser, missing_browser, open_browser
from tests.support.sweep_files import sweep_record

pytestmark = pytest.mark.skipif(
    bool(missing_browser()),
    reason=f"a browser test needs {missing_browser()} (apt-get install chromium chromium-driver)",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


def show(browser: Browser, text: str, folder: Path) -> None:
    path = folder / "page.html"
    path.write_text(text, encoding="utf-8")
    browser.complaints()
    browser.asked_for(path)
    browser.open(path)
    assert browser.complaints() == []
    assert browser.asked_for(path) == [path.resolve().as_uri()]


def middle(browser: Browser, selector: str) -> tuple[float, float]:
    """Scrolls to an element and returns the middle of it in the window."""
    return tuple(
        browser.run(
            f"const e = document.querySelector({selector!r}); e.scrollIntoView({{block: 'center'}});"
            "const r = e.getBoundingClientRect(); return [r.left + r.width / 2, r.top + r.height / 2];"
        )
    )


def shades(png: bytes) -> int:
    """Returns how many different rows of pixels a picture has: 1 for an empty page."""
    place, data = 8, b""
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            data += png[place + 8 : place + 8 + length]
        place += length + 12
    width = struct.unpack(">I", png[16:20])[0]
    raw = zlib.decompress(data)
    size = len(raw) // struct.unpack(">I", png[20:24])[0]
    assert size > width
    return len({raw[start : start + size] for start in range(0, len(raw), size)})


def test_a_runs_page_is_drawn_and_follows_the_pointer(browser: Browser, tmp_path: Path) -> None:
    show(browser, run_page(full(tmp_path)), tmp_path)
    assert shades(browser.picture()) > 100
    x, y = middle(browser, "#plot-loss .frame-0 .area")
    browser.point(x, y)
    said = browser.run("const r = document.getElementById('readout'); return r.hidden ? '' : r.innerText;")
    # The middle of steps 1 to 100 on an axis without room at its ends.
    assert said.split("\n")[:2] == ["step", "50"] or said.split("\n")[:2] == ["step", "51"]
    assert "training" in said
    browser.point(5, 5)
    assert browser.run("return document.getElementById('readout').hidden && !document.querySelector('.cross')")


def test_the_other_scale_is_shown_when_it_is_picked(browser: Browser, tmp_path: Path) -> None:
    show(browser, run_page(full(tmp_path)), tmp_path)
    shown = (
        "return [...document.querySelectorAll('#plot-loss .frame')].map(f => getComputedStyle(f).display !== 'none')"
    )
    assert browser.run(shown) == [True, False]
    browser.press(*middle(browser, "#plot-loss .switch label:last-child"))
    assert browser.run(shown) == [False, True]


def test_a_table_is_sorted_both_ways_and_what_is_missing_stays_last(browser: Browser, tmp_path: Path) -> None:
    show(browser, sweep_page(sweep_record(tmp_path)), tmp_path)
    column = "return [...document.querySelectorAll('table.runs tbody tr')].map(r => r.dataset.run)"
    place = "table.runs th:nth-child(6) button"
    browser.press(*middle(browser, place))
    assert browser.run(column)[:3] == ["1", "2", "0"]
    browser.press(*middle(browser, place))
    assert browser.run(column)[:3] == ["0", "2", "1"]
    assert set(browser.run(column)[3:]) == {"3", "4", "5"}


def test_a_brush_keeps_the_runs_that_pass_and_letting_go_brings_all_back(browser: Browser, tmp_path: Path) -> None:
    show(browser, sweep_page(sweep_record(tmp_path)), tmp_path)
    kept = "return [...document.querySelectorAll('table.runs tbody tr:not(.off)')].map(r => r.dataset.run)"
    x, y = middle(browser, ".axis-line[data-axis='0']")
    height = browser.run("return document.querySelector('.axis-line').getBoundingClientRect().height")
    browser.drag((x, y - 0.1 * height), (x, y), (x, y + 0.1 * height))
    assert browser.run(kept) == ["1", "4"]
    assert browser.run("return document.getElementById('chosen').textContent") == "2 of 6 runs"
    assert browser.run("return document.querySelectorAll('path.curve.off').length") > 0
    browser.press(x, y + 0.3 * height)
    assert len(browser.run(kept)) == 6


def test_a_row_lights_its_line(browser: Browser, tmp_path: Path) -> None:
    show(browser, sweep_page(sweep_record(tmp_path)), tmp_path)
    browser.point(*middle(browser, "table.runs tbody tr[data-run='2']"))
    assert browser.run("return [...document.querySelectorAll('path.run-line.hot')].map(p => p.dataset.run)") == ["2"]


def test_a_search_keeps_the_rows_that_have_it(browser: Browser, tmp_path: Path) -> None:
    show(browser, sweep_page(sweep_record(tmp_path)), tmp_path)
    browser.run("const f = document.getElementById('find'); f.value = 'zerodiv'; f.dispatchEvent(new Event('input'));")
    assert browser.run(
        "return [...document.querySelectorAll('table.runs tbody tr:not(.off)')].map(r => r.dataset.run)"
    ) == ["3"]


def test_the_theme_is_chosen_by_a_button(browser: Browser, tmp_path: Path) -> None:
    show(browser, run_page(full(tmp_path)), tmp_path)
    paper = "return getComputedStyle(document.body).backgroundColor"
    before = browser.run(paper)
    browser.press(*middle(browser, "#theme"))
    assert browser.run(paper) != before


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(width: int, browser: Browser, tmp_path: Path) -> None:
    browser.call("POST", "/window/rect", {"width": width, "height": 1200})
    try:
        for text in (run_page(full(tmp_path / "a")), sweep_page(sweep_record(tmp_path / "b"))):
            show(browser, text, tmp_path)
            wide, seen = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide <= seen
    finally:
        browser.call("POST", "/window/rect", {"width": 1280, "height": 1600})


def test_hostile_texts_do_nothing(browser: Browser, tmp_path: Path) -> None:
    text = " ".join(one for one in HOSTILE if "/" not in one) + "</script><script>document.title='taken'</script>"
    show(browser, run_page(hostile_record(tmp_path, text)), tmp_path)
    assert browser.run("return document.title") != "taken"
    assert browser.run("return document.querySelectorAll('img, main script:not([type])').length") == 0


def test_a_script_that_is_not_ours_is_not_run(browser: Browser, tmp_path: Path) -> None:
    """The policy holds even if a text got through: it is tried with one that did."""
    path = tmp_path / "page.html"
    broken = run_page(full(tmp_path)).replace("<main>", "<main><script>document.title='taken'</script>", 1)
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
