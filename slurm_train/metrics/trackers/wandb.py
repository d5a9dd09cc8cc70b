"""Weights & Biases: one run for all attempts, under an id of ours; steps are an axis of their own.

W&B takes no step twice, but a run that comes back from a checkpoint repeats some. So nothing is logged under W&B's own
counter: "step" is a metric, and the axis of all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurm_train.config.schema import WandbSection
from slurm_train.metrics.trackers.catalogue import has_key_file, not_installed
from slurm_train.metrics.trackers.tracker import Line, Outcome, TrackedRun, numbers_of

_HOST = "api.wandb.ai"


class WandbTracker:
    """Logs to an open run of W&B.

    Args:
        run: W&B's run.
        place: where a person finds it.
    """

    # wandb hands lines over to a process of its own, which uploads them every few seconds.
    settle_s = 60.0

    def __init__(self, run: Any, *, place: str) -> None:
        self.tracker_id, self.place = str(run.id), place
        self._run = run

    def log(self, lines: Sequence[Line]) -> None:
        """Hands the lines over, each with the time at which it was written."""
        for line in lines:
            values: dict[str, Any] = {"step": line["step"], "attempt": line.get("attempt", 0), **numbers_of(line)}
            if "time_unix_s" in line:
                values["_timestamp"] = line["time_unix_s"]
            self._run.log(values)

    def close(self, outcome: Outcome) -> None:
        """Waits for the upload; a run that will be continued is called preempted."""
        if outcome == "paused":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


def open_wandb(run: TrackedRun, settings: WandbSection, *, env: Mapping[str, str], timeout_s: float) -> WandbTracker:
    """Starts or continues the run at W&B.

    Raises:
        ConfigError: the wandb package is not installed.
    """
    try:
        import wandb
    except ImportError:
        raise not_installed("wandb") from None
    mode = mode_of(settings, env)
    own = wandb.Settings(
        console="off",
        disable_git=True,
        init_timeout=0.8 * timeout_s,
        mode=mode,
        save_code=False,
        silent=True,
    )
    opened = wandb.init(
        project=settings.project,
        entity=settings.entity,
        id=run.tracker_id or run.key,
        name=run.name,
        group=run.group,
        tags=list(settings.tags) or None,
        resume="allow",
        dir=str(run.folder),
        config={**run.config, "slurm_train": dict(run.facts)},
        allow_val_change=True,
        settings=own,
    )
    opened.define_metric("step")
    opened.define_metric("*", step_metric="step")
    upload = f"offline; to upload: wandb sync {run.folder / 'wandb'}/offline-run-*-{opened.id}"
    return WandbTracker(opened, place=upload if mode == "offline" else str(opened.url))


def mode_of(settings: WandbSection, env: Mapping[str, str]) -> str:
    """Returns W&B's mode: what was asked for, else WANDB_MODE, else online where there is a key."""
    if settings.mode != "auto":
        return settings.mode
    if env.get("WANDB_MODE"):
        return env["WANDB_MODE"]
    host = env.get("WANDB_BASE_URL", f"https://{_HOST}").partition("//")[2].partition("/")[0].partition(":")[0]
    return "online" if env.get("WANDB_API_KEY") or has_key_file(env, host) else "offline"
