from __future__ import annotations

import pytest

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.commands import run_command, succeeds, wait_until


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-program"], "`no-such-program` is not installed"),
        (["sh", "-c", "echo first >&2; echo last >&2; exit 3"], "ended with 3: last"),
        (["sh", "-c", "echo only here; exit 1"], "ended with 1: only here"),
        (["false"], "`false` ended with 1: nothing"),
    ],
)
def test_a_failure_quotes_command_code_and_last_line(words, message):
    with pytest.raises(ClusterError) as caught:
        run_command(words)
    assert caught.value.message.endswith(message) and "`devcluster " in caught.value.hint
    assert not succeeds(words)


def test_a_command_that_hangs_is_given_up():
    with pytest.raises(ClusterError, match="`sleep 9` gave no answer within 0 s"):
        run_command(["sleep", "9"], timeout_s=0.1)


def test_the_callers_environment_stays_outside(monkeypatch):
    monkeypatch.setenv("SLURM_CONF", "/somewhere/else")
    assert "SLURM_CONF" not in run_command(["env"])
    assert "SLURM_CONF=/here" in run_command(["env"], extra={"SLURM_CONF": "/here"}).splitlines()


def test_waiting_ends_at_the_condition_or_the_deadline():
    answers = iter([False, False, True])
    assert wait_until(lambda: next(answers), timeout_s=5, poll_s=0.001)
    assert not wait_until(lambda: False, timeout_s=0.01, poll_s=0.001)
