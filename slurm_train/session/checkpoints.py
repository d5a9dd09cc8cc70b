"""Which checkpoint a program continues, and what is known of those that it saves; the content is the program's."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from slurm_train.checkpoint.agreement import Group
from slurm_train.checkpoint.choice import Choice, choose_checkpoint
from slurm_train.checkpoint.manifest import PROGRAM, CheckpointHeader, Manifest
from slurm_train.checkpoint.resumption import Resumption, run_place
from slurm_train.checkpoint.verify import newest_committed_step
from slurm_train.errors import CheckpointError, ConfigError
from slurm_train.rundir.events import SaveLog
from slurm_train.rundir.plan_record import PlanRecord
from slurm_train.session.interface import Checkpoint
from slurm_train.session.losses import LossWatch
from slurm_train.session.orders import ORDERS, Orders
from slurm_train.session.passes import PASSES, LoaderPasses
from slurm_train.session.random_streams import RandomStreams
from slurm_train.session.rank_run import RankRun
from slurm_train.session.replays import REPLAYS, Replays


class SessionCheckpoints:
    """One rank's view of the checkpoints of its run: the `TrainingFacts` of a program.

    Args:
        rank: this rank.
        losses: watches the losses; None on other ranks than rank 0.
    """

    def __init__(self, rank: RankRun, *, losses: LossWatch | None) -> None:
        self._rank = rank
        self._losses = losses
        is_first = rank.place.is_first
        self.place = run_place(rank.run, rank.attempt, keep=rank.config.checkpoint.keep, is_leader=is_first)
        self._resumption = Resumption(rank.run, self.place)
        self._log = SaveLog(rank.run, rank.attempt) if is_first else None
        self.orders = Orders()
        self.passes = LoaderPasses()
        self.replays = Replays(
            rank=rank.place.rank,
            num_ranks=rank.place.world_size,
            on_begin=self.passes.leave_out,
            on_skip=lambda: rank.heartbeat.mark("data"),
            say=rank.say,
        )
        self.random = RandomStreams(rank.place.rank)
        self.loaded: Checkpoint | None = None
        """What the program continues; None at the beginning of its training."""
        self.newest_step = 0
        """Step of the newest checkpoint that this attempt has saved or loaded."""
        self._is_behind = False
        """Whether a step before that was reported since."""
        self._has_chosen = False
        """Whether the program has asked for the checkpoint to continue from."""

    @property
    def resumed_step(self) -> int:
        """Step of the checkpoint that the program continues, 0 without one."""
        return self._resumption.origin.step

    def choose(self, group: Group | None) -> Choice | None:
        """Returns the newest checkpoint of `Session.save` that verifies; None where there is none. Collective.

        Raises:
            CheckpointError: there are checkpoints, but none verifies; or something else has saved them.
        """
        place = self.place
        choice = choose_checkpoint(place.root, group=group, attempt=place.attempt, fence=place.fence)
        if choice is not None and not choice.manifest.is_directory:
            writer = "a `training` of a session" if choice.manifest.is_program else "the built-in trainer"
            raise CheckpointError(
                f"{choice.path} was saved by {writer}, not by `save`",
                hint="load it with resume() of the training, or start the program under another run.name",
            )
        return choice

    def reason_against(self, _manifest: Manifest) -> str:
        """See `TrainingFacts`."""
        return ""

    def begin_from(self, choice: Choice | None) -> list[str]:
        """Refuses a checkpoint of something else than a `training`. See `TrainingFacts`.

        Raises:
            CheckpointError: the built-in trainer or `Session.save` has saved it.
        """
        if choice is not None and not choice.manifest.is_program:
            raise CheckpointError(
                f"{choice.path} was not saved by a `training` of a session",
                hint="load it with `newest()`, or start the program under another run.name",
            )
        return []

    def continue_from(self, choice: Choice | None) -> list[str]:
        """Continues from a checkpoint that all ranks have chosen; returns notes for the user.

        Args:
            choice: None: from the beginning.
        """
        self._resumption.begin_from(choice)
        self.newest_step = self.resumed_step
        self._is_behind = False
        self._has_chosen = True
        if self._losses is not None:
            self._losses.begin(self.resumed_step, {} if choice is None else choice.manifest.extra)
        self.loaded = None
        extra = {} if choice is None else choice.manifest.extra
        self.passes.continue_from(extra.get(PASSES, []))
        self.replays.continue_from(extra.get(REPLAYS, []))
        if choice is None:
            self.orders.continue_from(0, [])
            return []
        manifest = choice.manifest
        self.orders.continue_from(manifest.step, manifest.extra.get(ORDERS, []))
        self.loaded = Checkpoint(path=choice.path, step=manifest.step, world_size=manifest.world_size)
        # Other ranks have theirs with the rest of the state.
        if manifest.is_program and self._rank.place.rank >= manifest.world_size:
            self.restore_random()
        if manifest.world_size == self._rank.place.world_size or self.orders.saved:
            return []
        return [
            f"{manifest.world_size} ranks have saved step {manifest.step}, and these are "
            f"{self._rank.place.world_size}: the program itself has to find its place in the data"
        ]

    def steps_until(self, step: int) -> int | None:
        """Returns the steps of this attempt up to one that is saved."""
        return step - self.resumed_step

    def restore_random(self) -> None:
        """Puts the random generators back as they were in the checkpoint that the program continues."""
        if self.loaded is None:
            return
        self._rank.say(self.random.restore(self.loaded.path, world_size=self.loaded.world_size))

    def add_step(self, step: int) -> None:
        """Takes note of a step that is reported for the first time, before anything is saved after it."""
        if step < self.newest_step:
            self._is_behind = True
        self.orders.begin(step)
        repeated = self.random.find_repeats(None if self.loaded is None else self.loaded.path)
        if repeated:
            print(
                f"slurm_train: since the resume, rank {self._rank.place.rank} draws the random numbers of the first "
                f"steps again ({', '.join(repeated)}): call `restore_random()` of the session right before the loop",
                file=sys.stderr,
            )
        # Also of a program that continues nothing, for its waits.
        self.passes.watch()
        note = self.passes.check_loaders(self.resumed_step)
        if note:
            self._rank.say(note)
        self._resumption.move_on()

    def add_save(self, step: int) -> None:
        """Takes note of a save that has begun or is complete."""
        self.newest_step = step
        if self._losses is not None:
            self._losses.add_save(step)

    def require_resumable(self, step: int) -> None:
        """Refuses to save a step that a resume would not choose, or after which it would leave out samples.

        Raises:
            ConfigError: a later step was saved before, in this attempt or in an earlier one whose checkpoint the
                program has not asked for; or the batches of the order of samples are behind the steps.
        """
        self._require_ahead(step)
        self._rank.say(self.orders.check_behind(step))

    def _require_ahead(self, step: int) -> None:
        if step < self.newest_step or (step == self.newest_step and self._is_behind):
            raise ConfigError(
                f"step {step} is to be saved, and step {self.newest_step} was before: a resume begins at the largest "
                "step, so this save would be lost",
                hint="a run is one training: count its steps on, make another training another run, and call "
                "`newest()` to go back to a checkpoint",
            )
        if self._has_chosen or self.place.attempt == 0:
            return
        committed_step = newest_committed_step(self.place.root)
        if step < committed_step:
            raise ConfigError(
                f"step {step} is to be saved, and the run has a checkpoint of step {committed_step}, for which this "
                "start has not asked: a resume begins at the largest step, so this save would be lost",
                hint="call `newest()`, or `resume()` of the training, before the loop and count its steps on; or start "
                "the program under another run.name",
            )

    def header(self, step: int, *, kind: str = PROGRAM) -> CheckpointHeader:
        """Returns the facts of a save.

        Args:
            step: how many optimizer steps are done.
            kind: `manifest.DIRECTORY` or `manifest.PROGRAM`.
        """
        rank = self._rank
        place = rank.place
        try:
            torch_version = version("torch")
        except PackageNotFoundError:
            torch_version = ""
        orders = self.orders.present
        samples = step * orders[0]["global_size"] if orders else 0
        epoch = samples // orders[0]["num_samples"] if orders else 0
        kept = [] if self._losses is None else self._losses.kept()
        return CheckpointHeader(
            step=step,
            samples=samples,
            epoch=epoch,
            mesh={"dp_replicate": place.world_size},
            batch_plan={},
            config_hash=PlanRecord.read(rank.run.plan).config_hash or rank.run.run_id,
            data_fingerprint="",
            torch_version=torch_version,
            **self._resumption.facts_of_save(world_size=place.world_size, host=place.host, env=rank.env),
            extra={
                "kind": kind,
                ORDERS: orders,
                PASSES: self.passes.state(),
                **({REPLAYS: self.replays.state()} if self.replays else {}),
                **({"kept": kept} if kept else {}),
            },
        )

    def log_save(self, step: int, seconds: float, *, num_bytes: int, error: str) -> None:
        """Writes what became of a save that kept the program waiting; rank 0 does.

        Args:
            step: which one.
            seconds: from its start until it was durable, or failed.
            num_bytes: size of all its files.
            error: why it failed, "" if it did not.
        """
        if self._log is not None:
            self._log.stalled(step, seconds)
            self._log.ended(step, num_bytes=num_bytes, save_s=seconds, error=error)
