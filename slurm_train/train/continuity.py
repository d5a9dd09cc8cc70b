"""Whether a run goes on as what it was: settings, code and data of a checkpoint against those of this attempt.

The login half compares too, before anything is submitted. This is the last gate: it also sees files that were edited
by hand, and data that only the ranks can open.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slurm_train.config.frozen import trained_settings, training_changes
from slurm_train.config.schema import RunConfig
from slurm_train.errors import DataError, RunError
from slurm_train.launch.snapshot import digest_code, names_own_code, read_index
from slurm_train.rundir.events import AcceptedChange, covers_code, covers_config, covers_data, read_changes
from slurm_train.rundir.paths import RunDirectory

if TYPE_CHECKING:
    from slurm_train.checkpoint.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuity:
    """What this attempt trains: all of it stands in every checkpoint."""

    run: RunDirectory
    settings: dict[str, Any]
    """What decides the training, by dotted key."""
    code: str
    """Digest of the code snapshot, "" where there is none."""
    data: str
    """Fingerprint of the data set."""
    num_samples: int
    """Samples of one epoch."""
    changes: list[AcceptedChange]
    """What was accepted in the middle of the run so far."""

    def as_extra(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of it."""
        facts = {"settings": self.settings, "code": self.code, "num_samples": self.num_samples}
        accepted = [{"number": item.number, "step": item.step, "names": item.names} for item in self.changes]
        return {**facts, "changes": accepted} if accepted else facts

    def check(self, manifest: Manifest) -> list[str]:
        """Returns notes for the user about accepted changes that this checkpoint does not have yet.

        Raises:
            RunError: settings or code are not those of the checkpoint, and nobody accepted that.
            DataError: the data set is not.
        """
        return [*self._check_settings(manifest), *self._check_code(manifest), *self._check_data(manifest)]

    def _check_settings(self, manifest: Manifest) -> list[str]:
        trained = manifest.extra.get("settings")
        if not isinstance(trained, dict):
            return []
        found = [change for change in training_changes(trained, self.settings) if change.kind != "harmless"]
        left = [change for change in found if not covers_config(self.changes, change.key, change.new)]
        if left:
            raise RunError(
                f"{self.run.config} is not what step {manifest.step} was trained with: {', '.join(map(str, left))}",
                hint=f"put it back, or accept it: `resume {self.run.run_id} --accept config`",
            )
        return [f"from step {manifest.step} on, as accepted: {change}" for change in found]

    def _check_code(self, manifest: Manifest) -> list[str]:
        trained = manifest.extra.get("code")
        if not trained or not self.code or trained == self.code:
            return []
        if not covers_code(self.changes, self.code):
            raise RunError(
                f"the code in {self.run.code} is not what step {manifest.step} was trained with",
                hint=f"accept it: `resume {self.run.run_id} --accept code` takes your files as they are now",
            )
        return [f"from step {manifest.step} on, as accepted: other code"]

    def _check_data(self, manifest: Manifest) -> list[str]:
        old = manifest.data_fingerprint
        if old == self.data:
            return []
        before = manifest.extra.get("num_samples")
        sizes = f"{before} -> {self.num_samples} samples, " if before not in (None, self.num_samples) else ""
        what = f"{sizes}fingerprint {old} -> {self.data}"
        if not covers_data(self.changes, old=old, new=self.data):
            raise DataError(
                f"the data set has changed since step {manifest.step}: {what}",
                hint=f"bring the old data back, or accept it: `resume {self.run.run_id} --accept data`; "
                "run.name=NAME starts another run",
            )
        return [f"from step {manifest.step} on, as accepted: another data set, {what}"]


def build_continuity(
    run: RunDirectory, config: RunConfig, *, global_size: int, data: str, num_samples: int
) -> Continuity:
    """Returns what this attempt trains.

    Args:
        run: where configuration, snapshot and accepted changes lie.
        config: the frozen configuration.
        global_size: samples per optimizer step.
        data: fingerprint of the training samples.
        num_samples: how many there are.
    """
    index = read_index(run)
    return Continuity(
        run=run,
        settings=trained_settings(config, global_size=global_size),
        code="" if index is None else digest_code(index, is_own_code=names_own_code(config)),
        data=data,
        num_samples=num_samples,
        changes=read_changes(run),
    )
