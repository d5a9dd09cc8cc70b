"""How often Slurm may be asked: the controller is everybody's.

Never sooner than a few seconds after the last answer, later where the answer took long, and ever later while there is
none. Nothing is run here, and nobody sleeps here.
"""

from __future__ import annotations

LEAST_S = 5.0
"""Between two questions, however often somebody wants to look."""
_LONGEST_S = 300.0
# A command that takes a second keeps the controller busy for one; then it has this many for others.
_REST = 20.0


class Pace:
    """Says when the next question is due; times are those of any clock that never runs backwards.

    Args:
        least_s: seconds between two questions while the answers come quickly.
    """

    def __init__(self, *, least_s: float = LEAST_S) -> None:
        self.due_s = float("-inf")
        """From when on Slurm may be asked; at once, the first time."""
        self._least_s = least_s
        self._silent_s = least_s

    def answered(self, now_s: float, *, took_s: float) -> None:
        """Notes an answer."""
        self._silent_s = self._least_s
        self.due_s = now_s + min(_LONGEST_S, max(self._least_s, _REST * took_s))

    def unanswered(self, now_s: float) -> None:
        """Notes a question that got none: each in a row doubles the time until the next."""
        self._silent_s = min(_LONGEST_S, 2 * self._silent_s)
        self.due_s = now_s + self._silent_s

    def is_due(self, now_s: float) -> bool:
        """Returns whether Slurm may be asked now."""
        return now_s >= self.due_s
