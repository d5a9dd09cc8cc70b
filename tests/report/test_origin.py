from __future__ import annotations

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
