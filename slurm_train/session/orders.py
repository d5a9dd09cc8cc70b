"""What the orders of a program's samples follow from, compared with those of the checkpoint that it continues."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurm_train.errors import ConfigError

ORDERS = "orders"
"""Key of a checkpoint's header: what the orders follow from, in the order of the calls."""


@dataclass(slots=True)
class Orders:
    """What the orders of a program's samples follow from, by the calls of `batches`."""

    done: int = 0
    """Steps of the checkpoint that the program continues, 0 without one."""
    saved: list[dict[str, int]] = field(default_factory=list)
    """Those of that checkpoint."""
    present: list[dict[str, int]] = field(default_factory=list)
    num_calls: int = 0
    """Calls of `batches` since the program has asked for that checkpoint."""
    knows_checkpoint: bool = False
    """Whether the program has asked for the newest checkpoint."""

    def take(self, step: int, saved: list[dict[str, int]]) -> None:
        """Takes over the step and the orders of a checkpoint from which the program begins, or to which it goes back.

        Raises:
            ConfigError: there are batches already, of the steps that are done.
        """
        is_first = not self.knows_checkpoint
        self.knows_checkpoint = True
        self.num_calls = 0
        if is_first and step and self.present:
            raise ConfigError(
                f"`batches` was called before `newest`, and step {step} is done: its samples would be used again",
                hint="call newest() first",
            )
        self.done = step
        self.saved = saved

    def add(self, order: dict[str, int], *, done: int) -> None:
        """Adds an order.

        Raises:
            ConfigError: it is not that of the checkpoint.
        """
        number = self.num_calls
        if done and number < len(self.saved) and self.saved[number] != order:
            changes = (f"{name} {self.saved[number].get(name)} -> {value}" for name, value in order.items())
            raise ConfigError(
                f"step {self.done} was saved with another order of samples ({', '.join(changes)}): some would be used "
                "twice, others not",
                hint="keep the data set, global_size and seed; or start anew under another run.name",
            )
        self.num_calls += 1
        self.present[number : number + 1] = [order]
