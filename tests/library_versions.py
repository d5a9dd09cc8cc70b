"""Tries the tests of the adapters with other versions of their libraries: `make test-libraries`.

    python -m tests.library_versions                                # each library: lowest, tried and newest
    python -m tests.library_versions lightning==2.5.6 transformers  # one version; all of a library

A version is installed into a folder of its own in front of this environment's packages: torch, numpy and all that it
does not need anew stay those of this environment. A line per version says how many tests passed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.command_line import REPOSITORY

_KEPT = ("torch", "numpy", "accelerate", "torchmetrics")
_INSTALL_TIMEOUT_S = 600.0
_TESTS_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A library with an adapter.

    Args:
        tests: those of its adapter: trainings that are stopped and resumed.
        between: versions between the lowest and the newest that are tried as well.
        needs_others: whether a version needs versions of further packages that this environment may not have.
    """

    tests: str
    between: tuple[str, ...] = ()
    needs_others: bool = False


LIBRARIES = {
    "lightning": Library(tests="tests/adapters/test_lightning.py", between=("2.5.6", "2.6.0", "2.6.4")),
    "transformers": Library(
        tests="tests/adapters/test_transformers.py", between=("5.8.1", "5.16.1"), needs_others=True
    ),
}


def main(words: Sequence[str]) -> int:
    """Tries the versions that were named, and returns 0 where each passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.library_versions")
    parser.add_argument("wanted", nargs="*", metavar="LIBRARY[==VERSION]", default=list(LIBRARIES))
    codes = [_try(name, version) for name, version in _versions(parser.parse_args(words).wanted)]
    return int(any(codes))


def _versions(wanted: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for word in wanted:
        name, _, version = word.partition("==")
        if version:
            pairs.append((name, version))
            continue
        newest = _newest(name)
        versions = dict.fromkeys([lowest(name), *LIBRARIES[name].between, importlib.metadata.version(name), newest])
        pairs += [(name, version) for version in versions]
    return pairs


def lowest(library: str) -> str:
    """Returns the lowest version of a library that pyproject.toml allows, e.g. "2.6.0"."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(rf'"{library}>=([\d.]+)', text)
    assert match is not None, library
    return ".".join([*match[1].split("."), "0", "0"][:3])


def _newest(library: str) -> str:
    argv = [sys.executable, "-m", "pip", "index", "versions", library]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S, check=True)
    match = re.match(r"\S+ \((\S+)\)", done.stdout)
    assert match is not None, done.stdout
    return match[1]


def _try(name: str, version: str) -> int:
    """Tries one version, prints its line, and returns the exit code of the tests."""
    library = LIBRARIES[name]
    with tempfile.TemporaryDirectory(prefix="library_versions_") as folder:
        packages = Path(folder) / "packages"
        if version != importlib.metadata.version(name):
            _install(f"{name}=={version}", packages, with_others=library.needs_others)
        path = os.pathsep.join(filter(None, [str(packages), os.environ.get("PYTHONPATH", "")]))
        check = f"import importlib.metadata; assert importlib.metadata.version({name!r}) == {version!r}"
        env = {**os.environ, "PYTHONPATH": path}
        subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY, env=env, check=True)
        argv = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", library.tests]
        done = subprocess.run(
            argv, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=_TESTS_TIMEOUT_S, check=False
        )
    lines = done.stdout.strip().splitlines()
    errors = [line for line in lines if line.startswith("E   ")][:1]
    print(f"{name} {version}: {lines[-1].strip('= ') if lines else done.stderr.strip()[-200:]}", *errors, flush=True)
    return done.returncode


def _install(requirement: str, folder: Path, *, with_others: bool) -> None:
    pinned = "".join(f"{package}=={importlib.metadata.version(package)}\n" for package in _KEPT)
    constraints = folder.with_name("constraints.txt")
    constraints.write_text(pinned, encoding="utf-8")
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "-c", str(constraints)]
    subprocess.run(
        [*argv, *([] if with_others else ["--no-deps"]), requirement], timeout=_INSTALL_TIMEOUT_S, check=True
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
