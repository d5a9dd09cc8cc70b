"""TensorBoard: an event file per attempt in the run directory. Needs the tensorboard package, but not torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_train.metrics.trackers.catalogue import not_installed
from slurm_train.metrics.trackers.tracker import Line, Outcome, Rewinds, TrackedRun, numbers_of


class TensorBoardTracker:
    """Writes the numbers of a line as scalars.

    Args:
        folder: where the events go.
        writer: tensorboard's own writer of event files.
    """

    settle_s = 0.0

    def __init__(self, folder: str, writer: Any) -> None:
        self.tracker_id, self.place = folder, f"tensorboard --logdir {folder}"
        self._writer, self._rewinds, self._is_new = writer, Rewinds(), True

    def log(self, lines: Sequence[Line]) -> None:
        """Adds the lines; steps that are written anew take the place of the old ones."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for line in lines:
            # What an earlier file has from this step on is superseded, or comes again because nobody was sure of it.
            if self._rewinds.is_rewind(line) or self._is_new:
                self._purge(line)
            values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers_of(line).items()]
            self._add(line, summary=Summary(value=values))
        self._writer.flush()

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002  # it has no word for it
        """Closes the event file."""
        self._writer.close()

    def _purge(self, line: Line) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._is_new = False
        self._add(line, session_log=SessionLog(status=SessionLog.START))

    def _add(self, line: Line, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=line["step"], wall_time=float(line.get("time_unix_s", 0.0)), **content))


def open_tensorboard(run: TrackedRun) -> TensorBoardTracker:
    """Opens a new event file beside those of earlier attempts.

    Raises:
        ConfigError: the tensorboard package is not installed.
    """
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise not_installed("tensorboard") from None
    folder = str(run.path / "tensorboard")
    return TensorBoardTracker(folder, EventFileWriter(folder))
