from __future__ import annotations

from slurm_train.standing.tracebacks import traceback_of, tracebacks

ONE = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    f()
ValueError: no such layer"""
LONG = """\
Traceback (most recent call last):
  File "b.py", line 2, in g
    h()
    ^^^
torch.AcceleratorError: device error
It was reported late.
For debugging, look earlier."""
CHAINED = f"""\
{ONE}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "c.py", line 3, in <module>
RuntimeError: again"""


def test_tracebacks_are_found_between_other_lines() -> None:
    text = f"step 1\n{ONE}\n\nstep 2\n{LONG}\n\nthe end\n"
    assert tracebacks(text) == [ONE, LONG]


def test_chained_ones_belong_together() -> None:
    assert tracebacks(f"x\n{CHAINED}\n") == [CHAINED]


def test_two_without_a_word_between_them_are_two() -> None:
    assert tracebacks(f"{ONE}\n{ONE}\n") == [ONE, ONE]


def test_one_that_was_cut_off_counts() -> None:
    cut = ONE.rpartition("\n")[0]
    assert tracebacks(cut) == [cut] and tracebacks("Traceback of our steps\n") == []


def test_the_one_with_the_message_is_taken_else_the_last() -> None:
    text = f"{LONG}\n\n{ONE}\n\nbye\n"
    assert traceback_of(text, "AcceleratorError: device error") == LONG
    assert traceback_of(text, "KeyError: 'other'") == ONE
    assert traceback_of(text, "") == ONE
    assert traceback_of("nothing\n", "ValueError: x") == ""
