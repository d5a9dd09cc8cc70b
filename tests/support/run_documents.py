"""Documents of runs that were never trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurm_train.config.schema import CheckpointSection, OptimSection, RunConfig, RunSection
from slurm_train.rundir.timing import PaceWindow, RankPace, Slowdown
from slurm_train.tools.report.page import Document
from slurm_train.tools.report.run import run_document
from tests.support.run_files import BEGAN_UNIX_S, RunFiles, ended, evaluated, run_in, steps

HANG = {"event": "hang", "attempt": 0, "step": 50, "time_unix_s": BEGAN_UNIX_S + 50, "sentence": "rank 5 hangs"}
SAVE = {"attempt": 0, "step": 50, "bytes": 2048, "stall_s": 0.01, "save_s": 0.4, "time_unix_s": BEGAN_UNIX_S + 50}
SLOW = Slowdown(
    kind="straggler",
    ranks=(2,),
    hosts=("node2",),
    factor=1.6,
    lost_share=0.36,
    sentence="rank 2 on node2 is 1.60x as slow as the others",
    advice="see what else runs on node2",
)


def document_of(folder: Path, state: str = "finished", note: str = "", *, nodelist: str = "", **files: Any) -> Document:
    """Writes the files of a run and returns its document."""
    run = RunFiles(**files).write(run_in(folder))
    return run_document(run, state=state, note=note, nodelist=nodelist, now_unix_s=BEGAN_UNIX_S + 5000)


def window(number: int, *own_s: float, attempt: int = 0, findings: tuple[Slowdown, ...] = ()) -> PaceWindow:
    """Returns a window of ten seconds; ranks wait for the slowest."""
    begin = BEGAN_UNIX_S + 10.0 * number
    return PaceWindow(
        attempt=attempt,
        begin_unix_s=begin,
        end_unix_s=begin + 10.0,
        from_step=100 * number,
        to_step=100 * number + 100,
        samples=9,
        ranks=tuple(
            RankPace(
                rank=rank, host=f"node{rank // 2 + 1}", own_s=one, wait_s=max(own_s) - one, data_s=0.0, uneven_s=0.0
            )
            for rank, one in enumerate(own_s)
        ),
        findings=findings,
    )


def full_document(folder: Path) -> Document:
    """Returns a run of three attempts with evaluations, events, saves, ranks and a straggler."""
    metrics = [*steps(1, 60), *steps(51, 100, attempt=1), *steps(90, 100, attempt=2, mfu=0.4)]
    slowed = [0.1, 0.1, 0.16, 0.1]
    return document_of(
        folder,
        ledger=[*ended(0, reason="preempted"), *ended(1, reason="failed", note="rank 1: Killed"), *ended(2)],
        metrics=[*metrics, evaluated(100, attempt=2, eval_loss=1.5, eval_accuracy=0.9)],
        events=[HANG],
        saves=[SAVE, {**SAVE, "step": 60, "bytes": 0, "error": "no space left"}],
        result={"step": 100, "eval_loss": 1.4999},
        provenance={"words": ["optim.lr=1e-3"], "git_commit": "abc", "git_dirty": True, "git_diff": "+x\n-y\n z"},
        slow_ranks={0: 0.1, 1: 0.1, 2: 0.2},
        windows=[window(0, 0.1, 0.1, 0.1, 0.1), *(window(at, *slowed, findings=(SLOW,)) for at in (1, 2, 3))],
    )


def hostile_document(folder: Path, text: str) -> Document:
    """Returns a run with a text wherever a text of others can be."""
    config = RunConfig(
        run=RunSection(name="hostile"),
        optim=OptimSection(lr=0.5),
        checkpoint=CheckpointSection(local_dir=text),
        model={"_target_": text, text: text},
        data={text: [text]},
    )
    entry = ended(0, reason=text, note=text * 40, job_id=text)
    entry[0]["nodes"] = [text, f"{text}1"]
    return document_of(
        folder,
        text,
        text,
        config=config,
        ledger=entry,
        metrics=[*steps(1, 3), evaluated(3, **{"eval_loss": 1.0, f"eval_{text}": 2.0})],
        events=[{"event": text, "attempt": 0, "step": 2, "time_unix_s": BEGAN_UNIX_S, "sentence": text, text: text}],
        saves=[SAVE, {**SAVE, "error": text}],
        provenance={"words": [text], "git_diff": f"+{text}", text: text, "git_commit": text},
        slow_ranks={0: 0.1},
    )
