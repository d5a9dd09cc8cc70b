"""The sites of `recorded/`, read as `init` would read them from Slurm."""

from __future__ import annotations

from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.slurm.commands import Finished, SlurmCommands
from slurm_train.slurm.site import Site, SiteFacts

RECORDED = Path(__file__).parent / "recorded"
SITES = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())
_FILES = {
    ("sinfo",): "sinfo",
    ("scontrol", "show", "config"): "config",
    ("scontrol", "--all", "show", "partition"): "partitions",
    ("sacctmgr", "-n", "-P", "show", "user"): "associations",
    ("sacctmgr", "-n", "-P", "show", "qos"): "qos",
    ("sacctmgr", "-n", "-P", "show", "associations"): "parents",
}


class RecordedRunner:
    """Answers Slurm's commands from a folder; one without a file is not installed.

    Args:
        folder: the site's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[list[str]] = []

    def __call__(self, argv: list[str], *, env: object, timeout_s: float) -> Finished:
        self.asked.append(list(argv))
        name = next(file for words, file in _FILES.items() if tuple(argv[: len(words)]) == words)
        path = self.folder / f"{name}.txt"
        if not path.is_file():
            raise ClusterError(f"there is no {argv[0]} on this machine")
        return Finished(0, path.read_text(encoding="utf-8"), "")


def facts_of(site: str) -> SiteFacts:
    """Returns the facts of a recorded site."""
    return Site(SlurmCommands({}, runner=RecordedRunner(RECORDED / site)), user="me").facts()
