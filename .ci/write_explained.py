"""Writes slurm_train/explained.txt, the messages that docs/troubleshooting.md explains, from the page's headings.

python .ci/write_explained.py            # writes it
python .ci/write_explained.py --check    # says whether it is up to date
"""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from slurm_train.explained import PAGE, headings_of  # noqa: E402  # of this checkout

LIST = REPOSITORY / "slurm_train" / "explained.txt"


def main() -> int:
    """Writes the list, or checks it; returns the exit code."""
    text = "\n".join(headings_of((REPOSITORY / PAGE).read_text(encoding="utf-8"))) + "\n"
    if LIST.exists() and LIST.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{LIST} is out of date: run python .ci/write_explained.py", file=sys.stderr)
        return 1
    LIST.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
