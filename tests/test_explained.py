"""An error and a status say which section of the documentation explains them, and no section that does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.explained import PAGE, address_of, anchor, headings_of, with_address

REPOSITORY = Path(__file__).resolve().parents[1]
HEADINGS = headings_of((REPOSITORY / PAGE).read_text(encoding="utf-8"))


def test_every_section_is_found_by_its_own_message() -> None:
    missed = {
        heading: address_of(heading.replace("...", "17"))
        for heading in HEADINGS
        if address_of(heading.replace("...", "17")) != f"{PAGE}#{anchor(heading)}"
    }
    assert len(HEADINGS) > 100
    assert missed == {}


def test_the_list_that_ships_is_that_of_the_page() -> None:
    shipped = (REPOSITORY / "slurm_train" / "explained.txt").read_text(encoding="utf-8")
    assert shipped.splitlines() == HEADINGS


@pytest.mark.parametrize(
    ("message", "section"),
    [
        ("gpt/2026-11-29_a is active already: Slurm job 12, running", "is-active-already-slurm-job"),
        ("2 of 16 ranks did not connect to node1:29500 within 60 s: missing 3, 4; connected: 0", "of-ranks-did-not"),
        ("the program ended with 0 at step 6 of 300", "the-program-ended-with-0"),
        ("optim.lr must be above 0, got -1", "must-be-got"),
        ("the tokenizer has no word for this text", ""),
        ("DISK_FULL node3: 2 MiB left; free some (docs/troubleshooting.md#disk_full)", ""),
    ],
)
def test_a_message_leads_to_its_section_alone(message: str, section: str) -> None:
    found = address_of(message)
    assert found.startswith(f"{PAGE}#{section}") if section else found == ""


def test_a_hint_that_names_its_section_is_left_as_it_is() -> None:
    text = "run a is active already: Slurm job 1, running\nhint: see docs/troubleshooting.md#runs"
    assert with_address(text, text) == text


def test_the_command_line_prints_the_address(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slurm_train", "logs", "no-such-run", "--root", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"({PAGE}#no-run-matches)" in done.stderr
