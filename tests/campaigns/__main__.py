"""Runs campaigns: `python -m tests.campaigns [NAME ...] [--seed 1] [--trials N] [--keep]`; all of them without a name.

Ends with 1 if any promise was broken. `--keep` puts the result into results.json here and rewrites
the pages that have them.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.campaigns.catalogue import CAMPAIGNS, pages
from tests.campaigns.record import keep_record, read_records


def main() -> int:
    """Runs what was asked for and returns the exit code."""
    # What campaigns print is read while they run.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CAMPAIGNS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trials", type=int, help="instead of the campaign's full number")
    parser.add_argument("--keep", action="store_true", help="keep the results and rewrite the pages that have them")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in CAMPAIGNS]:
        parser.error(f"no campaign {', '.join(unknown)}; there are {', '.join(CAMPAIGNS)}")
    broken = [name for name in asked.names or CAMPAIGNS if not try_one(name, asked)]
    print(f"broken: {', '.join(broken)}" if broken else "every promise was kept")
    return int(bool(broken))


def try_one(name: str, asked: argparse.Namespace) -> bool:
    """Runs one campaign, prints what it found and returns whether the promise held."""
    campaign = CAMPAIGNS[name]
    folder = Path(tempfile.mkdtemp(prefix=f"slurm_train-{name}-"))
    print(f"== {name}: {campaign.promise} ({folder})")
    began_s = time.monotonic()
    found = campaign.run(seed=asked.seed, trials=asked.trials or campaign.trials, folder=folder)
    wall_s = time.monotonic() - began_s
    print(f"{name}: {found.held} of {found.trials} held in {wall_s:.0f} s")
    for line in (*(f"  {what}: {value}" for what, value in found.figures.items()), *found.problems):
        print(line)
    if asked.keep:
        today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
        keep_record(name, found, date=today, seed=asked.seed, wall_s=wall_s, revision=revision())
        for page, text in pages(read_records()).items():
            page.write_text(text, encoding="utf-8")
    if found.is_kept:
        shutil.rmtree(folder, ignore_errors=True)
    return found.is_kept


def revision() -> str:
    """Returns the short hash of the commit that is checked out."""
    argv = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
