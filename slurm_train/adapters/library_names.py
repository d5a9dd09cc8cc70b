"""What the adapters read and set in libraries that promise none of it: all names, with the versions that were tried.

A name that is missing would be found at the first resume only, when hours are trained and there is no way on. So each
adapter calls `Library.check` with the objects at its first start. An older version may have the names and do otherwise:
Lightning 2.5.2 has them all, and a resumed epoch has other batches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from slurm_train.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library, and what an adapter uses of it that is not documented."""

    name: str
    """As a package, e.g. "lightning"."""
    tried: str
    """Versions, e.g. ">=2.5.3,<2.7"."""
    names: Mapping[str, Sequence[str]]
    """Attributes, by what their owner is called in messages."""

    def check(self, **owners: object) -> None:
        """Checks that the installed version is no older than was tried, and that objects have their names.

        Args:
            **owners: objects, by what they are called in `names`.

        Raises:
            ConfigError: it is older, or a name is missing; the message has the version and all missing names.
        """
        installed = version(self.name)
        hint = f"install a version that was tried: pip install '{self.name}{self.tried}'"
        if _numbers(installed) < _numbers(self.tried):
            raise ConfigError(f"{self.name} {installed} is older than what the callback was tried with", hint=hint)
        missing = []
        for called, owner in owners.items():
            missing += [f"{called}.{name}" for name in self.names[called] if not hasattr(owner, name)]
        if missing:
            raise ConfigError(
                f"{self.name} {installed} lacks what the callback needs to save and to resume: {', '.join(missing)}",
                hint=hint,
            )


LIGHTNING = Library(
    name="lightning",
    tried=">=2.5.3,<2.7",
    names={
        "trainer": ("_logger_connector",),
        "logger_connector": ("_callback_metrics",),
        "fit_loop": (
            "_can_stop_early",
            "_combined_loader",
            "_data_fetcher",
            "_last_train_dl_reload_epoch",
            "_restarting",
            "epoch_loop",
            "epoch_progress",
            "restarted_mid_epoch",
            "restarted_on_epoch_end",
            "restarting",
            "resumed_on_epoch_end",
            "setup_data",
            "update_restart_stage",
        ),
        "epoch_loop": (
            "_num_ready_batches_reached",
            "_results",
            "_should_check_val_fx",
            "batch_progress",
            "update_lr_schedulers",
        ),
        "call": ("_call_lightning_module_hook",),
        "result": ("_defaults", "is_tensor", "meta", "value"),
        "divided_data": ("_sampler",),
        "fetcher": ("batches", "fetched", "prefetch_batches"),
        "wrapping_fetcher": ("fetched", "iterator_wrapper"),
    },
)

TORCHMETRICS = Library(
    name="torchmetrics",
    tried=">=1.0",
    names={"metric": ("_computed", "_defaults", "_update_count")},
)

TRANSFORMERS = Library(
    name="transformers",
    tried=">=5.2,<6",
    names={
        "TrainingArguments": (
            "data_seed",
            "eval_delay",
            "eval_on_start",
            "hub_strategy",
            "ignore_data_skip",
            "restore_callback_states_from_checkpoint",
            "save_only_model",
            "train_batch_size",
            "train_sampling_strategy",
        ),
        "TrainerState": ("best_global_step", "best_metric", "eval_steps", "log_history"),
    },
)

STABLE_BASELINES3 = Library(
    name="stable_baselines3",
    tried=">=2.9,<3",
    names={"algorithm": ("_last_episode_starts", "_last_obs", "_total_timesteps")},
)

MMENGINE = Library(
    name="mmengine",
    tried=">=0.10.7,<1",
    names={"loop": ("_epoch", "_iter"), "optim_wrapper": ("_accumulative_counts",)},
)


def _numbers(text: str) -> list[int]:
    """Returns the first version in a text as numbers, e.g. [2, 5, 3] of "2.5.3.post0" and of ">=2.5.3,<3"."""
    match = re.search(r"\d+(\.\d+)*", text)
    return [] if match is None else [int(part) for part in match[0].split(".")]
