"""The same training under each peer: how it is submitted, and where its steps, end and checkpoints are seen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from docs.peers.common_training import LOCAL_SIZE, NUM_RANKS, SAVE_EVERY, STEPS
from docs.peers.outcome import StepDone
from slurm_train.rundir.files import read_lines
from tests.support.command_line import REPOSITORY, Person


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a training is given."""

    name: str
    step_s: float
    gate: str = ""
    qos: str = "normal"
    time_limit_min: int = 30
    warn_s: int = 30
    """Lead of the signal before the limit, where it can be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training under way.

    Args:
        steps_file: has a line with "step" for each step that was done, again where it was done again.
        done_file: exists when all steps are done, and has the weights' digest.
        checkpoints: where checkpoints are written to.
    """

    peer: str
    job_id: str
    steps_file: Path
    done_file: Path
    checkpoints: Path

    @property
    def steps(self) -> list[StepDone]:
        """The steps that were done, in order; the line of an evaluation is none."""
        lines = (line for line in read_lines(self.steps_file) if "eval_loss" not in line)
        return [StepDone(line["step"], line["attempt"] if "attempt" in line else line["start"]) for line in lines]

    @property
    def digest(self) -> str:
        """Of the last weights, "" where the training is not finished."""
        return str(json.loads(self.done_file.read_text())["weights_digest"]) if self.done_file.exists() else ""

    @property
    def newest_checkpoint(self) -> Path:
        """The largest file of the checkpoint that was written last."""
        files = [
            path
            for path in self.checkpoints.rglob("*")
            if path.is_file() and path.suffix in (".pt", ".ckpt", ".distcp")
        ]
        newest = max(files, key=lambda path: path.stat().st_mtime_ns).parent
        return max((path for path in files if path.parent == newest), key=_weight)


def _weight(path: Path) -> tuple[int, int]:
    # Lightning copies a checkpoint to last.ckpt, and that is what it loads.
    return (path.name == "last.ckpt", path.stat().st_size)


Submit = Callable[[Person, Wish], Job]


def submit_own(person: Person, wish: Wish) -> Job:
    """This toolkit, as one types it."""
    words = (
        f"+cluster=1x{NUM_RANKS}",
        "model._target_=docs.peers.common_training.Tiny",
        "data._target_=docs.peers.common_training.Numbers",
        f"model.step_s={wish.step_s}",
        f"model.gate={wish.gate or repr('')}",
        f"train.max_steps={STEPS}",
        "train.eval_every_steps=null",
        "train.log_every_steps=1",
        "train.sample_tokens=0",
        f"batch.global_size={LOCAL_SIZE * NUM_RANKS}",
        f"checkpoint.every_steps={SAVE_EVERY}",
        f"run.name={wish.name}-own",
        f"cluster.qos={wish.qos}",
        f"cluster.time_limit_min={wish.time_limit_min}",
        f"requeue.warn_before_limit_s={wish.warn_s}",
    )
    job_id, run = person.types(*words).job_and_run
    return Job(
        peer="own",
        job_id=job_id,
        steps_file=run.metrics,
        done_file=run.result,
        checkpoints=run.checkpoints,
    )


_SUBMITIT = """
import json, sys
import submitit
from docs.peers.submitit_training import Training
folder, step_s, gate, parameters = sys.argv[1], float(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
executor = submitit.AutoExecutor(folder=folder + "/submitit", cluster="slurm")
executor.update_parameters(nodes=1, tasks_per_node=2, cpus_per_task=1, **parameters)
print(executor.submit(Training(), folder, step_s, gate).job_id)
"""


def submit_submitit(person: Person, wish: Wish, *, best: bool) -> Job:
    """submitit's Checkpointable: with its default settings, or with TERM as the signal to save and requeue at."""
    peer = "submitit-best" if best else "submitit"
    folder = _folder(person, wish, peer)
    parameters = {"timeout_min": wish.time_limit_min, "slurm_qos": wish.qos, "name": f"{wish.name}-{peer}"}
    env = {}
    if best:
        parameters["slurm_signal_delay_s"] = wish.warn_s
        env = {"SUBMITIT_PREEMPT_SIGNAL": "TERM"}
    words = (sys.executable, "-c", _SUBMITIT, str(folder), str(wish.step_s), wish.gate, json.dumps(parameters))
    return _job(peer, person.runs(*words, env=env).out, folder)


def submit_lightning(person: Person, wish: Wish, *, best: bool) -> Job:
    """Lightning's auto-requeue in an sbatch script: with SIGUSR1 as documented, or with SIGTERM."""
    peer, requeue_signal = ("lightning-best", "SIGTERM") if best else ("lightning", "SIGUSR1")
    folder = _folder(person, wish, peer)
    script = f"""#!/bin/bash
#SBATCH --job-name={wish.name}-{peer}
#SBATCH --nodes=1
#SBATCH --ntasks-per-node={NUM_RANKS}
#SBATCH --cpus-per-task=1
#SBATCH --time={wish.time_limit_min}
#SBATCH --qos={wish.qos}
#SBATCH --signal={requeue_signal}@{wish.warn_s}
#SBATCH --output={folder}/log.txt
#SBATCH --open-mode=append
#SBATCH --requeue
srun {sys.executable} -m docs.peers.lightning_training {folder} {wish.step_s} {requeue_signal} '{wish.gate}'
"""
    (folder / "job.sh").write_text(script)
    return _job(peer, person.runs("sbatch", "--parsable", f"--chdir={REPOSITORY}", str(folder / "job.sh")).out, folder)


def submit_session(person: Person, wish: Wish, *, library: str) -> Job:
    """The library's training as a script of this toolkit, with the adapter of the library."""
    peer = f"own-{library}"
    folder = _folder(person, wish, peer)
    script = REPOSITORY / f"docs/peers/session_{library}_training.py"
    words = (
        f"+cluster=1x{NUM_RANKS}",
        f"script=[{script},{folder},{wish.step_s},{wish.gate or repr('')}]",
        f"run.name={wish.name}-{peer}",
        f"cluster.qos={wish.qos}",
        f"cluster.time_limit_min={wish.time_limit_min}",
        f"requeue.warn_before_limit_s={wish.warn_s}",
    )
    job_id, run = person.types(*words).job_and_run
    return replace(_job(peer, job_id, folder), checkpoints=run.checkpoints)


PEERS: dict[str, tuple[str, Submit]] = {
    "own": ("slurm_train", submit_own),
    "own-lightning": ("Lightning in slurm_train", lambda *words: submit_session(*words, library="lightning")),
    "own-transformers": ("HF Trainer in slurm_train", lambda *words: submit_session(*words, library="transformers")),
    "submitit": ("submitit Checkpointable, default settings", lambda *words: submit_submitit(*words, best=False)),
    "submitit-best": ("submitit, SUBMITIT_PREEMPT_SIGNAL=TERM", lambda *words: submit_submitit(*words, best=True)),
    "lightning": ("Lightning auto-requeue, as documented", lambda *words: submit_lightning(*words, best=False)),
    "lightning-best": ("Lightning, requeue_signal=SIGTERM", lambda *words: submit_lightning(*words, best=True)),
}
"""By the word for the command line: the name in the table, and how to submit."""


def _folder(person: Person, wish: Wish, peer: str) -> Path:
    folder = person.folder / f"{wish.name}-{peer}"
    folder.mkdir()
    return folder


def _job(peer: str, out: str, folder: Path) -> Job:
    words = out.split()
    assert words and words[-1].isdigit(), f"{peer} was not submitted: {out}"
    return Job(
        peer=peer,
        job_id=words[-1],
        steps_file=folder / "steps.jsonl",
        done_file=folder / "done.json",
        checkpoints=folder,
    )


def end_jobs(jobs: list[Job]) -> None:
    """Cancels what is left of them, with KILL: at TERM some requeue themselves and come back."""
    ids = [job.job_id for job in jobs]
    for words in (("--signal=KILL", "--full"), ("--state=PENDING",), ()):
        subprocess.run(["scancel", "--quiet", *words, *ids], check=False, timeout=60)
