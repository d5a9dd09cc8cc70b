"""One look at runs for the verbs that show how they stand: their files, and Slurm asked once about all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_train.cli.display import note
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.queue_view import QueueView
from slurm_train.standing.facts import Standing, Subject
from slurm_train.standing.survey import Surveyor

# What a command that answers a person at a prompt waits for.
_SLURM_TIMEOUT_S = 10.0


def build_surveyor(env: Mapping[str, str]) -> Surveyor:
    """Returns what looks at runs, with the Slurm of an environment."""
    return Surveyor(QueueView(SlurmCommands(env, timeout_s=_SLURM_TIMEOUT_S)))


def look_once(subjects: Sequence[Subject], env: Mapping[str, str]) -> tuple[Standing, ...]:
    """Returns how runs stand; says so where Slurm does not answer and the files alone were read."""
    survey = build_surveyor(env).look(subjects)
    if survey.look.problem:
        note(f"Slurm does not answer, so this is from the files alone: {survey.look.problem}")
    return survey.standings
