"""Renders the batch script: a pure function of the plan, compared with a golden file in the tests.

Every value that reaches the text passes one of two guards of `slurm.flags`: one for what sbatch reads, one for
what bash reads. The template is plain bash; decisions are taken here.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurm_train.assets import read_template
from slurm_train.errors import ConfigError
from slurm_train.launch.container import Ranks
from slurm_train.launch.plan import RunPlan
from slurm_train.launch.resources import job_environment, sbatch_components, srun_flags
from slurm_train.slurm.flags import (
    Flags,
    check_env_name,
    check_env_value,
    check_flag_name,
    check_flag_value,
    sbatch_line,
)


def render_script(plan: RunPlan, *, default_python: str = sys.executable, package: Path | None = None) -> str:
    """Returns the text of `submit.sh`.

    Args:
        plan: the run; it must ask for a cluster.
        default_python: interpreter in the job where `cluster.python` names none.
        package: the folder of this package on the nodes, for containers; default: where it lies here.

    Raises:
        ConfigError: a value that cannot reach the script unchanged, with the key it came from.
    """
    cluster = plan.config.cluster
    assert cluster is not None
    python = cluster.python or default_python
    _require_absolute("cluster.python", python)
    ranks, exports = Ranks(plan.config, plan.run, plan.directory, package), job_environment(plan.config)
    return read_template("run.sh").format(
        title=f"{plan.run.name}/{plan.run.run_id}: {_what_runs(plan)}",
        sbatch="\n#SBATCH hetjob\n".join("\n".join(_sbatch_lines(flags)) for flags in sbatch_components(plan)),
        exports="\n".join(_export_lines(exports)),
        setup="\n".join(_setup_line(line) for line in cluster.setup),
        python=shlex.quote(python),
        run=shlex.quote(str(plan.run.path)),
        srun=" ".join([*_srun_words(srun_flags(plan)), *_container_words(ranks.step_flags(exports), cluster.srun)]),
        worker=" ".join(_quoted(word) for word in ranks.command(python=python)),
    )


def _quoted(word: str) -> str:
    if not word.isprintable():
        raise ConfigError(f"{word!r} cannot be a word of the batch script", hint="remove what cannot be printed")
    return shlex.quote(word)


def _what_runs(plan: RunPlan) -> str:
    """Returns what the ranks do, in a line; the batch of a user's own script or function is not known."""
    if plan.config.trains:
        return f"global batch {plan.batch.as_sum()}"
    # Not its arguments, which may hold a secret; and on one line, since this is a comment.
    name = plan.config.script[0] if plan.config.script else str((plan.config.task or {}).get("_target_"))
    return " ".join(f"{name} on {plan.world.size} ranks".split())


def _sbatch_lines(flags: Flags) -> list[str]:
    lines = []
    for name, value in flags.items():
        with _naming(f"--{name}"):
            lines.append(sbatch_line(name, None if value is True else str(value)))
    return lines


def _srun_words(flags: Flags) -> list[str]:
    words = ["srun"]
    for name, value in flags.items():
        with _naming(f"srun --{name}"):
            flag = f"--{check_flag_name(name)}"
            words.append(flag if value is True else f"{flag}={check_flag_value(str(value))}")
    return words


def _container_words(flags: Mapping[str, str], own: Mapping[str, Any]) -> list[str]:
    # Lists of mounts and variables may be longer than what Slurm itself takes.
    twice = [name for name in own if name.replace("_", "-") in flags]
    if twice:
        raise ConfigError(
            f"cluster.srun.{twice[0]} and container.* both say what runs the ranks",
            hint="use container.image and container.mounts, or leave the container out",
        )
    return [f"--{name}={_quoted(value)}" for name, value in flags.items()]


def _export_lines(variables: Mapping[str, str]) -> list[str]:
    lines = []
    for name, value in variables.items():
        with _naming(f"export {name}"):
            lines.append(f"export {check_env_name(name)}={check_env_value(value)}")
    return lines


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Puts the flag or variable in front of what is wrong with its value."""
    try:
        yield
    except ConfigError as err:
        shown = what if what.isprintable() else repr(what)
        raise ConfigError(f"{shown}: {err.message}", hint=err.hint) from err


def _setup_line(line: str) -> str:
    # A setup line is the user's own shell and stays as it is, but it stays one line.
    if not line.isprintable():
        raise ConfigError(
            f"cluster.setup has a line break or control character: {line!r}",
            hint="give each shell line as an item of its own",
        )
    return line


def _require_absolute(key: str, path: str) -> None:
    if not Path(path).is_absolute() or not path.isprintable():
        raise ConfigError(f"{key}={path!r} is not an absolute path", hint="name the interpreter with its full path")
