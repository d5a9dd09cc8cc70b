"""The documentation tells the truth: commands parse, links lead somewhere, quoted messages exist, tables are whole."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple, get_args, get_origin

import pytest
import yaml

from slurm_train import __version__
from slurm_train.config.compose import Composer, Point, compose, read_points
from slurm_train.config.schema import RunConfig, all_keys
from slurm_train.config.synonyms import advise
from slurm_train.config.words import Words, read_words
from slurm_train.errors import SlurmTrainError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import Element
from slurm_train.slurm.queue_view import KnownJobs
from slurm_train.status.run_status import RunState, read_files, status_of
from slurm_train.tools.doctor import node_rules, site_rules
from slurm_train.tools.scaling.series import read_series
from slurm_train.verbs import PUBLIC_VERBS, parse
from tests.support.browser import missing_browser, open_browser
from tests.support.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "llms.txt")]
    + list((REPOSITORY / "docs").glob("*.md"))
    + list((REPOSITORY / "examples").glob("*.md"))
)
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
COMMAND = "python -m slurm_train"
# Composed by Hydra, not read by argparse.
SETTINGS = (None, "plan", "write")


class Command(NamedTuple):
    """A command line in the documentation."""

    source: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.source}: {shlex.join(self.words)}"


def commands_in(text: str, *, source: str) -> Iterator[Command]:
    """Yields the command lines of code blocks and of docstrings: whole lines, a prompt or a remark aside."""
    for line in text.replace("\\\n", " ").splitlines():
        bare = line.strip().removeprefix("$ ").partition("  (")[0]
        if bare.startswith(COMMAND):
            words = shlex.split(bare.removeprefix(COMMAND), comments=True)
            # On another machine the words are the same.
            yield Command(source, tuple(words[2:] if words[:1] == ["--on"] else words))


def all_commands() -> list[Command]:
    """Returns every command line once."""
    found: dict[tuple[str, ...], Command] = {}
    for path in (*PAGES, *EXAMPLES):
        source = path.name
        for command in commands_in(path.read_text(encoding="utf-8"), source=source):
            found.setdefault(command.words, command)
    return list(found.values())


def verb_of(words: tuple[str, ...]) -> str | None:
    return words[0] if words and words[0] in PUBLIC_VERBS else None


def check(command: Command, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Raises what the words would have raised before anything happened."""
    verb = verb_of(command.words)
    rest = list(command.words[1:] if verb else command.words)
    if verb is None or verb in SETTINGS:
        flags = read_words(rest)
        if flags.config_dir is not None:
            (folder / flags.config_dir).mkdir(exist_ok=True)
        _write_sites(flags, monkeypatch, folder)
        for point in read_points(flags) if flags.multirun else [Point(tuple(flags.overrides), {})]:
            words = replace(flags, overrides=list(point.overrides))
            if has_shipped_files_only(words):
                composer_of_shipped_files().compose(words.overrides)
            else:
                compose(words)
        return
    if verb == "scaling":
        asked = parse(verb, rest)
        read_series(read_words(asked.settings), steps=asked.steps, env={}, cwd=folder)
    elif "--help" in rest:
        with pytest.raises(SystemExit, match="0"):
            parse(verb, rest)
    else:
        parse(verb, rest)


def has_shipped_files_only(words: Words) -> bool:
    """Tells whether the words name no place for configurations and no site."""
    if words.config_dir or words.config_path or words.search_path or words.config_name != Words().config_name:
        return False
    return not any(word.lstrip("+").startswith("site=") for word in words.overrides)


@functools.cache
def composer_of_shipped_files() -> Composer:
    """One for all command lines, as for all points of a sweep: it reads each choice of groups once."""
    return Composer(Words())


def _write_sites(flags: Words, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Puts the site files that the words choose into a home of the test's own: they are a person's."""
    monkeypatch.setenv("HOME", str(folder))
    for name in (word.partition("=")[2] for word in flags.overrides if word.lstrip("+").startswith("site=")):
        path = folder / ".config" / "slurm_train" / "site" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("cluster: {partition: gpu}\n")


@pytest.mark.parametrize("command", all_commands(), ids=str)
def test_a_command_line_in_the_documentation_is_accepted(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    check(command, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        f"    {COMMAND} +cluster=4x8 optim.lrr=1",
        f"$ {COMMAND} stats",
        f"{COMMAND} model=gtp  # no such model",
        f"    {COMMAND} logs --attempt x",
        f"    {COMMAND} devcluster sideways",
        f"    {COMMAND} scaling +cluster=4x8 optim.lrr=1",
    ],
)
def test_a_wrong_command_line_is_found(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (command,) = commands_in(line, source="a page")
    with pytest.raises((SlurmTrainError, SystemExit)):
        check(command, monkeypatch, tmp_path)


def test_the_pages_hold_command_lines() -> None:
    verbs = {verb_of(command.words) for command in all_commands()}
    assert verbs >= {None, *PUBLIC_VERBS}


def broken_links(path: Path, text: str) -> list[str]:
    """Returns the relative links of a page that lead nowhere, headings included."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        other = (path.parent / name).resolve() if name else path
        if not other.exists() or (anchor and anchor not in _anchors(other)):
            found.append(target)
    return found


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


def torn_tables(text: str) -> list[str]:
    """Returns the first line of each table that has no head, or a row with more or fewer cells than its head."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", f"{text}\n", re.MULTILINE):
        rows = block.splitlines()
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in rows}
        if len(rows) < 2 or not re.fullmatch(r"[|:\- ]+", rows[1]) or len(widths) > 1:
            found.append(rows[0])
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_table_is_whole(path: Path) -> None:
    assert torn_tables(path.read_text(encoding="utf-8")) == []


def test_a_torn_table_is_found() -> None:
    whole = "| a | b |\n|---|--:|\n| 1 | `x\\|y` |\n"
    assert torn_tables(whole) == []
    assert torn_tables(whole + "\n| 2 | 3 |\n") == ["| 2 | 3 |"]
    assert torn_tables(whole + "| 2 |\n") == ["| a | b |"]


def test_a_broken_link_is_found() -> None:
    page = REPOSITORY / "docs" / "slurm.md"
    text = "[a](design.md) [b](nowhere.md) [c](design.md#layers) [d](https://example.org/x) [e](#the-environment)"
    assert broken_links(page, text) == ["nowhere.md", "design.md#layers"]


def pages_in_nav(text: str) -> list[str]:
    """Returns the pages that the site's navigation names, in its order."""
    return re.findall(r"^\s+- (?:[^:\n]+: )?([\w-]+\.md)$", text.partition("\nnav:")[2], re.MULTILINE)


def test_the_navigation_names_every_page_once() -> None:
    hooks = load_module("site_hooks")
    named = pages_in_nav((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [path.name for path in (REPOSITORY / "docs").glob("*.md")] + list(hooks.ELSEWHERE)
    assert sorted(named) == sorted(pages), "mkdocs.yml names other pages than there are"


def test_a_page_that_the_navigation_lacks_is_found() -> None:
    assert pages_in_nav("x: 1\nnav:\n  - Start:\n      - index.md\n      - Names: a-b.md\n") == ["index.md", "a-b.md"]


def test_links_lead_to_pages_of_the_site() -> None:
    hooks = load_module("site_hooks")
    for page, source in hooks.ELSEWHERE.items():
        assert (REPOSITORY / source).is_file(), page
    turned = hooks._LINK.sub(
        lambda match: hooks._turned(match, Path("docs")), "[a](../examples/README.md#x) [b](slurm.md)"
    )
    assert turned == "[a](examples.md#x) [b](slurm.md)"
    turned = hooks._LINK.sub(
        lambda match: hooks._turned(match, Path()), "[a](docs/slurm.md) [b](LICENSE) [c](nowhere.md)"
    )
    assert turned == "[a](slurm.md) b [c](nowhere.md)", "mkdocs finds what leads nowhere"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it; nine seconds on two busy cores."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install '.[docs]'")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert len(pages) > 20
    loaded = [url for text in pages for url in re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"([^\"]+)", text)]
    assert loaded and [url for url in loaded if re.match(r"(?:https?:)?//", url)] == []


# Common words alone, which the search leaves out; with the values that stand in the message they are found.
COMMON_WORDS = {
    "is neither a verb nor a setting",
    "there is no configuration",
    "there is no site",
    "cannot be read in a sweep",
    "cannot be in 's value",
    "did not answer in s",
    "has no log yet",
    "is a link to which is not there",
    "must be got",
    "accept there is no such key",
    "is not a folder on this node",
    "it must be a folder that only you",
    "does not see the files of in the",
}


def first_words(heading: str) -> str:
    """Returns what a person would type of a message: its first words, without the values."""
    return " ".join(re.sub(r"[`;:,()]|[.]{3}|--", " ", heading).split()[:8])


def is_shown(links: list[str], anchor: str) -> bool:
    """Returns whether the first results of a search show a section of the page of messages."""
    return any(link.partition("/troubleshooting.html")[2].endswith(anchor) for link in links)


@pytest.mark.full
@pytest.mark.skipif(bool(missing_browser()), reason=f"{missing_browser()}: apt-get install chromium chromium-driver")
def test_the_search_finds_the_section_of_every_message_in_the_first_results(site: Path) -> None:
    found = (
        "return [...document.querySelectorAll('.md-search-result__item')].slice(0, 3)"
        ".flatMap(item => [...item.querySelectorAll('a')].slice(1, 4)).map(link => link.href)"
    )
    typed = (
        "const box = document.querySelector('.md-search__input'); box.focus();"
        "box.value = {}; box.dispatchEvent(new Event('keyup'))"
    )
    page = REPOSITORY / "docs" / "troubleshooting.md"
    headings = re.findall(r"^### (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    missed = {}
    with open_browser() as browser:
        browser.open(site / "index.html")
        for heading in (heading for heading in headings if first_words(heading) not in COMMON_WORDS):
            words = first_words(heading)
            browser.run(typed.format(json.dumps(words)))
            section = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
            wanted = f"#{re.sub('-+', '-', section).strip('-')}"
            # Of each result the first link leads to a page, the next three, which are seen, to its sections.
            try:
                wait_for(lambda at=wanted: is_shown(browser.run(found), at), within_s=3, what=words, poll_s=0.05)
            except AssertionError:
                missed[words] = [link.rpartition("/")[2] for link in browser.run(found)]
        assert browser.complaints() == []
    assert missed == {}


@pytest.mark.full
@pytest.mark.skipif(bool(missing_browser()), reason=f"{missing_browser()}: apt-get install chromium chromium-driver")
def test_no_table_is_wider_than_its_page_on_a_phone(site: Path) -> None:
    wide = (
        "return [document.documentElement, ...document.querySelectorAll('.md-typeset__scrollwrap')]"
        ".filter(box => box.scrollWidth > box.clientWidth).map(box => box.innerText.slice(0, 60))"
    )
    phone = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    found = {}
    with open_browser() as browser:
        browser.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": phone})
        for page in sorted(site.glob("*.html")):
            browser.open(page)
            assert browser.run("return document.documentElement.clientWidth") == 400
            if too_wide := browser.run(wide):
                found[page.name] = too_wide
    assert found == {}


def test_cells_break_keys_at_their_dots_and_no_flag_behind_its_dashes() -> None:
    hooks = load_module("site_hooks")
    assert hooks.on_post_page("<td><code>a.b_c=1</code></td><p><code>a.b</code></p>") == (
        "<td><code>a.<wbr>b_<wbr>c=<wbr>1</code></td><p><code>a.b</code></p>"
    )
    assert hooks.on_post_page("<td><code>x --no-kill</code></td>") == (
        '<td><code>x <span class="flag">--no</span>-kill</code></td>'
    )


def load_module(name: str) -> ModuleType:
    """Returns a module of .ci/, which is no package; `make pages` writes its pages and compares them."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_agents_read_names_every_page() -> None:
    writer = load_module("write_agent_pages")
    assert writer.ELSEWHERE == load_module("site_hooks").ELSEWHERE
    listed = re.findall(r"^- \[.+?\]\((.+?)\)", writer.render_llms(), re.MULTILINE)
    pages = {f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md")} - {"docs/index.md"}
    assert sorted(listed) == sorted(pages | {*writer.ELSEWHERE.values()})


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("# A\n\nIt [does](x.md) a\nthing. And more.\n", "It does a thing."),
        ("# A\n\nWritten by `x`.\n\nIt ends here:\n\n    code\n", "It ends here."),
        ("# A\n\n    code\n\nIt does a thing.\n", ""),
        ("# A\n\n## B\n\nIt does a thing.\n", ""),
    ],
)
def test_a_page_is_described_by_its_first_sentence(text: str, summary: str) -> None:
    assert load_module("write_agent_pages")._summary(text) == summary


def test_links_of_what_agents_read_lead_from_the_top() -> None:
    turned = load_module("write_agent_pages")._from_the_top(
        "[a](slurm.md#x) [b](../LICENSE) [c](#y) [d](https://example.org)", page="agents.md"
    )
    assert turned == "[a](docs/slurm.md#x) [b](LICENSE) [c](docs/agents.md#y) [d](https://example.org)"


def test_the_page_of_commands_lists_every_verb() -> None:
    text = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z]+)\b[^|]*\|", text, re.MULTILINE)
    assert set(PUBLIC_VERBS) <= set(listed), set(PUBLIC_VERBS) - set(listed)


def rows_of_table(text: str) -> dict[str, list[str]]:
    """Returns the cells of each row of the tables of a page by their first cell."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_what_readme_says_of_other_tools_is_what_was_measured() -> None:
    peers = rows_of_table((REPOSITORY / "docs" / "peers.md").read_text(encoding="utf-8"))
    measured = dict(zip(peers[""], peers["preempted, 15 s grace"], strict=True))
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    said = rows_of_table(readme.partition("| | after the preemption |")[2].partition("\n\n")[0])
    assert len(said) == 3
    assert said == {tool: [measured[tool]] for tool in said}


def test_readme_shows_every_badge_by_its_title() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for name, picture in load_module("write_badges").badges().items():
        title = re.search(r"<title>(.+)</title>", picture)
        assert title is not None
        assert f"![{title[1]}](docs/images/{name})" in readme


def test_pictures_in_readme_are_there_and_none_is_fetched() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)|(?:src|srcset)=\"([^\"]+)\"", readme)
    assert len(pictures) == 6
    assert [name for pair in pictures for name in pair if name and not (REPOSITORY / name).is_file()] == []


def test_the_citation_names_this_version_and_licence() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == load_module("write_badges").project_value("license")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def rows_under(heading: str, page: str) -> list[tuple[str, str]]:
    """Returns the rows of the table of a section that begin with a word in backticks."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)


def test_the_page_about_watching_has_every_state_and_every_key_of_the_json(tmp_path: Path) -> None:
    docs = REPOSITORY / "docs"
    page = (docs / "watching.md").read_text(encoding="utf-8")
    assert [word for word, _ in rows_under("States", page)] == [state.value for state in RunState]
    run = RunDirectory(tmp_path)
    keys = {*status_of(Element(run=run), read_files(run), KnownJobs(), now_unix_s=0.0).as_json()}
    table = (docs / "status-json.md").read_text(encoding="utf-8")
    rows = {key for key, _ in rows_under("Keys", table)}
    assert (keys - rows, rows - keys) == (set(), set()), "keys without a row, rows without a key"


def values_of_keys() -> dict[str, set[str]]:
    """Returns the values of each key that has few, e.g. {"optim.lr_retune": {"none", "linear", "sqrt"}}."""
    found = dict[str, set[str]]()
    for key, kind in all_keys(RunConfig).items():
        literals = [option for option in (kind, *get_args(kind)) if get_origin(option) is Literal]
        if literals:
            found[key] = {str(value) for literal in literals for value in get_args(literal)}
    return found


def wrong_remarks(text: str) -> list[str]:
    """Returns the lines of a YAML file whose remark, e.g. "# none | linear | sqrt", is not all values of their key."""
    wrong = []
    for line in text.splitlines():
        setting, _, remark = line.partition("#")
        if " | " in remark:
            listed = {re.split(r"[ ;]", value.strip())[0] for value in remark.split(" | ")}
            names = re.findall(r"(\w+):", setting)
            possible = [values for key, values in values_of_keys().items() if key.rpartition(".")[2] in names]
            wrong += [] if listed in possible else [line]
    return wrong


def test_a_remark_beside_a_setting_names_all_of_its_values() -> None:
    paths = [*(REPOSITORY / "conf").rglob("*.yaml")]
    assert [line for path in paths for line in wrong_remarks(path.read_text(encoding="utf-8"))] == []


def test_a_remark_that_lacks_a_value_is_found() -> None:
    assert wrong_remarks("lr_retune: none  # none | linear\nshare: group  # private | group (readable)\n") == [
        "lr_retune: none  # none | linear"
    ]


def test_every_list_of_schedules_has_all_of_them() -> None:
    schedules = values_of_keys()["optim.schedule"]
    optimizers = (REPOSITORY / "docs" / "optimizers.md").read_text(encoding="utf-8").partition("\n## Schedules\n")[2]
    coming_from = (REPOSITORY / "docs" / "coming-from.md").read_text(encoding="utf-8")
    (row,) = [line for line in coming_from.splitlines() if line.startswith("| `lr_scheduler_type` |")]
    assert {*re.findall(r"^\| `(\w+)`", optimizers, re.MULTILINE)} == schedules
    assert schedules <= {*re.findall(r"\w+", row)} & {*re.findall(r"\w+", advise("lr_scheduler_type"))}


@functools.cache
def message_templates() -> list[str]:
    """Returns the texts in the package, values replaced by NUL."""
    found = []
    for path in (REPOSITORY / "slurm_train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def is_said(message: str, templates: list[str]) -> bool:
    """Returns whether some text of the package has the message's words in their order; "..." stands for values."""
    words = [re.escape(part.strip()) for part in message.split("...") if part.strip()]
    pattern = re.compile(".*".join(words), re.DOTALL)
    return any(pattern.search(template) for template in templates)


def test_the_messages_in_troubleshooting_are_those_of_the_package() -> None:
    text = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^### `(.+)`$", text, re.MULTILINE)
    templates = message_templates()
    assert len(quoted) > 20
    assert [message for message in quoted if not is_said(message, templates)] == []


CODES = {*node_rules.HINTS, *node_rules.OTHER_CODES, *site_rules.HINTS}


def code_sections(text: str) -> list[str]:
    """Returns the headings that are codes."""
    return re.findall(r"^### ([A-Z][A-Z_]+)$", text, re.MULTILINE)


def test_every_code_has_a_section_that_its_line_links_to() -> None:
    page = REPOSITORY / "docs" / "troubleshooting.md"
    sections = code_sections(page.read_text(encoding="utf-8"))
    assert ({*CODES} - {*sections}, {*sections} - CODES) == (set(), set()), "without a section, without a rule"
    assert len(sections) == len(CODES)
    assert {code.lower() for code in CODES} <= _anchors(page)


def test_a_code_without_a_section_is_found() -> None:
    assert code_sections("### DISK_FULL\n\n### `a message`\n### GPU_SICK\n") == ["DISK_FULL", "GPU_SICK"]


def test_codes_that_other_rooms_write_are_in_the_registry() -> None:
    # The core cannot import a tool.
    said = {*message_templates()}
    assert {"FS_MISSING", "FS_READONLY", "FS_STALE", "NODE_MISSING", "STEP_REFUSED"} <= {*CODES} & said
    assert any(text.startswith("COLLECTIVE \0: ") for text in said) and "COLLECTIVE" in CODES


def test_a_message_that_nobody_says_is_found() -> None:
    templates = message_templates()
    assert is_said("batch.global_size=... has no sample for each of ...", templates)
    assert not is_said("batch.global_size=... has no sample for any of ...", templates)


def names_imported(path: Path) -> list[tuple[str, str]]:
    """Returns the module and the name of each import from the package in a program."""
    imports = [
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ImportFrom)
    ]
    return [(str(node.module), alias.name) for node in imports for alias in node.names if node.module]


def needs_a_library(path: Path) -> bool:
    """Returns whether a program imports an adapter, and so the library of it, which `make test` does not install."""
    return any(module.startswith("slurm_train.adapters") for module, _ in names_imported(path))


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.name, marks=pytest.mark.full if needs_a_library(path) else ()) for path in EXAMPLES],
)
def test_names_that_an_example_imports_are_there(path: Path) -> None:
    ours = [(module, name) for module, name in names_imported(path) if module.startswith("slurm_train")]
    gone = [(module, name) for module, name in ours if not hasattr(importlib.import_module(module), name)]
    assert [(module, name) for module, name in gone if importlib.util.find_spec(f"{module}.{name}") is None] == []
