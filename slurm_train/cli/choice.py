"""Which runs a person means: names, sweeps, and what they were given; the same for `status` once and again."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_train.cli.timespan import read_since
from slurm_train.errors import ConfigError
from slurm_train.rundir.attempts import read_ledger
from slurm_train.rundir.jobs import read_job
from slurm_train.rundir.layout import RunDirectory
from slurm_train.rundir.lookup import find_runs
from slurm_train.rundir.sweep import SweepDirectory, find_sweep, read_table
from slurm_train.standing.conditions import choose
from slurm_train.standing.facts import Standing, Subject, subjects_of
from slurm_train.standing.states import RunState, read_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was typed to choose runs by."""

    root: Path
    words: tuple[str, ...] = ()
    """Runs and sweeps; none: all runs."""
    where: tuple[str, ...] = ()
    states: frozenset[RunState] | None = None
    last: int | None = None
    since_unix_s: float | None = None

    def sweep(self) -> SweepDirectory | None:
        """Returns the sweep that is meant, None where runs are, or several things."""
        return find_sweep(self.root, self.words[0]) if len(self.words) == 1 else None

    def subjects(self) -> list[Subject]:
        """Returns the runs that are there now and may be meant; which states they are in is seen later.

        Raises:
            RunError: a word names nothing.
            ConfigError: a condition makes no sense.
        """
        found = choose(self._named(), self.where)
        if self.since_unix_s is not None:
            found = [one for one in found if _active_unix_s(one.run) >= self.since_unix_s]
        if self.last is not None:
            by_time = sorted((one.run for one in found), key=_active_unix_s, reverse=True)
            newest = set(by_time[: self.last])
            found = [one for one in found if one.run in newest]
        return found

    def keeps(self, standing: Standing) -> bool:
        """Returns whether a run in this state is meant."""
        return self.states is None or standing.state in self.states

    def nothing_found(self, *, num_runs: int) -> str:
        """Returns what to say where there is nothing to show.

        Args:
            num_runs: the runs that would be meant if their states did not count.
        """
        if num_runs:
            return f"none of {num_runs} runs is in such a state"
        if self.words or self.where or self.since_unix_s is not None:
            return f"no such run below {self.root.resolve()}"
        return f"no run below {self.root.resolve()}; `python -m slurm_train` starts one"

    def _named(self) -> list[Subject]:
        if not self.words:
            return [Subject(run) for run in find_runs(self.root, [])]
        named: dict[RunDirectory, Subject] = {}
        for word in self.words:
            sweep = find_sweep(self.root, word)
            found = [Subject(run) for run in find_runs(self.root, [word])] if sweep is None else _of_sweep(sweep)
            named |= {one.run: one for one in found if one.run not in named}
        return list(named.values())


def _of_sweep(sweep: SweepDirectory) -> list[Subject]:
    return subjects_of(read_table(sweep))


def _active_unix_s(run: RunDirectory) -> float:
    """Returns when a run was last submitted or began an attempt, else when it was written."""
    record, ledger = read_job(run), read_ledger(run)
    known = [record.submit_time_unix_s] if record is not None else []
    known += [float(ledger[-1]["time_unix_s"])] if ledger and "time_unix_s" in ledger[-1] else []
    if not known:
        try:
            return run.config.stat().st_mtime
        except OSError:
            return 0.0
    return max(known)


def add_filters(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose runs."""
    parser.add_argument(
        "--state", dest="states", metavar="STATE,...", help="only runs in these states, e.g. running,failed"
    )
    where_help = "only runs with this value of a key of their configuration; several must all hold"
    parser.add_argument("--where", metavar="KEY=VALUE", action="append", default=[], help=where_help)
    parser.add_argument("--last", metavar="N", type=int, help="only the N that were submitted or started last")
    parser.add_argument("--since", metavar="TIME", help="only those submitted or started since: 90m, 12h, 2d, a date")


def read_choice(arguments: argparse.Namespace, words: Sequence[str]) -> Choice:
    """Returns what was typed.

    Raises:
        ConfigError: a state, a number or a time that makes no sense.
    """
    if arguments.last is not None and arguments.last < 1:
        raise ConfigError(f"--last {arguments.last} means no run", hint="write --last 5")
    return Choice(
        root=Path(arguments.root),
        words=tuple(words),
        where=tuple(arguments.where),
        states=read_states(arguments.states, option="--state") if arguments.states is not None else None,
        last=arguments.last,
        since_unix_s=read_since(arguments.since, now_unix_s=time.time()) if arguments.since is not None else None,
    )
