"""Where the files that ship with the package lie: `conf/`, `sbatch_templates/` and what a report is made of.

The first two stand at the top level of a checkout and inside the package of a wheel, the last is always inside it; all
are looked up here and nowhere else.
"""

from __future__ import annotations

import os
from pathlib import Path

# Links stay: the nodes may see the same path by another way.
_PACKAGE = Path(os.path.abspath(__file__)).parent  # noqa: PTH100  # Path.resolve follows links


def asset_dir(name: str) -> Path:
    """Returns the directory of a shipped asset, e.g. "conf" or "sbatch_templates".

    Raises:
        FileNotFoundError: the installation is broken; neither place holds the directory.
    """
    for candidate in (_PACKAGE / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"{name}/ is neither in {_PACKAGE} nor beside it: reinstall slurm-train")


def package_dir() -> Path:
    """Returns the directory of this package's modules."""
    return _PACKAGE


def read_template(name: str) -> str:
    """Returns the text of a file in `sbatch_templates/`, e.g. "run.sh"."""
    return read_asset("sbatch_templates", name)


def read_asset(folder: str, name: str) -> str:
    """Returns the text of a shipped file, e.g. of "page.css" in "tools/report/page"."""
    return (asset_dir(folder) / name).read_text(encoding="utf-8")
