"""Where a library's loop may be stopped and saved: the same for each library whose callback keeps no state of its own.

An adapter says what a step is, and where the library could go on; here is what the run does there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slurm_train.session import Session


class Boundaries:
    """The steps of a library's loop in its run.

    Args:
        session: of the run.
        save: saves all that the library needs to go on; collective.
        is_due: returns whether to save after a step.
    """

    def __init__(self, session: Session, *, save: Callable[[int], None], is_due: Callable[[int], bool]) -> None:
        self._session = session
        self._save = save
        self._is_due = is_due
        self._saved_step = -1

    def report(self, step: int, numbers: Mapping[str, Any], *, max_steps: int | None = None) -> None:
        """Reports a step with those of the numbers that are single ones."""
        limit = {} if max_steps is None else {"max_steps": max_steps}
        self._session.report(step, **_scalars(numbers), **limit)

    def pass_by(self, step: int) -> None:
        """Saves where that is due, and where the ranks are to stop, ends the program. On all ranks."""
        stop = self._session.should_stop()
        if stop or self._is_due(step):
            self._save_once(step)
        if stop:
            self._session.leave()

    def end(self, step: int) -> None:
        """Saves the last step, and says that the training is over. On all ranks."""
        self._save_once(step)
        self._session.mark("end")

    def _save_once(self, step: int) -> None:
        if step != self._saved_step:
            self._save(step)
            self._saved_step = step


def _scalars(numbers: Mapping[str, Any]) -> dict[str, float]:
    """Returns the single numbers, e.g. of losses; a tensor of one element counts."""
    found = {}
    for name, value in numbers.items():
        if isinstance(value, (int, float)) or getattr(value, "size", None) == 1 or _is_one_tensor(value):
            found[name.replace("/", "_")] = float(value)
    return found


def _is_one_tensor(value: Any) -> bool:
    return hasattr(value, "numel") and value.numel() == 1
