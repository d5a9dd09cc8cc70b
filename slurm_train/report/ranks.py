"""Step times by rank: percentiles of each, in rank order, with the nodes marked off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from slurm_train.report.curve import Curve
from slurm_train.report.plot import Mark, Plot
from slurm_train.rundir.step_times import Histogram, RankTimes

_MOST_NODE_MARKS = 64

NOTE = (
    "Ranks wait for each other in every step, so their step times are alike even where one of them holds the others "
    "up; the wait for data is each rank's own. An attempt's first step is not counted. Right to 2 %."
)


def shown_attempt(step_times: Mapping[int, Sequence[RankTimes]]) -> int | None:
    """Returns the attempt with the most steps, the newest of several; None where none left anything."""
    counts = {attempt: max(times.step.num for times in of_ranks) for attempt, of_ranks in step_times.items()}
    return max(counts, key=lambda attempt: (counts[attempt], attempt), default=None)


def rank_plots(times: Sequence[RankTimes]) -> list[Plot]:
    """Returns step time and wait for data against the rank."""
    marks = _node_marks(times)
    return [
        _plot("rank_step_time", "Step time by rank", times, [one.step for one in times], marks),
        _plot("rank_data_wait", "Wait for data by rank", times, [one.data_wait for one in times], marks),
    ]


def _plot(
    key: str, title: str, times: Sequence[RankTimes], histograms: Sequence[Histogram], marks: Sequence[Mark]
) -> Plot:
    longest_s = max((one.longest_s for one in histograms), default=0.0)
    unit, factor = ("s", 1.0) if longest_s >= 2 else ("ms", 1000.0)
    ranks, labels = [float(one.rank) for one in times], [one.host for one in times]

    def of(share: float) -> list[float]:
        return [factor * one.quantile_s(share) for one in histograms]

    middle = Curve(
        name="median, 5 to 95 %", x=ranks, y=of(0.5), low=of(0.05), high=of(0.95), kind="ranges", labels=labels
    )
    late = Curve(name="99 %", x=ranks, y=of(0.99), kind="dots", colour="two")
    longest = Curve(
        name="longest", x=ranks, y=[factor * one.longest_s for one in histograms], kind="dots", colour="quiet"
    )
    return Plot(
        key=key, title=title, curves=[longest, late, middle], x_label="rank", y_label=unit, marks=marks, from_zero=True
    )


def _node_marks(times: Sequence[RankTimes]) -> list[Mark]:
    groups = [(host, [one.rank for one in of_host]) for host, of_host in groupby(times, key=lambda one: one.host)]
    marks = [Mark(ranks[0] - 0.5, host, "node") for host, ranks in groups]
    return marks if 1 < len(marks) <= _MOST_NODE_MARKS else []
