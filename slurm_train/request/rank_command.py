"""The command of a run's ranks: this package's Python, in a container (Apptainer, pyxis) where there is one.

The batch script, the supervisor and Slurm's commands run on the host, so a requeue needs no scontrol in the image. In
the container runs the host's copy of this package, which is mounted next to the packages of the image. The image must
have torch and the packages that this one needs. The ranks get the variables of the job: Apptainer passes the
environment on; with pyxis, values of the image have priority, so the variables of the launch are listed for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from slurm_train.assets import package_dir
from slurm_train.code.hub import hub_snapshots
from slurm_train.config.data_kinds import packs_somewhere
from slurm_train.config.schema import ContainerSection, RunConfig
from slurm_train.errors import ConfigError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.pack_slot import PACK

INSIDE = "/opt/slurm_train"
"""Where the host's package is mounted; no other package of the host is visible."""
# Variables that the supervisor and Slurm set for a rank; the image must not replace them.
_SET_FOR_RANKS = (
    "SLURM_TRAIN_ATTEMPT",
    PACK,
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONUNBUFFERED",
    "CUDA_VISIBLE_DEVICES",
)
# In images with PyTorch, pyxis and its hook set some of them, and a rank that has some of them expects all.
_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
# Folder of the embedded text unless data.path is set.
_CACHE = "~/.cache/slurm_train"


@dataclass(frozen=True, slots=True)
class RankCommand:
    """The inputs from which the command of a run's ranks is made."""

    config: RunConfig
    run: RunDirectory
    directory: str
    """Where the run was typed, which relative paths start from."""
    package: Path | None = None
    """The folder of this package on the nodes; None: the same as here."""

    def words(self, *, python: str) -> list[str]:
        """Returns the words of a task, which start a rank or torchrun's launcher, in a container if there is one.

        Args:
            python: interpreter on the nodes, for runs without a container.

        Raises:
            ConfigError: a path cannot be passed to a container.
        """
        container = self.config.container
        cluster = self.config.slurm
        # Under torchrun there is one launcher per node, which starts the ranks inside the container.
        verb = "torchrun" if cluster.launcher == "torchrun" else "worker"
        worker = ["-m", "slurm_train", verb, str(self.run.path)]
        if container is None:
            return [python, *worker]
        # The host's packages and those of the user's home are for another Python.
        inside = [f"PYTHONPATH={INSIDE}", "PYTHONNOUSERSITE=1", container.python, *worker]
        if container.kind == "pyxis":
            words = ["env"]
            for name in _TORCHRUN:
                words += ["-u", name]
            return [*words, *inside]
        gpus = [] if cluster.gpu_flag == "none" else ["--nv"]
        words = [container.command or "apptainer", "exec", *gpus]
        for mount in self._mounts(container):
            words += ["--bind", mount]
        words += ["--pwd", str(self.run.code)]
        return [*words, *container.flags, self._image(container), "env", *inside]

    def step_flags(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns further flags of srun: those of pyxis; none for other containers, or without one.

        Args:
            variables: what the job exports before the ranks start.
        """
        container = self.config.container
        if container is None or container.kind != "pyxis":
            return {}
        mounts = (mount if ":" in mount else f"{mount}:{mount}" for mount in self._mounts(container))
        exported = (name for name in self.config.slurm.export if name.isidentifier())
        return {
            "container-image": self._image(container),
            "container-mounts": ",".join(mounts),
            "container-workdir": str(self.run.code),
            "container-env": ",".join(dict.fromkeys([*_SET_FOR_RANKS, *variables, *exported])),
        }

    def make_mount_points(self) -> None:
        """Makes the folder of the embedded text, since a missing folder cannot be mounted."""
        if self.config.container is not None and self._uses_cache:
            Path(_CACHE).expanduser().mkdir(parents=True, exist_ok=True)

    @property
    def _uses_cache(self) -> bool:
        return packs_somewhere(self.config.data)

    def _image(self, container: ContainerSection) -> str:
        # A relative path starts where the run was typed, since the job starts elsewhere.
        image = container.image
        if not image or not image.isprintable():
            raise ConfigError(f"container.image={image!r} names no image", hint="give a path, or e.g. docker://NAME")
        is_path = container.kind == "apptainer" or image.startswith((".", "~"))
        if "://" in image or not is_path:
            return image
        return str(Path(self.directory) / Path(image).expanduser())

    def _mounts(self, container: ContainerSection) -> list[str]:
        """Returns "source:inside[:flags]" or plain paths: mounts that the run needs, then those of the person."""
        # Relative paths of the data lie where the run was typed.
        needed = [str(self.run.place), self.directory, *_absolute_paths(self.config.data)]
        needed += [str(snapshot.repository_folder) for snapshot in hub_snapshots(self.config)]
        if self._uses_cache:
            needed.append(str(Path(_CACHE).expanduser()))
        # A mount of "/" would hide the whole image.
        folders = dict.fromkeys(path for path in needed if PurePosixPath(path).is_absolute() and path != "/")
        mounts = [f"{self.package or package_dir()}:{INSIDE}/slurm_train:ro"]
        for path in folders:
            if not any(path != outer and PurePosixPath(path).is_relative_to(outer) for outer in folders):
                _check_path(path, "the run")
                mounts.append(path)
        for mount in container.mounts:
            parts = mount.split(":")
            if not 1 <= len(parts) <= 3 or not all(part.startswith("/") for part in parts[:2]):
                hint = 'write "/path", "/path:/inside" or "/path:/inside:ro"'
                raise ConfigError(f"container.mounts has {mount!r}", hint=hint)
            for part in parts:
                _check_path(part, "container.mounts")
            mounts.append(mount)
        return mounts


def _check_path(path: str, origin: str) -> None:
    if any(sign in path for sign in ",:\\") or not path.isprintable():
        raise ConfigError(
            f"{origin} uses the path {path!r}, which a container cannot be given", hint="use a path without , : and \\"
        )


def _absolute_paths(value: Any) -> Iterator[str]:
    """Yields the absolute paths among keyword arguments."""
    if isinstance(value, str) and value.startswith(("/", "~/")):
        yield str(Path(value).expanduser())
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _absolute_paths(item)
