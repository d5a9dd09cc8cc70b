"""Saves and restores what the steps of an epoch have added up so far; Lightning (2.6) loses it at a resume.

Without it the mean of a resumed epoch would be that of the steps after the resume, and a schedule or an `EarlyStopping`
that depends on it would decide otherwise. Two kinds of sums are kept, for each rank: those of `log(on_epoch=True)`, and
the states of torchmetrics' metrics in the module. Lightning's own part of the checkpoint is not changed.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from slurm_train.adapters.library_names import LIGHTNING, TORCHMETRICS

_SUMS = ("value", "cumulated_batch_size")


class EpochMeans:
    """Sums of an epoch that is resumed in its middle; each waits until Lightning has a sum that it can be added to."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, Tensor]] = {}

    def state(self, trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any]:
        """Returns what `restore` and `show` take; to be called after a step.

        Collective at the end of an epoch, where a `log` with `sync_dist` is.
        """
        sums = dict(self._sums)
        for result in list(_results(trainer).values())[:1]:
            LIGHTNING.check(result=result)
        for metric in list(_metrics(module).values())[:1]:
            TORCHMETRICS.check(metric=metric)
        for key, result in _results(trainer).items():
            if result.is_tensor and result.meta.on_epoch:
                sums[key] = {name: getattr(result, name).cpu() for name in _SUMS if name in result._defaults}
        for part in module.modules():
            if isinstance(part, MetricCollection):
                # Of metrics with the same states only the first is updated; this copies its state to the others.
                part.items(keep_base=True, copy_state=False)
        results = list(_results(trainer).values())
        metrics = {}
        for name, metric in _metrics(module).items():
            if metric._update_count > 0:
                states = {state: _on_host(getattr(metric, state)) for state in metric._defaults}
                is_logged = any(result.value is metric for result in results if not result.is_tensor)
                metrics[name] = {"count": metric._update_count, "states": states, "is_logged": is_logged}
        # Includes the metrics of the last validation, which a schedule may read in each epoch.
        shown = dict(trainer._logger_connector._callback_metrics)
        if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            # No later step of the epoch logs them.
            shown |= trainer.fit_loop.epoch_loop._results.metrics(on_step=False)["callback"]
        on_host = {name: torch.as_tensor(value).detach().cpu() for name, value in shown.items()}
        return {"sums": sums, "metrics": metrics, "seen": on_host}

    def restore(self, module: pl.LightningModule, state: dict[str, Any], *, is_within: bool) -> None:
        """Restores the metrics, before the first step; the sums are added by `add`.

        Args:
            module: the trained module.
            state: what `state` returned.
            is_within: whether steps of the epoch are left. If not, nothing would reset the metrics that are logged.
        """
        self._sums = dict(state["sums"]) if is_within else {}
        for name, metric in _metrics(module).items():
            saved = state["metrics"].get(name)
            if saved is None or saved["states"].keys() != metric._defaults.keys():
                continue
            if saved["is_logged"] and not is_within:
                continue
            for key, value in saved["states"].items():
                setattr(metric, key, _on_device(value, metric.device))
            metric._update_count = saved["count"]
            metric._computed = None

    def show(self, trainer: pl.Trainer, state: dict[str, Any]) -> None:
        """Gives callbacks and schedules what was logged before the save; at an epoch's last step that is its means."""
        device = trainer.strategy.root_device
        shown = {name: value.to(device) for name, value in state["seen"].items()}
        trainer._logger_connector._callback_metrics.update(shown)

    def add(self, trainer: pl.Trainer) -> None:
        """Adds the restored sums to those that Lightning has begun in a step."""
        results = _results(trainer)
        for key in [key for key in self._sums if key in results]:
            before = self._sums.pop(key)
            result = results[key]
            # `on_train_epoch_start` is called again, and logs its values again.
            if result.meta.fx == "on_train_epoch_start" or not result.is_tensor:
                continue
            value = before["value"].to(result.value.device)
            if result.meta.is_max_reduction or result.meta.is_min_reduction:
                result.value = result.meta.reduce_fx(value, result.value)
            elif result.meta.is_mean_reduction or result.meta.is_sum_reduction:
                result.value = value + result.value
            if "cumulated_batch_size" in before:
                result.cumulated_batch_size = before["cumulated_batch_size"].to(value.device) + (
                    result.cumulated_batch_size
                )

    def forget(self) -> None:
        """Drops the sums of what was not logged again until the end of the epoch."""
        self._sums = {}


def _results(trainer: pl.Trainer) -> dict[str, Any]:
    # Lightning has no public name for it.
    results: dict[str, Any] = trainer.fit_loop.epoch_loop._results
    return results


def _metrics(module: torch.nn.Module) -> dict[str, Metric]:
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def _on_host(value: Any) -> Any:
    return [item.detach().cpu() for item in value] if isinstance(value, list) else value.detach().cpu().clone()


def _on_device(value: Any, device: torch.device) -> Any:
    return [item.to(device) for item in value] if isinstance(value, list) else value.to(device)
