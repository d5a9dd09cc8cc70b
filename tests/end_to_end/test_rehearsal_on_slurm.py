"""A rehearsal on a real Slurm: one allocation, signals by scancel to the steps of its runs."""

from __future__ import annotations

import json

import pytest

from tests.support import light_training
from tests.support.command_line import Person

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def test_a_program_on_two_nodes_survives_and_the_allocation_is_given_back(person: Person) -> None:
    light_training.add_program(person)
    words = light_training.words(steps=400, step_s=0.1, save_every=3)
    only = ("--steps", "8", "--only", "preempted,killed", "--json")
    done = person.types("rehearse", "+cluster=2x1", *words, *only, timeout_s=300)
    assert done.code == 0, (done.out, done.err)
    preempted, killed = json.loads(done.out)["rows"]
    assert (preempted["is_good"], preempted["repeated"], preempted["left_out"]) == (True, 0, 0)
    assert preempted["losses"].startswith("equal") and killed["losses"].startswith("equal")
    assert "one allocation of 2 nodes" in done.err
    assert not person.runs("squeue", "--noheader").out.strip()
