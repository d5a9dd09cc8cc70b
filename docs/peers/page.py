"""docs/peers.md, written from the kept outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from docs.peers.common_training import AT_STEP, NUM_RANKS, SAVE_EVERY, STEPS
from docs.peers.faults import FAULTS
from docs.peers.job import PEERS
from docs.peers.outcome import Outcome, read, table

PAGE = Path(__file__).parents[1] / "peers.md"

_PAGE = """# The same faults, side by side

The same training ({ranks} ranks on one node, {steps} steps, a checkpoint every {save} steps) under this toolkit, as
a [program of Lightning or transformers](own-training-program.md) in it, under submitit {submitit} and under
Lightning {lightning}, on the one-machine Slurm cluster; torch {torch}, {dates}. Every fault comes after step {at}.
`python -m docs.peers --write` runs the scripts in `docs/peers` and writes this page (about 15 minutes; nothing else
should run on the cluster).

{table}

Each cell has the final state of the job in Slurm, the number of restarts, how many steps were done twice or never
without a person's help, whether old ranks continued beside the new ones, and whether the last weights are equal,
bit for bit, to those of the peer's own run without a fault. Bold marks unwanted results. Ranks of a lost node stay
alive, and write a checkpoint after the new ranks have begun. This toolkit refuses it, so all steps since the one
before are done again; the peers load it.

## How each was set up

- **submitit** is the user's loop in a `Checkpointable`. About 40 of the 70 lines are about what a checkpoint
  contains, how it is replaced and found, and how to continue in the middle of an epoch. By default the signal is
  USR2, 90 s before the limit; Slurm preempts with TERM, which submitit logs and ignores. With
  `SUBMITIT_PREEMPT_SIGNAL=TERM`, its best setting here, it saves and requeues at a preemption.
- **Lightning** is `SLURMEnvironment(auto_requeue=True)` in the user's sbatch script with `--signal=SIGUSR1@{warn}`
  as in its documentation, with `ModelCheckpoint(save_last=True)` and `ckpt_path="last"`, which resumes runs that
  were killed without a signal. `requeue_signal=SIGTERM` is its best setting for preemption.
- **slurm_train** is one command line.
- **Lightning in slurm_train** and **HF Trainer in slurm_train** (transformers {transformers}) are scripts with the
  library's own loop and checkpoints, and the callback of [Your own training
  program](own-training-program.md#which-lines-do-i-need), each started by one command line. That of Lightning has a
  `StatefulDataLoader` with a `DistributedSampler`, without which Lightning does not continue an epoch.

Both peers call `scontrol requeue` without asking Slurm for the reason of the signal, and `scancel` sends TERM, too.
"""


def write_page() -> None:
    """Writes the page."""
    names = {peer: name for peer, (name, _) in PEERS.items()}
    faults = {name: (fault.what, fault.ends_cancelled) for name, fault in FAULTS.items()}
    outcomes = read()
    text = _PAGE.format(
        ranks=NUM_RANKS,
        steps=STEPS,
        save=SAVE_EVERY,
        at=AT_STEP,
        warn=30,
        submitit=version("submitit"),
        lightning=version("lightning"),
        transformers=version("transformers"),
        torch=version("torch"),
        dates=dates_of(outcomes),
        table=table(outcomes, peers=names, faults=faults),
    )
    PAGE.write_text(text, encoding="utf-8")


def dates_of(outcomes: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Returns when the cells were measured: a day, or "FIRST to LAST"."""
    measured = [outcome.measured for by_peer in outcomes.values() for outcome in by_peer.values()]
    days = sorted(day for day in set(measured) if day)
    return " to ".join(dict.fromkeys((days[0], days[-1])))
