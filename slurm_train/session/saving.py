"""Checkpoints with files of a user's own program.

Each rank writes into its own directory, so the files of two ranks cannot collide while they are written. Then all files
are moved into one directory, which becomes a checkpoint in the same way as those of the trainer (`checkpoint.filling`).
A library that writes files of different names on each rank finds all of them in one place when it reads them. The files
are treated as bytes only.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from slurm_train.checkpoint.agreement import Group, as_agreed, on_every_rank, rank_in
from slurm_train.checkpoint.commit import DIRECTORY_MODE, Place
from slurm_train.checkpoint.filling import Filling, Records, Saved, begin_filling
from slurm_train.checkpoint.manifest import CheckpointHeader, FileRecord, check_file_name, seal_file
from slurm_train.errors import CheckpointError, SlurmTrainError
from slurm_train.formatting import shorten
from slurm_train.rundir.files import for_each, fsync_directory, listed, make_folder
from slurm_train.rundir.removal import remove_tree
from slurm_train.session.random_streams import is_random_file


class DirectorySave:
    """The save of one step. All ranks fill their `folder`, then call `end`.

    Args:
        place: the run directory's checkpoints.
        header: facts about the save; those of rank 0 are used.
        group: all ranks; None for one.
    """

    def __init__(self, place: Place, header: CheckpointHeader, group: Group | None) -> None:
        self._place = place
        self._header = header
        self._group = group
        self._filling: Filling | None = None
        self._folder = Path()

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Yields this rank's empty directory; an error on any rank ends the save on all. Collective.

        Raises:
            SlurmTrainError: on every rank but those with an error of their own; what was written is removed.
        """
        folder = self._begin()
        try:
            yield folder
        except BaseException as err:
            # The other ranks wait for this one; they raise an error that names it.
            with contextlib.suppress(SlurmTrainError):
                self._fail(err)
            raise
        self._fail(None)

    def end(self) -> Saved:
        """Makes the files durable and the directory a checkpoint; returns it. Collective.

        Raises:
            SlurmTrainError: on every rank; what was written is removed.
        """
        filling = self._filling
        assert filling is not None

        def write() -> list[Records]:
            chosen = choose_writers(on_every_rank(self._group, self._seal))
            on_every_rank(self._group, lambda: self._bring_together(filling.staging, chosen))
            return chosen

        return filling.end(write)

    def _begin(self) -> Path:
        """Returns this rank's empty directory. Collective.

        Raises:
            SlurmTrainError: on every rank.
        """
        filling = begin_filling(self._place, self._header, group=self._group)
        if filling.is_saved:
            raise CheckpointError(
                f"this attempt has a checkpoint of step {self._header.step} already, {filling.staging.name}",
                hint="save each step once, in the order of the steps",
            )
        self._filling = filling
        self._folder = filling.staging / f".rank_{rank_in(self._group):05d}"
        on_every_rank(self._group, self._make_folder)
        return self._folder

    def _fail(self, error: BaseException | None) -> None:
        """Ends a save that failed on some rank; what was written is removed. Collective.

        Args:
            error: the error of this rank; None if only other ranks failed.

        Raises:
            SlurmTrainError: on every rank.
        """

        def raise_it() -> None:
            if error is not None:
                raise as_agreed(error)

        try:
            on_every_rank(self._group, raise_it)
        except SlurmTrainError:
            self._discard()
            raise

    def _make_folder(self) -> None:
        self._folder.mkdir(mode=DIRECTORY_MODE)
        make_folder(self._folder, within=self._folder)

    def _seal(self) -> Records:
        require_closed(self._folder)
        return seal_files(self._folder)

    def _bring_together(self, target: Path, chosen: Sequence[Mapping[str, FileRecord]]) -> None:
        """Moves the chosen files of this rank, and its folders, to the directory with the files of all ranks."""
        for name in chosen[rank_in(self._group)]:
            path = target / name
            path.parent.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            (self._folder / name).rename(path)
            # New folders inside are made durable as well; the commit does that for the directory itself.
            for folder in path.relative_to(target).parents:
                fsync_directory(target / folder)
        for folder in sorted(path for path in self._folder.rglob("*") if path.is_dir()):
            # Those that are empty mean something to whoever has made them.
            kept = target / folder.relative_to(self._folder)
            kept.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            fsync_directory(kept.parent)
        remove_tree(self._folder)

    def _discard(self) -> None:
        if self._filling is not None:
            # The leader removes what all ranks have written.
            self._filling.discard()


def require_closed(folder: Path) -> None:
    """Checks that this process has no file below a folder open for writing: what it writes later would damage it.

    Raises:
        CheckpointError: naming those that are open.
    """
    place = os.path.realpath(folder)
    names = []
    for path in listed(Path("/proc/self/fd")):
        # The descriptor of this very listing is gone by now.
        with contextlib.suppress(OSError):
            opened = os.readlink(path)  # noqa: PTH115  # a text, also of what is no path
            flags = re.search(r"^flags:\s+(\d+)", Path(f"/proc/self/fdinfo/{path.name}").read_text(), re.MULTILINE)
            is_written = flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY
            if opened.startswith(f"{place}/") and is_written:
                names.append(opened.removeprefix(f"{place}/"))
    if names:
        raise CheckpointError(
            f"the block of `save` has ended, and files of it are still open for writing: {shorten(sorted(names))}",
            hint="close them in the block: what is in their buffers would be missing, and damage the checkpoint later",
        )


def seal_files(folder: Path) -> Records:
    """Makes all files below a folder durable and private, and returns their records by path below it.

    Raises:
        CheckpointError: something there is neither a file nor a folder, or has a name that no checkpoint can have.
    """
    names = [str(path.relative_to(folder)) for path in _files_below(folder)]
    for name in names:
        check_file_name(name, below=True)
    records = for_each(lambda name: seal_file(folder / name), names)
    return dict(zip(names, records, strict=True))


def _files_below(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            yield from _files_below(path)
            fsync_directory(path)
        elif stat.S_ISREG(mode):
            yield path
        else:
            raise CheckpointError(
                f"{path.name} in a save is a link or a special file", hint="copy what it stands for into the directory"
            )


def choose_writers(records: Sequence[Records]) -> list[Records]:
    """Returns the files of each rank that go into the checkpoint; of equal files of several ranks, that of the first.

    Raises:
        CheckpointError: no rank wrote a file; or several wrote a file of the same name with different content.
    """
    chosen: list[Records] = []
    writers: dict[str, tuple[int, FileRecord]] = {}
    clashes: dict[str, tuple[int, int]] = {}
    for rank, rank_records in enumerate(records):
        taken: Records = {}
        for name, record in rank_records.items():
            if name not in writers:
                writers[name] = (rank, record)
                taken[name] = record
            elif writers[name][1] != record:
                clashes.setdefault(name, (writers[name][0], rank))
        chosen.append(taken)
    if clashes:
        parts = (f"{name} (ranks {ranks[0]} and {ranks[1]})" for name, ranks in clashes.items())
        raise CheckpointError(
            f"several ranks have saved different files of the same name: {shorten(parts)}",
            hint="put the rank into the name of what differs from rank to rank; let rank 0 write what is the same",
        )
    if all(is_random_file(name) for name in writers):
        raise CheckpointError(
            "nothing was saved: no rank has written a file", hint="write into the directory that `save` gives"
        )
    return chosen
