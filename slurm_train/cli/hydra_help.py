"""`--hydra-help` and `--version`: what stands in for Hydra's own answers."""

from __future__ import annotations

from importlib.metadata import version

import slurm_train

_TEXT = """\
The command line is Hydra's: the grammar of overrides, groups, sweeps and interpolations. docs/hydra.md has all of it.

flags
  --cfg job|hydra|all     print the configuration and do nothing; --package NAME a part of it, --resolve its references
  --info [all|config|defaults|defaults-tree|plugins|searchpath]
  --config-dir DIR, -cd   YAML files of your own, in front of the shipped ones
  --config-path DIR, -cp  the same, in front of --config-dir; also pkg://package
  --config-name NAME, -cn another primary file than config.yaml
  --multirun, -m          a run of each value; --run, -r is what happens without it

settings to Hydra, typed or in a file of your own
  hydra.mode=MULTIRUN              as -m
  hydra.searchpath=[file://DIR]    more places for configurations, behind the shipped ones
  hydra.run.dir=PATH               a link at PATH leads to the run directory
  hydra.sweep.dir, hydra.sweep.subdir   the same for each run of a sweep
  hydra.output_subdir=.hydra       config.yaml, overrides.yaml and hydra.yaml in the run directory
  hydra.job.name=NAME              as run.name=NAME
  hydra.job.config.override_dirname.*   shapes ${hydra.job.override_dirname}
  hydra/launcher=basic             here, one run after the other
  hydra/sweeper=NAME, hydra.sweeper.*   another sweeper, e.g. optuna; hydra.sweeper.params is a sweep

refused, with what to type instead
  hydra/launcher=submitit_slurm, submitit_local, joblib: +cluster=<nodes>x<GPUs per node>, or nothing
  hydra.verbose, hydra.job_logging, hydra.hydra_logging, hydra.callbacks, hydra.job.chdir=true,
  hydra.job.env_set, hydra.job.env_copy, hydra.sweeper.max_batch_size, --shell-completion, --experimental-rerun
"""


def hydra_help_text() -> str:
    """Returns the text of `--hydra-help`."""
    return _TEXT.rstrip()


def version_text() -> str:
    """Returns the text of `--version`, e.g. "slurm_train 0.1.0, Hydra 1.3.2"."""
    return f"slurm_train {slurm_train.__version__}, Hydra {version('hydra-core')}"
