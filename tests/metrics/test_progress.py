"""The display: plain lines in a log, a bar on a terminal, no rich where it is not needed."""

from __future__ import annotations

import io
import subprocess
import sys

from slurm_train.metrics import Display, open_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(display: Display) -> None:
    display.show(12, loss=2.34567, rate=41210.4, unit="tokens", step_time_s=0.25)


def test_a_log_gets_a_line_when_it_is_due() -> None:
    now = [100.0]
    stream = io.StringIO()
    display = Display(stream, max_steps=40, every_s=10, clock=lambda: now[0])
    assert display.due_s == 102.0
    show(display)
    assert display.due_s == 110.0
    assert stream.getvalue() == "step 12/40  loss 2.3457  41,210 tokens/s  00:00:07 left\n"


def test_an_evaluation_that_takes_long_is_shown_and_a_short_one_is_not() -> None:
    now = [100.0]
    stream = io.StringIO()
    display = Display(stream, max_steps=40, every_s=10, clock=lambda: now[0])
    now[0] = 105.0
    display.show_evaluation(40, 100, elapsed_s=9.9)
    assert stream.getvalue() == ""
    now[0] = 120.0
    for num_done in (1000, 1001):
        display.show_evaluation(num_done, 5000, elapsed_s=20)
    assert stream.getvalue() == "evaluating 1,000/5,000 batches  00:01:20 left\n"
    now[0] = 130.0
    display.show_evaluation(1500, 5000, elapsed_s=30)
    assert stream.getvalue().count("\n") == 2


def test_a_bar_shows_an_evaluation_in_its_place() -> None:
    stream = Terminal()
    display = open_display(stream, max_steps=40, env={})
    show(display)
    display.due_s = 0.0
    display.show_evaluation(0, 5000, elapsed_s=20)
    display.close()
    assert "evaluating 0/5,000 batches" in stream.getvalue()


def test_a_terminal_gets_a_bar_and_lines_that_stay() -> None:
    stream = Terminal()
    display = open_display(stream, max_steps=40, env={})
    display.say("before")
    show(display)
    display.say("[held-out] 3.1")
    display.close()
    text = stream.getvalue()
    assert text.startswith("before\n")
    assert "12/40" in text and "41,210 tokens/s" in text and "[held-out] 3.1" in text


def test_neither_rich_nor_torch_is_imported_for_lines() -> None:
    code = (
        "import sys, slurm_train.metrics, slurm_train.metrics as p;"
        "p.open_display(sys.stderr, max_steps=1, env={'TERM': 'dumb'});"
        "assert not {'rich', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
