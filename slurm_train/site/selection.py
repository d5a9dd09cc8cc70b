"""Which partitions, accounts and QOS of a cluster are open to a person, the best choice first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_train.errors import ConfigError
from slurm_train.site.facts import SiteFacts
from slurm_train.site.preempting import preemption_in
from slurm_train.slurm.accounting import Association
from slurm_train.slurm.partitions import Partition


def usable_partitions(facts: SiteFacts) -> list[Partition]:
    """Returns the partitions that a run may go to, those with GPUs if there are any; the best choice first.

    Raises:
        ConfigError: there is none.
    """
    accounts = {one.account for one in facts.associations}
    is_open = [one for one in facts.partitions if one.state == "up" and one.groups and _admits(facts, one, accounts)]
    if not is_open:
        raise ConfigError("sinfo shows no partition that is up and open to you", hint="run `sinfo` by hand")
    with_gpus = [one for one in is_open if one.gpus_per_node]

    def rank(one: Partition) -> tuple[bool, bool, int, str]:
        # A run that comes back from preemptions is still quicker where there are none.
        is_preempted = preemption_in(facts, "", one.name).outcome != "never"
        return not one.is_default, is_preempted, -_num_gpus(one), one.name

    return sorted(with_gpus or is_open, key=rank)


def _admits(facts: SiteFacts, partition: Partition, accounts: set[str]) -> bool:
    record = facts.record(partition.name)
    allowed, denied = (set(record.get(key, "ALL").split(",")) for key in ("AllowAccounts", "DenyAccounts"))
    if record.get("RootOnly") == "YES" or (accounts and "ALL" not in allowed and not accounts & allowed):
        return False
    return not ("DenyAccounts" in record and accounts and accounts <= denied)


def _num_gpus(partition: Partition) -> int:
    return sum(group.num_nodes * group.gpus_per_node for group in partition.groups)


def default_account(associations: Sequence[Association]) -> str:
    """Returns the account that Slurm charges where none is named; "" where nobody says."""
    return next((one.account for one in sorted(associations, key=lambda one: not one.is_default)), "")


def qos_names(associations: Sequence[Association], account: str) -> tuple[str, ...]:
    """Returns the QOS that jobs of an account may ask for, as far as accounting says."""
    names = (name for one in associations if one.account == account for name in one.qos)
    return tuple(dict.fromkeys(names))


def default_qos(associations: Sequence[Association], account: str) -> str:
    """Returns the QOS that a job of an account gets where it asks for none; "" where nobody says."""
    defaults = (one.default_qos for one in associations if one.account == account and one.default_qos)
    return next(defaults, "")
