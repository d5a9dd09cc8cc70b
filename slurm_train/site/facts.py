"""What Slurm says about a cluster, gathered with one question each. Whatever does not answer is left out and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from slurm_train.errors import ClusterError
from slurm_train.slurm.accounting import Association, Qos
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.partitions import Partition

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFacts:
    """The answers; empty where there was none."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """`scontrol show config`."""
    partitions: Sequence[Partition] = ()
    """`sinfo`."""
    records: Sequence[Mapping[str, str]] = ()
    """`scontrol show partition`."""
    associations: Sequence[Association] = ()
    """The user's, of this cluster."""
    qos: Sequence[Qos] = ()
    problems: Sequence[str] = ()
    """What did not answer, one line each."""

    def record(self, partition: str) -> Mapping[str, str]:
        """Returns scontrol's fields of a partition, none where it did not say."""
        return next((one for one in self.records if one["PartitionName"] == partition), {})

    def qos_named(self, name: str) -> Qos | None:
        """Returns a QOS, None where accounting does not know it."""
        return next((one for one in self.qos if one.name == name), None)


def gather_facts(commands: SlurmCommands, *, user: str) -> SiteFacts:
    """Returns what Slurm's commands say; a command that is missing or refuses is one of the problems.

    Raises:
        ClusterError: sinfo does not answer, so that nothing is known.
    """
    problems: list[str] = []

    def ask(what: str, question: Callable[[], T]) -> T | None:
        try:
            return question()
        except ClusterError as err:
            problems.append(f"{what}: {err.message}")
            return None

    settings = ask("settings", commands.show_config) or {}
    partitions = commands.partitions()
    records = ask("partitions", commands.show_partitions) or []
    associations = ask("accounts", lambda: commands.associations(user)) or []
    return SiteFacts(
        settings=settings,
        partitions=partitions,
        records=records,
        associations=_of_cluster(associations, settings.get("ClusterName", "")),
        qos=ask("QOS", commands.all_qos) or [],
        problems=problems,
    )


def _of_cluster(associations: Sequence[Association], cluster: str) -> list[Association]:
    # The database writes names in lower case, scontrol as they were configured.
    mine = [one for one in associations if one.cluster.lower() == cluster.lower()]
    return mine or list(associations)
