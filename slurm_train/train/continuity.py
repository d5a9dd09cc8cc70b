"""Whether a checkpoint is of the same training as this attempt: the same settings, code and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from slurm_train.checkpoint.manifest import Manifest
from slurm_train.code.snapshot import digest_code, names_own_code, read_index
from slurm_train.config.frozen import trained_settings, training_changes
from slurm_train.config.schema import RunConfig
from slurm_train.errors import DataError, RunError
from slurm_train.rundir.events import (
    AcceptedChange,
    covers_code,
    covers_config,
    covers_data,
    is_same_data,
    read_changes,
)
from slurm_train.rundir.paths import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationBasis:
    """What the evaluations of an attempt measure: numbers of another one are not compared with theirs."""

    data: str
    """Fingerprint of the held-out samples."""
    num_samples: int
    """How many of them are evaluated."""
    averaged: bool = False
    """Whether averaged weights are measured, and not the trained ones."""

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> EvaluationBasis | None:
        """Returns what `asdict` gave; None for None, which is of a version that did not record it."""
        return None if values is None else cls(**values)

    def differs_from(self, other: EvaluationBasis | None) -> bool:
        """Returns whether another attempt is known to have measured something else."""
        if other is None:
            return False
        is_same = (self.num_samples, self.averaged) == (other.num_samples, other.averaged)
        return not (is_same and is_same_data(self.data, other.data))

    def __str__(self) -> str:
        weights = "averaged" if self.averaged else "trained"
        return f"{weights} weights on {self.num_samples} held-out samples of fingerprint {self.data}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuity:
    """What this attempt trains; every checkpoint holds the same facts.

    The login half compares them before anything is submitted. Here they are compared again, since files may have been
    edited by hand, and only the ranks can open some data.
    """

    run: RunDirectory
    settings: dict[str, Any]
    """The settings that the training depends on, by dotted key."""
    code: str
    """Digest of the code snapshot, "" where there is none."""
    same_code: frozenset[str]
    """Both digests of this snapshot: the one for settings that name code of the user, and the one for other settings.

    An accepted change of the settings may remove the only such name, or add the first one, so the digest in a
    checkpoint may be either."""
    data: str
    """Fingerprint of the data set."""
    num_samples: int
    """Samples of one epoch."""
    changes: list[AcceptedChange]
    """What was accepted in the middle of the run so far."""
    measured: EvaluationBasis | None = None
    """What is evaluated; None where nothing is."""

    def as_extra(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it."""
        facts: dict[str, Any] = {"settings": self.settings, "code": self.code, "num_samples": self.num_samples}
        if self.measured is not None:
            facts["measured"] = asdict(self.measured)
        accepted = [{"number": item.number, "step": item.step, "names": item.names} for item in self.changes]
        return {**facts, "changes": accepted} if accepted else facts

    def reason_against(self, manifest: Manifest) -> str:
        """Returns why the run must not continue from a checkpoint on the nodes' disks, "" where it may.

        A change is accepted from the newest checkpoint in the run directory on, so a checkpoint of a later step without
        the change is not a part of the run.
        """
        accepted_numbers = [accepted["number"] for accepted in manifest.extra.get("changes", ())]
        for change in self.changes:
            if change.number not in accepted_numbers and manifest.step > change.step:
                return f"{', '.join(change.names)} was changed, as accepted, from step {change.step} on"
        try:
            self.check(manifest)
        except (RunError, DataError) as err:
            return err.message
        return ""

    def note_on_measures(self, manifest: Manifest) -> str | None:
        """Returns a note for the user where evaluations measure something else than those before a checkpoint."""
        before = EvaluationBasis.of(manifest.extra.get("measured"))
        if self.measured is None or not self.measured.differs_from(before):
            return None
        return (
            f"evaluations measure something else than up to step {manifest.step}, {before} before and {self.measured} "
            "now: no callback compares new measures with older ones"
        )

    def check(self, manifest: Manifest) -> list[str]:
        """Returns notes for the user about accepted changes that this checkpoint does not have yet.

        Raises:
            RunError: settings or code are not those of the checkpoint, and the change was not accepted.
            DataError: the same for the data set.
        """
        trained = manifest.extra
        step = manifest.step
        since = f"from step {manifest.step} on, as accepted:"
        accept = f"accept it: `resume {self.run.run_id} --accept"
        changes = [
            change
            for change in training_changes(trained.get("settings") or self.settings, self.settings)
            if change.kind != "harmless"
        ]
        not_accepted = [change for change in changes if not covers_config(self.changes, change.key, change.new)]
        if not_accepted:
            raise RunError(
                f"{self.run.config} is not what step {step} was trained with: {', '.join(map(str, not_accepted))}",
                hint=f"put it back, or {accept} config`",
            )
        notes = [f"{since} {change}" for change in changes]
        if self.code and trained.get("code") not in ("", None, *self.same_code):
            if not covers_code(self.changes, self.code):
                raise RunError(
                    f"the code in {self.run.code} is not what step {step} was trained with",
                    hint=f"{accept} code` takes your files as they are now",
                )
            notes.append(f"{since} other code")
        old = manifest.data_fingerprint
        if not is_same_data(old, self.data):
            difference = f"{trained.get('num_samples')} -> {self.num_samples} samples, fingerprint {old} -> {self.data}"
            if not covers_data(self.changes, old=old, new=self.data):
                raise DataError(
                    f"the data set has changed since step {step}: {difference}",
                    hint=f"bring the old data back, or {accept} data`; run.name=NAME starts another run",
                )
            notes.append(f"{since} another data set, {difference}")
        return notes


def build_continuity(
    run: RunDirectory,
    config: RunConfig,
    *,
    global_size: int,
    data: str,
    num_samples: int,
    measured: EvaluationBasis | None = None,
) -> Continuity:
    """Returns the facts of this attempt.

    Args:
        run: has the code snapshot and the accepted changes.
        config: the frozen configuration.
        global_size: samples per optimizer step.
        data: fingerprint of the training samples.
        num_samples: number of training samples.
        measured: what is evaluated; None where nothing is.
    """
    index = read_index(run)
    codes = {} if index is None else {is_own: digest_code(index, is_own_code=is_own) for is_own in (True, False)}
    return Continuity(
        run=run,
        settings=trained_settings(config, global_size=global_size),
        code=codes.get(names_own_code(config), ""),
        same_code=frozenset(codes.values()),
        data=data,
        num_samples=num_samples,
        changes=read_changes(run),
        measured=measured,
    )
