"""The parser against `scontrol show hostnames` on random strings; it needs Slurm's program, and no cluster."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from slurm_train.slurm.allocation import NodeListError, parse_nodelist

_BATCH = 50
# No digits: Slurm joins neighbours that count on.
_SENTINEL = "zz-next-zz"
# Where the parser refuses on purpose what scontrol makes something of.
_STRICTER = re.compile(
    r"""
    \[[^\]]*(?:$|\[)              # a bracket that is never closed, or opened twice
    | \][^,\s]*\] | ^[^\[]*\]     # a bracket that was never opened
    | [,\s][^\[,\s]*\]
    | \[[^\]]*(?:[\s+A-Za-z_]|-[,\]])  # blanks, signs, letters and open ends in brackets
    | [^\w\s,.\[\]-]             # characters that no host name has
    """,
    re.VERBOSE,
)
# And the one it expands on purpose where scontrol refuses: text after the last bracket.
_WIDER = re.compile(r"\][^\[\],\s]+(?:$|[,\s])")


@pytest.fixture(scope="module")
def scontrol_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """scontrol wants a configuration even to take a string apart; it asks no daemon."""
    if shutil.which("scontrol") is None:
        pytest.skip("no scontrol on this machine")
    conf = tmp_path_factory.mktemp("conf") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\nNodeName=localhost\nPartitionName=p Nodes=ALL\n")
    return {"PATH": os.environ["PATH"], "SLURM_CONF": str(conf)}


def _scontrol(text: str, env: dict[str, str]) -> list[str] | None:
    """Returns the hosts that scontrol prints, None if it refuses (its exit code is 0 then as well)."""
    # A comma in front changes nothing and keeps "-1n" from being taken for an option.
    argv = ["scontrol", "show", "hostnames", f",{text}"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60)
    if "Invalid hostlist" in done.stdout + done.stderr:
        return None
    return done.stdout.splitlines()


def _ours(text: str) -> list[str] | None:
    try:
        return parse_nodelist(text)
    except NodeListError:
        return None


def _number(rng: random.Random, value: int) -> str:
    return str(value).zfill(rng.choice([0, 0, 0, 1, 2, 3, 4]))


def _range(rng: random.Random) -> str:
    low = rng.choice([rng.randrange(4), rng.randrange(8, 12), rng.randrange(95, 105), rng.randrange(2000)])
    high = low + rng.choice([-1] + [0, 1, 2, 3, 5] * 4)
    return _number(rng, low) if rng.random() < 0.4 else f"{_number(rng, low)}-{_number(rng, max(high, 0))}"


def _member(rng: random.Random) -> str:
    words = ["n", "gpu", "rack", "a-", "b.c", "x_", "", "h1", "r02n", "Node"]
    parts = [rng.choice(words)]
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 3])):
        groups = [_range(rng) for _ in range(rng.choice([1, 1, 2, 3]))]
        parts += [f"[{','.join(groups)}]", rng.choice([*words, "", "", ""])]
    if "[" in "".join(parts) and rng.random() < 0.95:
        parts[-1] = ""
    return "".join(parts) or rng.choice(["7", "n7", "n07"])


def _string(rng: random.Random) -> str:
    text = rng.choice([",", ",", ",", ",,", " "]).join(_member(rng) for _ in range(rng.choice([1, 1, 2, 3, 4])))
    if rng.random() < 0.15:
        spot = rng.randrange(len(text) + 1)
        text = text[:spot] + rng.choice(list("[],- 0a+:;")) + text[spot + rng.randrange(2) :]
    return text


def _answers(texts: list[str], env: dict[str, str]) -> dict[str, list[str] | None]:
    """Asks scontrol about many strings at once; one refused string makes it refuse all, then they are halved."""
    both = _scontrol(f",{_SENTINEL},".join(texts), env) if len(texts) > 1 else _scontrol(texts[0], env)
    if len(texts) == 1:
        return {texts[0]: both}
    blocks = "\n".join(both or []).split(_SENTINEL)
    if both is None or len(blocks) != len(texts):
        middle = len(texts) // 2
        return _answers(texts[:middle], env) | _answers(texts[middle:], env)
    return {text: block.split() for text, block in zip(texts, blocks, strict=True)}


@pytest.mark.parametrize("num_strings", [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.full])])
def test_random_strings_agree_with_scontrol(scontrol_env: dict[str, str], num_strings: int) -> None:
    rng = random.Random(2205)
    texts = list(dict.fromkeys(_string(rng) for _ in range(num_strings * 2)))[:num_strings]
    assert len(texts) == num_strings
    # Sorted by what is expected, most batches need one call.
    well_formed = [text for text in texts if _ours(text) is not None and not _WIDER.search(text)]
    others = [[text] for text in texts if text not in set(well_formed)]
    batches = [well_formed[start : start + _BATCH] for start in range(0, len(well_formed), _BATCH)] + others
    with ThreadPoolExecutor(4) as pool:
        answers: dict[str, list[str] | None] = {}
        for found in pool.map(lambda batch: _answers(batch, scontrol_env), batches):
            answers |= found
    assert len(answers) == num_strings
    wrong = {text: (_ours(text), found) for text, found in answers.items() if not _agree(text, found)}
    assert wrong == {}
    # The comparison compares: most strings are lists, many are refused, both by both.
    assert sum(found is not None and _ours(text) == found for text, found in answers.items()) > 0.6 * num_strings
    assert sum(found is None and _ours(text) is None for text, found in answers.items()) > 0.05 * num_strings


def _agree(text: str, found: list[str] | None) -> bool:
    ours = _ours(text)
    if ours == found:
        return True
    return bool(_STRICTER.search(text)) if ours is None else found is None and bool(_WIDER.search(text))
