"""The states of a run, one word each: the same in `status`, `status --json`, `--state` and `resume --only`."""

from __future__ import annotations

import enum

from slurm_train.errors import ConfigError
from slurm_train.slurm.records import Phase


class RunState(enum.Enum):
    """Where a run stands; the value is the word in JSON and on the command line."""

    NOT_STARTED = "not_started"
    QUEUED = "queued"
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    NODE_FAILURE = "node_failure"
    OUT_OF_MEMORY = "out_of_memory"
    STOPPED = "stopped"
    REQUEUED = "requeued"
    LOST = "lost"
    INTERRUPTED = "interrupted"
    COMPLETED = "completed"
    UNKNOWN = "unknown"

    @property
    def label(self) -> str:
        """For people, e.g. "not started"."""
        return self.value.replace("_", " ")


MEANINGS = {
    RunState.NOT_STARTED: "no attempt has begun, and no job waits",
    RunState.QUEUED: "the job waits; the reason says for what",
    RunState.RUNNING: "an attempt is under way",
    RunState.FINISHING: "the job gives its nodes back",
    RunState.FINISHED: "it has a result",
    RunState.FAILED: "a rank or the batch script failed, and nobody starts it again",
    RunState.TIMEOUT: "the time limit ended it",
    RunState.CANCELLED: "somebody cancelled the job",
    RunState.PREEMPTED: "another job took its nodes",
    RunState.NODE_FAILURE: "a node was lost",
    RunState.OUT_OF_MEMORY: "it needed more memory than it had",
    RunState.STOPPED: "it was asked to save and stop",
    RunState.REQUEUED: "Slurm has put the job back into the queue",
    RunState.LOST: "the batch script was killed, and the next attempt noticed",
    RunState.INTERRUPTED: "an attempt began, did not say how it ended, and nothing of it is alive",
    RunState.COMPLETED: "Slurm calls the job completed, but there is no result",
    RunState.UNKNOWN: "the run saved itself, or Slurm uses a word that is not known here",
}
"""What each state means, for the documentation."""

_OF_PHASE = {phase: RunState(phase.value.replace(" ", "_")) for phase in Phase}
_OF_REASON = {"done": RunState.COMPLETED, "time_limit": RunState.TIMEOUT, "file_system": RunState.FAILED}
# Other words that people have for them.
_ALIASES = {"missing": RunState.NOT_STARTED, "time_limit": RunState.TIMEOUT, "pending": RunState.QUEUED}
STATE_WORDS = (*(state.value for state in RunState), "missing")
"""What one would type for a state."""


def state_of_phase(phase: Phase) -> RunState:
    """Returns the state of a run whose job is in this phase."""
    return _OF_PHASE[phase]


def state_of_reason(reason: str) -> RunState:
    """Returns the state of a run whose last attempt ended for this reason, as the ledger has it."""
    known = {state.value: state for state in RunState}
    return _OF_REASON.get(reason) or known.get(reason, RunState.UNKNOWN)


def read_states(text: str, *, option: str, of: tuple[RunState, ...] = tuple(RunState)) -> frozenset[RunState]:
    """Returns the states in a list with commas, e.g. "running,failed"; "not started" and "missing" are understood.

    Args:
        text: what was typed.
        option: where, for the message, e.g. "--state".
        of: the states that make sense there.

    Raises:
        ConfigError: a word that is none of them.
    """
    known = {state.value: state for state in of} | {word: state for word, state in _ALIASES.items() if state in of}
    words = [word.strip().lower().replace(" ", "_").replace("-", "_") for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        asked = f"there is no state {', '.join(map(repr, unknown))}" if unknown else "no state is named"
        raise ConfigError(f"{option} {text}: {asked}", hint=f"use {', '.join(state.value for state in of)}")
    return frozenset(known[word] for word in words)
