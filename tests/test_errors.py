from __future__ import annotations

import pytest

from slurm_train.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, caf\u00e9 \U0001f600\nnext", "plain, caf\u00e9 \U0001f600\nnext"),
        ("\x1b]0;title\x07\x1b[2J", "\\x1b]0;title\\x07\\x1b[2J"),
        ("a\0b\r\u202e\udc80", "a\\x00b\\r\\u202e\\udc80"),
    ],
)
def test_a_message_does_nothing_to_the_terminal_that_shows_it(text: str, shown: str) -> None:
    error = ConfigError(text, hint=text)
    assert (error.message, error.hint) == (shown, shown)
    str(error).encode()
