"""The pages in a real browser: nothing on the console, nobody asked, everything drawn, and what moves does move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_train.tools.report.page import render
from tests.support.browser import Browser, missing_browser, open_browser
from tests.support.documents import HOSTILE
from tests.support.run_documents import SLOW, document_of, full_document, hostile_document
from tests.support.run_files import ended, steps
from tests.support.sweep_files import sweep_document_of

pytestmark = pytest.mark.skipif(
    bool(missing_browser()),
    reason=f"a browser test needs {missing_browser()} (apt-get install chromium chromium-driver)",
)

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


def test_a_finished_run_shows_everything_that_is_on_record(browser: Browser, tmp_path: Path) -> None:
    show(browser, full_document(tmp_path), tmp_path)
    browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    shown = browser.run(SHOWN)
    texts = (
        *("rank 5 hangs", "rank 1: Killed", "no space left", "1 failed", "with uncommitted changes", "node[1-2]"),
        *("21 lines of metrics.jsonl are superseded", f"{SLOW.sentence}. {SLOW.advice}", "36 %", "30 s"),
        *("python -m slurm_train optim.lr=1e-3", "Uncommitted changes: 3 lines", "goodput\n60 %", "eval loss\n1.5"),
    )
    assert [text for text in texts if text not in shown] == []
    origin = {
        "words": ["script=[a b]"],
        "cluster": "H200",
        "none": None,
        "modules": {"cuda": "12"},
        "folders": [{"path": "/work/lib", "git_commit": "a" * 40, "git_dirty": True, "git_diff": "+z"}],
        "elsewhere": [{"path": "/opt/sdk", "packages": ["sdk"], "git_commit": None, "git_dirty": None}],
    }
    packages = {"numpy": "2.1", "mine": "0.1"}
    sources = {"mine": {"url": "file:///work/mine", "editable": True}}
    environment = {"torch": "2.6.0", "cuda": "12.8", "gpus": ["H100"] * 8, "packages": packages, "sources": sources}
    show(browser, document_of(tmp_path / "other", provenance=origin) | {"environment": environment}, tmp_path)
    browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    shown = browser.run(SHOWN)
    texts = (
        *("python -m slurm_train 'script=[a b]'", "/work/lib, commit aaaaaaaaaaaa with uncommitted changes"),
        *("/opt/sdk (sdk), not in git", "2.6.0, built for CUDA 12.8", "8 x H100", "H200", "modules: 1 lines"),
        *("mine 0.1 (editable, file:///work/mine)", "Uncommitted changes in /work/lib: 1 lines"),
    )
    assert [text for text in texts if text not in shown] == []


STATES: list[tuple[str, tuple[str, str], dict[str, Any], list[str]]] = [
    ("never begun", ("not started", ""), {}, ["nothing is on record yet", "No attempt has begun yet"]),
    ("queued", ("queued", "waits: Priority"), {}, ["waits: Priority", "queued"]),
    ("only starting", ("running", ""), {"ledger": ended(0)[:1]}, ["nothing is on record yet", "not accounted for"]),
    ("one step", ("running", ""), {"ledger": ended(0)[:1], "metrics": steps(1, 1)}, ["1.0 %", "node[1-2]"]),
    ("failed", ("failed", "rank 3: ZeroDivisionError"), {"metrics": steps(1, 3)}, ["rank 3: ZeroDivisionError"]),
    ("no loss", ("failed", ""), {"metrics": [*steps(1, 2), *steps(3, 3, loss=None, grad_norm=None)]}, ["Loss"]),
    ("code of one's own", ("finished", ""), {"ledger": ended(0), "max_steps": None}, ["finished"]),
    ("on nodes", ("running", ""), {"ledger": ended(0)[:1], "nodelist": "node[1-4]"}, ["on node[1-4]"]),
    ("zero and below", ("running", ""), {"metrics": steps(1, 9, loss=0.0, lr=0.0, grad_norm=-1.0)}, ["Loss"]),
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


def test_a_run_of_a_sweep_that_failed_is_named_with_its_reason(browser: Browser, tmp_path: Path) -> None:
    show(browser, sweep_document_of(tmp_path), tmp_path)
    assert browser.run("return [...document.querySelectorAll('.failures td')].map(d => d.innerText)") == [
        *("3", "failed", "rank 3 on node2: ZeroDivisionError", "0.001", "1")
    ]
    assert browser.run(
        "return [...document.querySelectorAll('h1 .chip')].map(c => c.className + ':' + c.innerText)"
    ) == [*("chip good:3 finished", "chip bad:1 failed", "chip busy:1 running", "chip calm:1 not started")]
    heads = browser.run("return [...document.querySelectorAll('table.runs th')].map(h => h.innerText)")
    assert heads[:6] == ["run", "id", "optim.lr", "seed", "state", "best eval loss"]
    show(browser, sweep_document_of(tmp_path / "none", ()), tmp_path)
    assert "The runs differ in nothing" in browser.run(SHOWN)


def test_the_other_scale_is_drawn_when_it_is_picked(browser: Browser, tmp_path: Path) -> None:
    show(browser, full_document(tmp_path), tmp_path)
    switch = "return document.querySelector('#plot-loss .switch').textContent"
    assert browser.run(switch) == "linear"
    browser.press(*middle(browser, "#plot-loss .switch"))
    assert browser.run(switch) == "log" and browser.run(INK % "#plot-loss") > 0.005


def test_a_table_is_sorted_both_ways_and_what_is_missing_stays_last(browser: Browser, tmp_path: Path) -> None:
    show(browser, sweep_document_of(tmp_path), tmp_path)
    place = "table.runs th:nth-child(6) button"
    browser.press(*middle(browser, place))
    assert browser.run(ROWS)[:3] == ["1", "2", "0"]
    browser.press(*middle(browser, place))
    assert browser.run(ROWS)[:3] == ["0", "2", "1"]
    assert set(browser.run(ROWS)[3:]) == {"3", "4", "5"}


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


def test_a_row_lights_its_line_and_a_search_keeps_the_rows_that_have_it(browser: Browser, tmp_path: Path) -> None:
    show(browser, sweep_document_of(tmp_path), tmp_path)
    browser.point(*middle(browser, "table.runs tbody tr[data-run='2']"))
    assert browser.run("return [...document.querySelectorAll('path.run-line.hot')].map(p => p.dataset.run)") == ["2"]
    browser.run("const f = document.getElementById('find'); f.value = 'zerodiv'; f.dispatchEvent(new Event('input'));")
    assert browser.run(ROWS) == ["3"]


def test_the_theme_is_chosen_by_a_button_and_paper_is_white(browser: Browser, tmp_path: Path) -> None:
    show(browser, full_document(tmp_path), tmp_path)
    theme = "return document.documentElement.dataset.theme"
    assert browser.run(theme) == "light"
    browser.press(*middle(browser, "#theme"))
    assert browser.run(theme) == "dark"
    folds = "return document.querySelectorAll('details[open]').length"
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    assert browser.run(theme) == "light" and browser.run(folds) > 2
    browser.run("window.dispatchEvent(new Event('afterprint'))")
    assert browser.run(theme) == "dark" and browser.run(folds) == 0


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_window(width: int, browser: Browser, tmp_path: Path) -> None:
    browser.call("POST", "/window/rect", {"width": width, "height": 1200})
    try:
        for document in (full_document(tmp_path / "a"), sweep_document_of(tmp_path / "b")):
            show(browser, document, tmp_path)
            wide, seen = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide <= seen
    finally:
        browser.call("POST", "/window/rect", {"width": 1280, "height": 1600})


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
