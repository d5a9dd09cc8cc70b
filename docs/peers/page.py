"""docs/peers.md, written from the kept outcomes."""

from __future__ import annotations

import datetime
from importlib.metadata import version
from pathlib import Path

from docs.peers.common_training import AT_STEP, NUM_RANKS, SAVE_EVERY, STEPS
from docs.peers.faults import FAULTS
from docs.peers.job import PEERS
from docs.peers.outcome import read, table

PAGE = Path(__file__).parents[1] / "peers.md"

_PAGE = """# The same faults, side by side

The same training ({ranks} ranks on one node, {steps} steps, a checkpoint every {save} steps) under this toolkit,
submitit {submitit} and Lightning {lightning}, on the one-machine Slurm cluster; torch {torch}, {date}. Every fault
comes after step {at}, to all of them in the same way. The scripts are in `docs/peers`;
`python -m docs.peers --write` runs them and writes this page (about 15 minutes, with the cluster for
itself).

{table}

How to read it: the job's state in Slurm when nothing more happened, how often it was restarted, whether all steps were
done with nobody awake, how many were done twice or never, whether old ranks went on beside the new ones (those of a
lost node live on, and write the same files), and whether the last weights have the bits of the peer's own undisturbed
run. Bold is what a person would not want. Where a node is lost, the checkpoint that its ranks write after the new ranks
have begun is refused here, so all steps since the one before are done again; the peers load it.

## What was given to each

- **submitit** is the user's loop in a `Checkpointable`. The user has written what a checkpoint holds, its atomic
  replacement, finding it again and taking up the data in the middle of an epoch: about 40 of the 70 lines. With the
  default settings the signal is USR2, 90 s before the limit; Slurm preempts with TERM, which submitit logs and passes
  over. `SUBMITIT_PREEMPT_SIGNAL=TERM` makes it save and requeue then; that is its best setting here.
- **Lightning** is `SLURMEnvironment(auto_requeue=True)` in an sbatch script with `--signal=SIGUSR1@{warn}` as its
  documentation has it, `ModelCheckpoint(save_last=True)` and `ckpt_path="last"`, which brings back what was killed
  without a signal. The sbatch script is the user's. `requeue_signal=SIGTERM` is its best setting for preemption.
- **slurm_train** is one command line.

Both peers call `scontrol requeue` without asking Slurm why the signal came; TERM is also what `scancel` sends.
"""


def write_page() -> None:
    """Writes the page."""
    names = {peer: name for peer, (name, _) in PEERS.items()}
    faults = {name: (fault.what, fault.ends_cancelled) for name, fault in FAULTS.items()}
    text = _PAGE.format(
        ranks=NUM_RANKS,
        steps=STEPS,
        save=SAVE_EVERY,
        at=AT_STEP,
        warn=30,
        submitit=version("submitit"),
        lightning=version("lightning"),
        torch=version("torch"),
        date=datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        table=table(read(), peers=names, faults=faults),
    )
    PAGE.write_text(text, encoding="utf-8")
