"""Writes the badges of README.md as pictures in docs/images/, from what the project itself says.

    python .ci/write_badges.py                # writes the pictures

Nothing is fetched from another host, neither here nor by a reader. A test compares the pictures with what this gives.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

REPOSITORY = Path(__file__).resolve().parents[1]
_PROJECT = REPOSITORY / "pyproject.toml"
IMAGES = REPOSITORY / "docs" / "images"
_NARROW = "ijlrt. -"
_NARROW_PX = 4
_WIDE_PX = 7
_MARGIN_PX = 7
_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{label}: {value}">
<title>{label}: {value}</title>
<clipPath id="round"><rect width="{width}" height="20" rx="4"/></clipPath>
<g clip-path="url(#round)">
<rect width="{left}" height="20" fill="#4a4f57"/>
<rect x="{left}" width="{right}" height="20" fill="#2f5fb3"/>
</g>
<g fill="#ffffff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{left_middle}" y="14" textLength="{left_text}">{label}</text>
<text x="{right_middle}" y="14" textLength="{right_text}">{value}</text>
</g>
</svg>
"""


def badges() -> dict[str, str]:
    """Returns the text of each picture by the name of its file."""
    tested = (REPOSITORY / "docs" / "slurm-tested.md").read_text(encoding="utf-8")
    python = project_value("requires-python").removeprefix(">=")
    return {
        "badge-licence.svg": render("licence", project_value("license")),
        "badge-python.svg": render("Python", f"{python} or newer"),
        "badge-torch.svg": render("torch", f"{lowest_torch()} or newer"),
        "badge-slurm.svg": render("tried on Slurm", " ".join(slurm_versions(tested))),
    }


def project_value(key: str) -> str:
    """Returns a text of pyproject.toml, e.g. "Apache-2.0" for "license"."""
    return _group(rf'^{key} = "(.+)"$', _PROJECT.read_text(encoding="utf-8"))


def lowest_torch() -> str:
    """Returns the lowest version of torch that pyproject.toml allows."""
    return _group(r'^  "torch>=(.+)",$', _PROJECT.read_text(encoding="utf-8"))


def slurm_versions(page: str) -> list[str]:
    """Returns the releases in the head of the table of versions, e.g. ["20.11", "22.05"]."""
    head = _group(r"^\|  \| ([\d. |]+) \|$", page)
    return [version.strip().rpartition(".")[0] for version in head.split("|")]


def render(label: str, value: str) -> str:
    """Returns a picture of two words side by side."""
    left_text = _width_px(label)
    right_text = _width_px(value)
    left = left_text + 2 * _MARGIN_PX
    right = right_text + 2 * _MARGIN_PX
    return _SVG.format(
        label=escape(label),
        value=escape(value),
        width=left + right,
        left=left,
        right=right,
        left_text=left_text,
        right_text=right_text,
        left_middle=left / 2,
        right_middle=left + right / 2,
    )


def _width_px(text: str) -> int:
    return sum(_NARROW_PX if character in _NARROW else _WIDE_PX for character in text)


def _group(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    assert match is not None, f"nothing matches {pattern}"
    return match[1]


def main() -> None:
    """Writes the pictures."""
    for name, text in badges().items():
        (IMAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
