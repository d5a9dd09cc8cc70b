"""A rehearsal as one HTML page, which needs no network. Pure."""

from __future__ import annotations

import html

from slurm_train.formatting import duration
from slurm_train.tools.rehearsal.verdict import HEADER, Rehearsal, Row, cells_of

PAGE_NAME = "rehearsal.html"
"""Of the page in the folder of its rehearsal."""
_STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#1b1f24;background:#fff}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.4em .8em;text-align:left;border-bottom:1px solid #d8dee4;"
    "vertical-align:top}.bad{background:#fff0ee}.ok td:first-child{color:#1a7f37}.bad td:first-child{color:#cf222e}"
    "td p{margin:.3em 0 0;color:#57606a}"
    "@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}.bad{background:#3a1d1d}"
    "td,th{border-color:#30363d}td p{color:#9198a1}}"
)


def render_page(rehearsal: Rehearsal) -> str:
    """Returns the HTML of the page: the verdict, a row per disturbance with its sentence and notes, the comparison."""
    title = html.escape(rehearsal.verdict)
    head = "".join(f"<th>{html.escape(name.capitalize())}</th>" for name in HEADER)
    rows = "".join(map(_row, rehearsal.rows))
    facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in rehearsal.facts)
    compared = (
        f"Undisturbed: {rehearsal.undisturbed}. Two undisturbed runs: {rehearsal.noise}. "
        f"It took {duration(rehearsal.seconds)}. Files: {rehearsal.place}"
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><table><tr>{head}</tr>{rows}</table><ul>{facts}</ul><p>{html.escape(compared)}</p>"
        "</body></html>\n"
    )


def _row(row: Row) -> str:
    kind = {True: "ok", False: "bad", None: ""}[row.is_good]
    cells = [html.escape(cell) for cell in cells_of(row)]
    sentences = [f"{row.advice} ({row.see})"] if row.advice else []
    cells[2] += "".join(f"<p>{html.escape(sentence)}</p>" for sentence in (*sentences, *row.facts))
    return f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
