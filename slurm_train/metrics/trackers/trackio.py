"""trackio: one run for all attempts, known by its name; its database is a file of the user's, or a Space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_train.config.schema import TrackioSection
from slurm_train.metrics.trackers.catalogue import not_installed
from slurm_train.metrics.trackers.tracker import Line, Outcome, TrackedRun, numbers_of


class TrackioTracker:
    """Logs to an open run of trackio.

    Args:
        run: trackio's run.
        name: what it is called there.
        place: where a person finds it.
    """

    # A thread of trackio's writes them.
    settle_s = 30.0

    def __init__(self, run: Any, name: str, *, place: str) -> None:
        self.tracker_id, self.place = name, place
        self._run = run

    def log(self, lines: Sequence[Line]) -> None:
        """Hands the lines over; of a step that is written anew trackio keeps both."""
        for line in lines:
            self._run.log(numbers_of(line), step=int(line["step"]))

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002  # it has no word for it
        """Waits until they are written."""
        self._run.finish()


def open_trackio(run: TrackedRun, settings: TrackioSection) -> TrackioTracker:
    """Starts or continues the run at trackio.

    Raises:
        ConfigError: the trackio package is not installed.
    """
    try:
        import trackio
    except ImportError:
        raise not_installed("trackio") from None
    assert settings.project is not None
    name = run.tracker_id or f"{run.name.partition('/')[0]}-{run.key}"
    opened = trackio.init(
        project=settings.project,
        name=name,
        group=run.group,
        space_id=settings.space_id,
        config={**run.config, "slurm_train": dict(run.facts)},
        resume="allow",
        embed=False,
    )
    place = f'trackio show --project "{settings.project}"'
    return TrackioTracker(opened, name, place=settings.space_id or place)
