from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from slurm_train.config.compose import Composer
from slurm_train.config.schema import RunConfig, all_keys
from slurm_train.config.synonyms import OTHER_NAMES, advise
from slurm_train.config.words import FLAGS, Words
from slurm_train.errors import ConfigError
from slurm_train.verbs import PUBLIC_VERBS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"


COMMON = [line.split("\t") for line in (Path(__file__).parent / "common_names.tsv").read_text().splitlines()]
"""Trainer; what people type for it; what to type here, else how the answer begins.

The names are most arguments of Lightning's Trainer, transformers' TrainingArguments, timm's train.py, torchtitan's
configuration and composer's Trainer, and others that are typed often.
"""


def test_a_value_of_the_right_kind_is_taken_over() -> None:
    found = [advise(*typed) for typed in (("lr", 1e-4), ("lr", "true"), ("mem", "64G"), ("model.lr", "1"))]
    assert found == ["write optim.lr=0.0001", "write optim.lr=3e-4", "write cluster.memory_gb_per_node=64", ""]


@pytest.mark.parametrize("trainer", sorted({trainer for trainer, _, _ in COMMON}))
def test_what_people_type_is_answered_with_a_setting_that_is_accepted_or_with_a_reason(
    trainer: str, composer: Composer
) -> None:
    answered = {}
    for _, typed, _ in (row for row in COMMON if row[0] == trainer):
        with pytest.raises(ConfigError) as caught:
            composer.compose([typed, "+cluster=2x8"])
        answered[typed] = caught.value.hint
    expected = {typed: answer for of, typed, answer in COMMON if of == trainer}
    for typed, hint in answered.items():
        begin = hint.removeprefix("write ").lstrip("`")
        assert begin.startswith(expected[typed]), f"{typed}: {hint}"
        # Not "=2" where "=20" is said.
        assert not begin[len(expected[typed]) :][:1].isalnum(), f"{typed}: {hint}"
        if hint.startswith("write "):
            composer.compose(accepted_with(expected[typed]))


NEEDS_OWN = re.compile(r"data\.num_workers|data\._target_|model\.num_classes")


def accepted_with(setting: str) -> list[str]:
    """Returns the words of a proposal, with those that it needs beside it."""
    words = shlex.split(setting)
    words += [] if "+cluster" in setting else ["+cluster=2x8"]
    return [*words, *(["data._target_=my.Data", "model._target_=my.Model"] if NEEDS_OWN.search(setting) else [])]


SETTING = re.compile(r"(?<![^\s(])\+?[a-z_]+(?:\.[a-z_]+)+=[^\s,;:`\")]+")
VERB, FLAG = re.compile(r"`([a-z]+)\b"), re.compile(r"(?<!\S)(--[a-z-]+)")
ANSWERS = sorted({advise(name) for name in OTHER_NAMES})
"""Several names have the same answer."""
PROPOSALS = [
    answer
    for answer in ANSWERS
    if answer.startswith("write ") or any(pattern.search(answer) for pattern in (VERB, FLAG, SETTING))
]


def test_no_name_of_another_trainer_is_a_setting_or_a_verb_here() -> None:
    replaced = {name for name in OTHER_NAMES if advise(name).startswith("write ")}
    assert len(replaced) > 200 and not replaced & {*all_keys(RunConfig), *PUBLIC_VERBS}


@pytest.fixture(scope="module")
def composer() -> Composer:
    """One for all answers, as for all points of a sweep: it reads each choice of groups once."""
    return Composer(Words())


@pytest.mark.parametrize("answer", PROPOSALS)
def test_every_setting_that_is_proposed_composes_and_every_verb_exists(answer: str, composer: Composer) -> None:
    if answer.startswith("write "):
        composer.compose(accepted_with(re.split(r", |; | for | in ", answer.removeprefix("write "))[0]))
    else:
        words = SETTING.findall(answer)
        words += ["data=hf", "data.path=DIR"] if "data=hf" in answer else []
        if words:
            composer.compose(accepted_with(" ".join(words)))
    for verb in VERB.findall(answer):
        assert verb in PUBLIC_VERBS, answer
    for flag in FLAG.findall(answer):
        assert flag in (*FLAGS, "--format", "--out"), answer


def test_the_page_gives_the_same_answers() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = [(name, ours) for names, ours in rows for name in re.findall(r"`([^`]+)`", names)]
    assert len(named) > 60
    for name, ours in (row for row in named if "hydra" not in row[0]):
        (setting, *_) = re.findall(r"`([^`]+)`", ours)
        assert setting.partition("=")[0].strip('"') in advise(name.split()[0].partition("=")[0]), name
