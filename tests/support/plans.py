"""Plans of runs for tests, made from plain mappings, without composing anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_train.config.compose import Composed
from slurm_train.config.schema import RunConfig, build_config
from slurm_train.plan.plan import RunPlan, plan_run
from slurm_train.request.batch_script import job_request

DEFAULTS: dict[str, Any] = {
    "model": {"_target_": "slurm_train.models.gpt.GPT", "width": 160},
    "data": {"_target_": "slurm_train.data.stdlib.build", "context": 256},
    "batch": {"global_size": 64},
    "optim": {"lr": 1e-3},
    "train": {"max_steps": 1000},
}


def composed(**sections: Any) -> Composed:
    """Returns a configuration of the default model and data with these sections instead of the default ones."""
    mapping = {**DEFAULTS, **sections}
    return Composed(build_config(RunConfig, mapping), mapping, {"model": "gpt", "data": "stdlib"})


def make_plan(cwd: Path | str = "/home/user/project", env: dict[str, str] | None = None, **sections: Any) -> RunPlan:
    """Returns the plan of such a configuration, as typed in `cwd`."""
    return plan_run(composed(**sections), cwd=Path(cwd), env={} if env is None else env)


def render_script(plan: RunPlan, **arguments: Any) -> str:
    """Returns the text of a run's `submit.sh`; the arguments are those of `job_request`."""
    return job_request(plan, **arguments).text()
