"""A script's own resume as that of the run: the words that it gets from its second start on, and whether it took them.

Programs have resumed by a word of theirs long before they knew this package (`--resume latest`,
`--resume_from_checkpoint DIR`, `--resume-from-step N`). It is added where the script has saved a checkpoint. Whether
the script takes it is seen by what it opens; `supervise.own_resume` ends one that begins anew. Imports no torch.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_train.distributed.place import RankPlace
from slurm_train.errors import RunError
from slurm_train.plan.script_words import PLACEHOLDER
from slurm_train.rundir.own_resume import OwnResume, mark_taken, read_own_resume, record_own_resume
from slurm_train.rundir.paths import RunDirectory

_SEEN_WITHIN_S = 60.0


def own_resume_words(
    words: Sequence[str], pattern: str, *, place: RankPlace, run: RunDirectory, attempt: int
) -> Sequence[str]:
    """Returns the words that a script gets at this start, the same on all ranks. On all ranks.

    Args:
        words: `own_resume.words` of the run.
        pattern: of the checkpoints, with the directory of the run in it; relative to the working directory.
        place: this rank.
        run: the run.
        attempt: number of the attempt.

    Raises:
        RunError: a name has no number where the words ask for one; or the record of rank 0 does not appear here.
    """
    if not words or not attempt:
        return ()
    if place.is_first:
        resume = choose_checkpoint(words, pattern)
        record_own_resume(run, attempt, resume)
        text = f"resumes by its own words: {' '.join(resume.words)}" if resume.words else f"begins anew: no {pattern}"
        print(f"slurm_train: attempt {attempt} {text}", file=sys.stderr)
        return resume.words
    found = read_own_resume(run, attempt, wait_s=_SEEN_WITHIN_S)
    if found is None:
        raise RunError(
            f"{run.own_resume(attempt)} did not appear within {_SEEN_WITHIN_S:g} s: rank 0 does not write to this run "
            "directory, or has failed",
            hint="see the log of rank 0",
        )
    return found.words


def choose_checkpoint(words: Sequence[str], pattern: str) -> OwnResume:
    """Returns the words with the newest checkpoint in them; none where nothing was saved.

    Args:
        words: with `{checkpoint}`, `{folder}` and `{step}`.
        pattern: of the checkpoints.

    Raises:
        RunError: `{step}` is asked for, and the name of the newest has no number.
    """
    found = [os.path.realpath(path) for path in glob.glob(pattern, recursive=True)]  # noqa: PTH207  # it has `**` inside
    by_age = sorted(found, key=_changed)
    if not by_age:
        return OwnResume(words=[], checkpoints=[])
    newest = by_age[-1]
    values = {"checkpoint": newest, "folder": str(Path(newest).parent), "step": _number_in(newest)}
    if not values["step"] and any("{step}" in word for word in words):
        raise RunError(
            f"own_resume.words has {{step}}, and the name of the newest checkpoint has no number: {newest}",
            hint="name files or folders with the number of the step by own_resume.checkpoints",
        )
    filled = [PLACEHOLDER.sub(lambda match: values[match[1]], word) for word in words]
    return OwnResume(words=filled, checkpoint=newest, checkpoints=by_age)


def _changed(path: str) -> tuple[int, str]:
    try:
        return Path(path).stat().st_mtime_ns, path
    except OSError:  # removed meanwhile
        return 0, path


def _number_in(path: str) -> str:
    """Returns the last number in the last part of a path that has one, "" for none: "out/checkpoint-40/state" is 40."""
    for part in reversed(Path(path).parts):
        numbers = re.findall(r"\d+", part)
        if numbers:
            return str(int(numbers[-1]))
    return ""


def note_opened_checkpoints(run_directory: str, env: Mapping[str, str]) -> None:
    """Has this process leave a mark when Python opens one of the checkpoints that the script may resume from.

    What C++ or Rust opens is not seen: `safetensors` alone, `tensorstore`.

    Args:
        run_directory: of the run.
        env: of the script.
    """
    run = RunDirectory(Path(run_directory))
    attempt = int(env.get("SLURM_TRAIN_ATTEMPT", "0"))
    resume = read_own_resume(run, attempt)
    if resume is None or not resume.words:
        return
    below = tuple(f"{path}/" for path in resume.checkpoints)
    is_done = False

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal is_done
        if is_done or event != "open":
            return
        path, _, flags = arguments
        # A descriptor was opened before.
        if flags & (os.O_WRONLY | os.O_TRUNC) or not isinstance(path, (str, bytes, os.PathLike)):
            return
        if f"{os.path.realpath(os.fsdecode(path))}/".startswith(below):
            is_done = True
            mark_taken(run, attempt)

    # It cannot be taken away again, and costs nothing once the mark is there.
    sys.addaudithook(note)
