"""What Slurm cannot say about a site: questions for a person, each with the answer that stands for silence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_train.errors import ConfigError
from slurm_train.site.facts import SiteFacts
from slurm_train.site.selection import default_account, default_qos, qos_names, usable_partitions
from slurm_train.site.shape import gpu_types

_LONGEST_DEFAULT_MIN = 1440


@dataclass(frozen=True, slots=True)
class Question:
    """What only the person knows."""

    key: str
    text: str
    default: str
    choices: tuple[str, ...] = ()
    """Possible answers; empty: any text."""

    def check(self, answer: str) -> str:
        """Returns an answer, or the default for an empty one.

        Raises:
            ConfigError: it is none of the choices.
        """
        answer = answer.strip() or self.default
        if self.choices and answer and answer not in self.choices:
            raise ConfigError(f"{self.key}={answer!r} is not among them", hint=f"one of {', '.join(self.choices)}")
        return answer


def open_questions(facts: SiteFacts, answers: Mapping[str, str]) -> list[Question]:
    """Returns what has to be asked, each with the answer that is taken without asking.

    Args:
        facts: what Slurm says.
        answers: those given so far, by key; the account decides the QOS, and the partition the GPUs.
    """
    found = _where(facts, answers)
    account = answers.get("account") or default_account(facts.associations)
    names = qos_names(facts.associations, account)
    if len(names) > 1:
        found.append(Question("qos", "Which QOS?", default_qos(facts.associations, account), names))
    longest = str(_LONGEST_DEFAULT_MIN)
    return found + [
        Question("time_limit_min", "How many minutes may one attempt take, at most? A run takes several.", longest),
        Question("network_interface", "Which network interface joins the nodes, e.g. ib0? (empty: NCCL finds it)", ""),
        Question("setup", "A shell line that every job needs, e.g. module load cuda/12.4? (empty: none)", ""),
    ]


def _where(facts: SiteFacts, answers: Mapping[str, str]) -> list[Question]:
    partitions = usable_partitions(facts)
    names = tuple(one.name for one in partitions)
    found = []
    if len(names) > 1:
        found.append(Question("partition", "Which partition do runs go to?", names[0], names))
    for one in partitions:
        types = gpu_types(one)
        if one.name == (answers.get("partition") or names[0]) and len(types) > 1:
            found.append(Question("gpu_type", f"Which GPUs of partition {one.name}?", types[0], tuple(types)))
    accounts = tuple(dict.fromkeys(one.account for one in facts.associations))
    if len(accounts) > 1:
        account = default_account(facts.associations)
        found.append(Question("account", "Which account is charged?", account, accounts))
    elif not accounts:
        found.append(Question("account", "Which account is charged? (empty: Slurm's default)", ""))
    return found
