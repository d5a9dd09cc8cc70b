"""Every error this package raises on purpose, in one tree.

    SlurmTrainError
    ├── ConfigError          a word, key or value of the configuration is wrong
    │   └── BatchError       the batch arithmetic has no solution as asked
    ├── ClusterError         Slurm is absent, refuses, or has not what was asked
    ├── RunError             a run directory is missing, active, finished or unusable
    │   ├── TimedOutError    a run has not ended in the time that somebody waited
    │   ├── StudyError       a run has no value for the sweeper that waits for it
    │   └── NodesError       nodes of an allocation do not see or cannot write the run directory
    │       └── SilentNodesError  they do not answer, or not yet see what they should
    ├── DataError            a data set cannot be read or does not match
    ├── CheckpointError      a checkpoint cannot be written, verified or loaded
    │   └── UnknownCheckpointError   it cannot be read here, so it is not known whether it is whole
    │       └── OtherVersionError    another version has written what this one does not understand
    ├── PreflightError       the nodes of a job are not fit to train on
    └── RendezvousError      the ranks of a job did not find each other

A message says what was asked, what was found and what to do; `hint` carries the last part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slurm_train.formatting import printable

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_WRONG_USE = 2
# sysexits.h EX_TEMPFAIL: the run saved itself and wants to continue in another attempt.
EXIT_REQUEUE = 75
# sysexits.h EX_OSERR: whoever started the rank is gone (slurmstepd was killed).
EXIT_ORPHANED = 71


def exit_status(code: int) -> int:
    """Returns the byte that the system keeps of an exit code; a failure stays one, where 256 would be a success."""
    return code & 0xFF or (EXIT_FAILURE if code else EXIT_DONE)


class SlurmTrainError(Exception):
    """A failure that a person can act on.

    Args:
        message: what was asked and what was found, with values.
        hint: what to do about it; printed on a line of its own.
    """

    exit_code = EXIT_FAILURE

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = printable(message)
        self.hint = printable(hint)

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(SlurmTrainError):
    """A word, key or value of the configuration is wrong."""

    exit_code = EXIT_WRONG_USE


class BatchError(ConfigError):
    """The batch arithmetic has no solution as asked."""


class ClusterError(SlurmTrainError):
    """Slurm is absent, refuses the request, or has not what was asked."""

    exit_code = EXIT_WRONG_USE


Check = tuple[bool, str, str]
"""Whether something is wrong, what, and what to do."""


def require_all(checks: Iterable[Check], kind: type[SlurmTrainError] = ConfigError) -> None:
    """Raises an error of this kind for the first check that found something wrong."""
    for is_wrong, message, hint in checks:
        if is_wrong:
            raise kind(message, hint=hint)


class RunError(SlurmTrainError):
    """A run directory is missing, active, finished or unusable."""

    exit_code = EXIT_WRONG_USE


class TimedOutError(RunError, TimeoutError):
    """A run has not ended in the time that somebody waited; it goes on."""

    exit_code = EXIT_FAILURE


class StudyError(RunError):
    """A study ended without its best point: one of its runs has failed, or has no value for the sweeper."""

    exit_code = EXIT_FAILURE


class NodesError(RunError):
    """Nodes of an allocation do not see or cannot write the run directory.

    Args:
        message: what was asked and what was found.
        code: of the finding, e.g. "FS_READONLY".
        nodes: their names.
        hint: what to do about it.
    """

    def __init__(self, message: str, *, code: str, nodes: Sequence[str], hint: str) -> None:
        super().__init__(message, hint=hint)
        self.code, self.nodes = code, tuple(nodes)


class SilentNodesError(NodesError):
    """Nodes of an allocation do not answer, or are behind; asked again, or elsewhere, they may."""

    exit_code = EXIT_FAILURE


class DataError(SlurmTrainError):
    """A data set cannot be read or does not match the run."""

    exit_code = EXIT_WRONG_USE


class CheckpointError(SlurmTrainError):
    """A checkpoint cannot be written, verified or loaded."""


class UnknownCheckpointError(CheckpointError):
    """It is not known whether a checkpoint is whole: it cannot be read here. It is neither passed over nor removed."""


class OtherVersionError(UnknownCheckpointError):
    """Another version has written a checkpoint that this version does not understand."""

    exit_code = EXIT_WRONG_USE


class PreflightError(SlurmTrainError):
    """The nodes of a job are not fit to train on.

    Args:
        message: the worst finding in one line.
        hint: what to do about it.
        is_lasting: whether the same job would meet the same on any nodes, so that it is not tried again.
    """

    def __init__(self, message: str, *, hint: str, is_lasting: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = EXIT_WRONG_USE if is_lasting else EXIT_FAILURE


class RendezvousError(SlurmTrainError):
    """The ranks of a job did not find each other."""
