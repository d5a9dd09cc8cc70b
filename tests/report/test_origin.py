from __future__ import annotations

from typing import Any

from slurm_train.report.origin import provenance
from tests.support.html_pages import Page


def shown(**facts: object) -> Page:
    return Page(f"<body>{provenance(facts)}</body>")


def test_the_command_can_be_typed_again() -> None:
    page = shown(words=["optim.lr=1e-3", "script=[a b]"])
    assert page.of("code", class_="command")[0].text == "python -m slurm_train optim.lr=1e-3 'script=[a b]'"


def test_a_difference_is_folded_and_its_lines_are_told_apart() -> None:
    page = shown(git_diff="--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old\n+new\n same")
    assert page.of("summary")[0].text == "Uncommitted changes: 6 lines of difference"
    assert [one.text for one in page.of("span", class_="removed")] == ["-old\n"]
    assert [one.text for one in page.of("span", class_="added")] == ["+new\n"]


def test_a_long_difference_is_cut_and_says_where_the_rest_is() -> None:
    page = shown(git_diff="\n".join(f"+line {number}" for number in range(5000)))
    assert "line 2999" in page.text and "line 3000" not in page.text
    assert "2000 more lines in provenance.json" in page.text


def test_facts_that_this_version_does_not_know_are_shown() -> None:
    page = shown(packages=["a==1", "b==2"], gpu="H200", modules={"cuda": "12"}, nothing=None)
    assert "gpuH200" in page.text and "2 lines" in page.text and "a==1\nb==2" in page.text and "cuda 12" in page.text
    assert "nothing" not in page.text


def test_no_provenance_is_said() -> None:
    assert "provenance.json is missing" in shown().text


ENVIRONMENT = {
    "python": "3.11.7",
    "executable": "/venv/bin/python",
    "platform": "Linux 6.1 x86_64",
    "host": "node1",
    "torch": "2.6.0",
    "cuda": "12.8",
    "driver": "550.54",
    "gpus": ["NVIDIA H100"] * 8,
    "slurm": None,
    "packages": {"numpy": "2.1", "mine": "0.1"},
    "sources": {"mine": {"url": "file:///work/mine", "editable": True}},
}


def rows_of(page: Page) -> dict[str, str]:
    names, values = page.of("dt"), page.of("dd")
    return {name.text: value.text for name, value in zip(names, values, strict=True)}


def test_the_environment_is_that_of_the_newest_attempt() -> None:
    origin: dict[str, Any] = {"words": [], "environment": {**ENVIRONMENT, "gpus": []}, "versions": {"torch": "2.6.0"}}
    rows = rows_of(Page(f"<body>{provenance(origin, environment=ENVIRONMENT)}</body>"))
    assert rows["python"] == "3.11.7 /venv/bin/python"
    assert (rows["torch"], rows["GPUs"], rows["driver"]) == ("2.6.0, built for CUDA 12.8", "8 x NVIDIA H100", "550.54")
    assert rows["packages"] == "2 packagesnumpy 2.1\nmine 0.1 (editable, file:///work/mine)"
    assert not {"Slurm", "versions", "environment"} & set(rows)


def test_a_cpu_build_and_another_maker_are_said() -> None:
    for cuda, text in ((None, "2.6.0, built for the CPU"), ("rocm 6.2", "2.6.0, built for rocm 6.2")):
        page = Page(f"<body>{provenance({'words': []}, environment={**ENVIRONMENT, 'cuda': cuda})}</body>")
        assert rows_of(page)["torch"] == text


def test_runs_from_before_there_was_an_environment_show_their_versions() -> None:
    rows = rows_of(shown(words=[], versions={"torch": "2.6.0"}, python="/venv/bin/python"))
    assert (rows["versions"], rows["python"]) == ("torch 2.6.0", "/venv/bin/python")


def test_code_that_lies_elsewhere_is_named_with_its_commit_and_its_changes() -> None:
    folders = [{"path": "/work/lib", "copied_to": "x", "git_commit": "a" * 40, "git_dirty": True, "git_diff": "+z"}]
    elsewhere = [{"path": "/opt/sdk", "packages": ["sdk"], "git_commit": None, "git_dirty": None}]
    page = shown(words=[], folders=folders, elsewhere=elsewhere)
    rows = rows_of(page)
    assert rows["also copied"] == "/work/lib, commit aaaaaaaaaaaa with uncommitted changes"
    assert rows["not copied"] == "/opt/sdk (sdk), not in git"
    assert page.of("summary")[0].text == "Uncommitted changes in /work/lib: 1 lines of difference"
