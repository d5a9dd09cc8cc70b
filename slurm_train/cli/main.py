"""Picks the verb: a bare first word is one, everything else are settings of a run.

Verbs are imported when they are used, so each costs only what it needs; none but the worker's imports torch.
"""

from __future__ import annotations

import gc
import os
import pwd
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from slurm_train.errors import ConfigError, SlurmTrainError

_GC_THRESHOLD = 20_000
"""New objects that may have references to others before the collector looks at them; Python's default is 700."""
VERBS = {
    "plan": "print batch arithmetic, ranks and the exact script; submit nothing",
    "status": "table of runs: state, step, loss, speed, nodes, reason; -w goes on looking",
    "logs": "print a run's log and which rank failed first; -f follows it",
    "cancel": "end a run's job",
    "resume": "continue an unfinished run from its newest checkpoint",
    "collate": "table of a sweep: values, best and last metrics, attempts, GPU-hours",
    "report": "one HTML page of a run or sweep: curves, speed, where the hours went; needs no network",
    "diff": "what differs between two runs: configuration, code, environment",
    "track": "send a run's metrics to its trackers: what its job could not send",
    "scaling": "short runs from one rank to all nodes: what limits, and whether more nodes pay",
    "checkpoint": "ls and verify the checkpoints of a run",
    "write": "write a run directory and start nothing, for a launcher of your own (torchrun)",
    "prepare": "turn text files into token shards",
    "doctor": "what this cluster does to a run; with +cluster=NxG: are its nodes and its network fit?",
    "init": "look at this cluster and write a site file for it, to be chosen by site=NAME",
    "devcluster": "a real Slurm on this one machine, for trying and testing",
    "completion": "print the script that completes words in bash, zsh or fish",
}
# What the job, the shell and other verbs call; people do not.
_INNER_VERBS = ("supervise", "torchrun", "worker", "complete", "measure")

_HELP_HEAD = """\
Slurm-native training for PyTorch: one line plans, submits, watches, checkpoints and finishes a run.

  python -m slurm_train                              train here, on this machine's GPUs or cores
  python -m slurm_train +cluster=4x8                 submit to Slurm: 4 nodes with 8 GPUs each
  python -m slurm_train +cluster=4x8 optim.lr=3e-4   settings are key=value, as in Hydra
  python -m slurm_train -m +cluster=1x8 optim.lr=1e-3,3e-4 "seed=range(8)"      16 runs as one job array
  python -m slurm_train plan +cluster=4x8            look first: arithmetic, ranks, the exact script
  python -m slurm_train +experiment=digits           another model and data set
  python -m slurm_train model._target_=my_package.MyModel data._target_=my_package.MyData
  python -m slurm_train +cluster=2x4 task._target_=my_package.main      your function on every rank
  python -m slurm_train +cluster=2x4 "script=[train.py,--epochs,3]"     your script on every rank

verbs (`python -m slurm_train VERB --help` tells more):
"""
_HELP_TAIL = """
settings and flags:
  key=value            any key of the configuration; --cfg job prints them all
  --config-dir DIR     YAML files of your own; they may shadow the shipped ones
  --config-path DIR    likewise, in front of --config-dir
  --config-name NAME   another primary file than config.yaml
  -m, --multirun       several values make several runs: key=1,2,3, "key=range(8)", key=choice(a,b)
  --wait               with -m: return when all runs have ended
  --cfg job            print the composed configuration and do nothing
  --info               facts about the composition
  --hydra-help         what Hydra's own flags and settings (hydra.run.dir, ...) do here
  --version            versions of this program and of Hydra
"""


def run(words: Sequence[str]) -> int:
    """Runs a command line; returns its exit code (0 done, 1 failure, 2 wrong use, 75 wants to be run again)."""
    _stand_in_for_passwd()
    try:
        verb, rest = _split(words)
        code = _dispatch(verb, rest)
        # A closed pipe is met here rather than when the interpreter ends.
        sys.stdout.flush()
        return code
    except SlurmTrainError as err:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            import traceback

            traceback.print_exc()
        print(f"error: {err}", file=sys.stderr, flush=True)
        return err.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `... | head` closed the pipe; what is still buffered must go somewhere when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _stand_in_for_passwd() -> None:
    """Sets HOME and USER for a uid without an entry in passwd, as in containers; libraries fail without them.

    The home is "/", as container runtimes have it: nothing is found there, and nothing is written.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("HOME", "/")
        os.environ.setdefault("USER", str(os.getuid()))


def _dispatch(verb: str | None, rest: list[str]) -> int:
    if verb is None and any(word in ("--help", "-h") for word in rest):
        print(help_text())
        return 0
    # A rank runs a user's code, which keeps Python's own settings.
    load = import_module if verb == "worker" else _load
    return int(load(f"slurm_train.cli.{verb or 'run'}").main(rest))


def _load(name: str) -> ModuleType:
    """Returns an imported module; what the import has made is never looked at by the garbage collector.

    A command that lives for a fifth of a second gains a tenth of it. From then on the collector is on, with a first
    threshold that short commands do not reach: some verbs live for days.
    """
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        gc.enable()


def help_text() -> str:
    """Returns the text of `--help`."""
    table = "\n".join(f"  {name:<20} {text}" for name, text in VERBS.items())
    return f"{_HELP_HEAD}{table}\n{_HELP_TAIL}"


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    if words and words[0] in (*VERBS, *_INNER_VERBS):
        return words[0], list(words[1:])
    if words and words[0].isidentifier():
        raise _unknown_verb(words[0])
    return None, list(words)


def _unknown_verb(word: str) -> ConfigError:
    from difflib import get_close_matches

    near = get_close_matches(word, VERBS, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"verbs: {', '.join(VERBS)}; settings are written key=value"
    return ConfigError(f"{word!r} is neither a verb nor a setting", hint=hint)
