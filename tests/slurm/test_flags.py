from __future__ import annotations

import random
import shlex

import pytest

from slurm_train.errors import ConfigError
from slurm_train.slurm.flags import check_env_name, check_env_value, check_flag_name, check_flag_value, flag_word
from tests.support.refusals import refusal


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a\nb", "a line break at character 2 of 'a\\nb' cannot be in a Slurm option's value"),
        ("a\r", "a carriage return at character 2 of 'a\\r' cannot be in a Slurm option's value"),
        ("\0", "a NUL at character 1 of '\\x00' cannot be in a Slurm option's value"),
        ("a\tb", "a tab at character 2 of 'a\\tb' cannot be in a Slurm option's value"),
        ("\x1b[2J", "U+001B at character 1 of '\\x1b[2J' cannot be in a Slurm option's value"),
        ("a\u2028b", "U+2028 at character 2 of 'a\\u2028b' cannot be in a Slurm option's value"),
        ("a\u202eb", "U+202E at character 2 of 'a\\u202eb' cannot be in a Slurm option's value"),
        ("\udc80", "U+DC80 at character 1 of '\\udc80' cannot be in a Slurm option's value"),
        ("a\x85b", "U+0085 at character 2 of 'a\\x85b' cannot be in a Slurm option's value"),
        ("a\\b", "the backslash in 'a\\\\b' cannot be a Slurm option's value"),
    ],
)
def test_flag_values_that_would_not_arrive_are_refused(value: str, message: str) -> None:
    assert refusal(ConfigError, check_flag_value, value).message == message


@pytest.mark.parametrize("name", ["comment", "partition", "job-name", "constraint", "licenses"])
def test_what_slurm_keeps_of_a_job_has_its_limit(name: str) -> None:
    assert flag_word(name, "x" * 1024) == f"--{name}={'x' * 1024}"
    for value in ("x" * 1025, "\u00fc" * 600):
        error = refusal(ConfigError, flag_word, name, value)
        assert error.message.startswith(f"the value of {len(value.encode())} bytes is too long: '{value[:40]}'...")
        assert error.hint == f"Slurm takes at most 1024 bytes of --{name}"


@pytest.mark.parametrize("name", ["nodelist", "exclude", "dependency", "mail-type"])
def test_lists_of_ten_thousand_nodes_or_jobs_are_no_longer_than_slurm_allows(name: str) -> None:
    value = ",".join(f"rack{number % 97}-node{number:05}" for number in range(10_000))
    assert flag_word(name, value) == f"--{name}={value}"


@pytest.mark.parametrize(
    "name", ["", "-n", "--nodes", "Nodes", "a b", "a=b", "a\n", "a\n#SBATCH --wrap", "a_b", "a--b", "a-", "\u00e9"]
)
def test_flag_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of a Slurm option"):
        check_flag_name(name)


def test_directives_and_names_that_are_fine() -> None:
    assert [check_env_name(name) for name in ("_x", "SLURM_CONF", "PMIX_MCA_gds")] == [
        "_x",
        "SLURM_CONF",
        "PMIX_MCA_gds",
    ]
    assert check_env_value("C:\\x") == "'C:\\x'"
    assert (flag_word("job-name", "my run"), flag_word("exclusive", True)) == ("--job-name='my run'", "--exclusive")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "'' is not the name of an environment variable"),
        ("1A", "'1A' is not the name of an environment variable"),
        ("A-B", "'A-B' is not the name of an environment variable"),
        ("A\n", "'A\\n' is not the name of an environment variable"),
        ("A=1;x", "'A=1;x' is not the name of an environment variable"),
        ("\u00c9", "'\u00c9' is not the name of an environment variable"),
        ("UID", "UID is read-only in bash"),
        ("SRUN_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK is set by Slurm or the launcher for each job"),
        ("MASTER_PORT", "MASTER_PORT is set by Slurm or the launcher for each job"),
    ],
)
def test_environment_names_that_cannot_be_set_are_refused(name: str, message: str) -> None:
    assert refusal(ConfigError, check_env_name, name).message == message


def _hostile(rng: random.Random) -> str:
    pieces = ["$(id)", "`id`", ";", "\n", "\r", "\0", "'", '"', "\\", "#", " ", "\t", "&&", "|", "%j", "\x1b", "\u2028"]
    pieces += ["#SBATCH --output=/x", "a", "B", "7", "-", "=", "[", "]", "(", ")", "*", "~", "!", "{", "\u00e9", "\x7f"]
    return "".join(rng.choice(pieces) for _ in range(rng.randrange(0, 7)))


def _round_trip(check: object, value: str) -> bool:
    """Returns whether the value was accepted; accepted ones must come back from a shell parser unchanged."""
    try:
        text = check(value)  # type: ignore[operator]
    except ConfigError:
        return False
    assert "\n" not in text
    assert shlex.split(f"x={text}", comments=True) == [f"x={value}"]
    return True


def test_ten_thousand_hostile_strings_are_refused_or_arrive_unchanged() -> None:
    rng = random.Random(8)
    values = [_hostile(rng) for _ in range(10_000)]
    flags = sum(_round_trip(check_flag_value, value) for value in values)
    variables = sum(_round_trip(check_env_value, value) for value in values)
    assert 3000 < flags <= variables < 9000
