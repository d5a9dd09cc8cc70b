"""What a `_target_` may not name: what acts on the machine instead of building a part of a run.

This catches a slip and the lazy attack, it is no wall: a configuration names code, a script and lines of shell anyway,
so one from somebody else deserves the look that their program does. The wall stands around the run directory
(`rundir.layout`), whose frozen configuration is the only one that a job reads.
"""

from __future__ import annotations

import sys
from typing import Any

from slurm_train.errors import ConfigError

# Of the standard library, what computes; the rest reads, writes, starts or imports things.
# fmt: off
_HARMLESS = frozenset(
    {
        "array", "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions",
        "functools", "graphlib", "heapq", "itertools", "math", "numbers", "operator", "pathlib", "random", "re",
        "statistics", "string", "textwrap", "types", "typing", "uuid", "zoneinfo",
    }
)
# fmt: on
_CALLERS = frozenset({"operator.methodcaller", "operator.attrgetter", "functools.reduce", "types.FunctionType"})
_PLAIN_TYPES = frozenset("bool bytes complex dict float frozenset int list range set slice str tuple".split())  # noqa: SIM905
# They run what a file, a package index or a text gives them.
_LOADERS = (
    *("torch.load", "torch.hub", "torch.serialization", "torch.utils.cpp_extension", "torch.package", "torch.jit.load"),
    *("numpy.load", "pandas.read_pickle", "joblib", "dill", "cloudpickle", "hydra", "omegaconf", "pip", "setuptools"),
    *("submitit", "IPython"),
)
_OWN_ROOMS = ("slurm_train.models.", "slurm_train.data.")


def refuse_path(path: str) -> None:
    """Refuses a dotted path by its words alone; nothing is imported.

    Raises:
        ConfigError: it leads into the standard library's acting half, a loader, or this package's machinery.
    """
    if reason := _reason(path):
        raise ConfigError(f"_target_={path} {reason}", hint="name a class or a function of your own that does it")


def refuse_found(path: str, found: Any) -> None:
    """Refuses what a path turned out to name, e.g. `my_package.os.system` or a name that was imported there.

    Raises:
        ConfigError: as `refuse_path`.
    """
    module, name = getattr(found, "__module__", None), getattr(found, "__qualname__", "")
    if isinstance(module, str) and (reason := _reason(f"{module}.{name}")):
        raise ConfigError(
            f"_target_={path} is {module}.{name}, which {reason}", hint="name a class or a function of your own"
        )


def _reason(path: str) -> str:
    head, _, rest = path.partition(".")
    if head in ("builtins", "__main__"):
        return "" if rest in _PLAIN_TYPES or head == "__main__" else "is not a part of a run"
    if head == "slurm_train":
        return "" if path.startswith(_OWN_ROOMS) else "is machinery of this package, not a model or a data set"
    if head in sys.stdlib_module_names:
        return "" if head in _HARMLESS and path not in _CALLERS else "acts on the machine and builds no part of a run"
    loads = any(path == loader or path.startswith(f"{loader}.") for loader in _LOADERS)
    return "runs what it is given and builds no part of a run" if loads else ""
