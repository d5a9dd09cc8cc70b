from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_train.config.compose import Composer
from slurm_train.config.words import Words, prepare_overrides, read_words
from slurm_train.errors import ConfigError
from tests.support.refusals import refusal

FLAGS = [
    (["-cd", "site", "-cn", "mine"], Words(config_dir="site", config_name="mine")),
    (["--cfg", "job", "--resolve"], Words(cfg="job", resolve=True)),
    (["--multirun", "--wait"], Words(multirun=True, wait=True)),
    (["seed=1", "-h", "optim.lr=2"], Words(help=True, overrides=["seed=1", "optim.lr=2"])),
]


@pytest.mark.parametrize(("words", "expected"), FLAGS)
def test_flags_and_overrides_are_told_apart(words: list[str], expected: Words) -> None:
    assert read_words(words) == expected


BAD_FLAGS = [
    (["--config-dir"], "the flag --config-dir needs a value"),
    (["--foo"], "there is no flag '--foo'"),
    (["--cfg", "everything"], "--cfg 'everything' is not one of its values"),
]


@pytest.mark.parametrize(("words", "message"), BAD_FLAGS)
def test_wrong_flags_are_refused_with_what_there_is(words: list[str], message: str) -> None:
    assert refusal(ConfigError, read_words, words).message == message


OVERRIDES = [
    # Plain numbers and choices are left to Hydra.
    ("cluster.gpus_per_node=[4,2]", ["cluster.gpus_per_node=[4,2]"]),
    # Groups that the shipped primary file does not choose are additions, with or without the plus.
    ("cluster=4x8", ["+cluster=4x8"]),
    ("cluster=2-4x8", ["+cluster=2-4x8"]),
    # Open mappings need no plus.
    ("cluster.env.NCCL_DEBUG=INFO", ["++cluster.env.NCCL_DEBUG='INFO'"]),
    # A person who writes a sign has it.
    ("++cluster.env.A=1", ["++cluster.env.A='1'"]),
    # Texts arrive as typed, whatever Hydra would read into them.
    ("cluster.nodelist=node[1-2],node5", ["cluster.nodelist='node[1-2],node5'"]),
    ("cluster.nodelist=[node[1-2],node5]", ["cluster.nodelist='node[1-2],node5'"]),
    ("cluster.nodelist=node[1-2],node[4-5]", ["cluster.nodelist='node[1-2],node[4-5]'"]),
    ("cluster.partition=['gpu', long]", ["cluster.partition='gpu,long'"]),
    ("cluster.sbatch.mail_type=[END,FAIL]", ["++cluster.sbatch.mail_type='END,FAIL'"]),
    # Slurm's own brackets.
    ("cluster.constraint=[rack1|rack2]", ["cluster.constraint='[rack1|rack2]'"]),
    ("cluster.sbatch.comment=[a,b]", ["++cluster.sbatch.comment='[a,b]'"]),
    ("cluster.account=1e5", ["cluster.account='1e5'"]),
    ("cluster.partition='quoted'", ["cluster.partition='quoted'"]),
    ("script=[train.py,--lr,1e-3,--verbose,true]", ["script=['train.py','--lr','1e-3','--verbose','true']"]),
    # A shell leaves the home of a path as it is typed, and Hydra cannot read it.
    ("data.path=~/corpus", ["data.path='~/corpus'"]),
    # Items that need quotes have them, the others do not.
    ("script=[t.py,--x=1,'a b']", ["script=['t.py','--x=1','a b']"]),
    ("script=[t.py,1e3, 'a,[b]' ,\"it's\"]", ["script=['t.py','1e3','a,[b]',\"it's\"]"]),
    ("script='[t.py,--x=1]'", ["script='[t.py,--x=1]'"]),
    ("script=[it's,'a b']", ["script=[it's,'a b']"]),
    ("cluster.env={A: 0123,B:1e3, C: 1:30}", ["++cluster.env={A: '0123', B: '1e3', C: '1:30'}"]),
    ("cluster.sbatch={exclusive: true, comment: 1e3}", ["++cluster.sbatch={exclusive: true, comment: '1e3'}"]),
    # A target of one's own does not inherit the arguments of the model that it replaces.
    ("model._target_=my.Model", ["model=custom", "++model._target_=my.Model"]),
]


@pytest.mark.parametrize(("word", "prepared"), OVERRIDES)
def test_an_override_reaches_hydra_in_its_spelling(word: str, prepared: list[str]) -> None:
    assert prepare_overrides([word]) == prepared


def test_a_target_beside_a_chosen_group_keeps_that_groups_arguments() -> None:
    assert prepare_overrides(["model=gpt", "model._target_=my.Model"]) == ["model=gpt", "model._target_=my.Model"]


@settings(deadline=None)
@given(st.text(min_size=1).filter(lambda text: not text.startswith(("'", '"')) and text not in ("null",)))
def test_any_text_survives_the_trip_through_hydras_grammar(text: str) -> None:
    (word,) = prepare_overrides([f"cluster.env.X={text}"])
    (override,) = OverridesParser.create().parse_overrides([word])
    assert override.value() == text


TIMES = [
    ("30", 30),
    ("4:00:00", 240),
    ("0:30", 1),
    ("1-00:00:01", 1441),
    ("'4:00:00'", 240),
]


@pytest.mark.parametrize(("text", "minutes"), TIMES)
def test_a_time_limit_may_be_written_as_slurm_does(text: str, minutes: int) -> None:
    assert prepare_overrides([f"cluster.time={text}"]) == [f"cluster.time_limit_min={minutes}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.time=soon"], "cluster.time=soon is no time limit"),
        (["cluster.time_limit_min=2:00:00"], "cluster.time_limit_min=2:00:00 is no whole number of minutes"),
        (["cluster.time=1:2:3:4"], "cluster.time=1:2:3:4 is no time limit"),
        (["cluster.time=30", "cluster.time_limit_min=30"], "cluster.time and cluster.time_limit_min both give"),
    ],
)
def test_a_time_limit_that_says_nothing_or_two_things_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Composer(Words()).compose(["+cluster=1x1", *words])
