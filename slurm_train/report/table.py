"""Tables as markup: cells with what they are sorted by, long texts folded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_train.report.markup import Html, tag
from slurm_train.report.quantity import as_float, number, setting

_LONG = 120


@dataclass(frozen=True, slots=True)
class Cell:
    """What a cell shows and what it is sorted by."""

    shown: str | Html
    value: float | str | None = None
    """A number, a text, or None for nothing, which comes last."""
    css: str = ""


def cell_of(value: Any) -> Cell:
    """Returns the cell of a plain value: numbers in four digits to the right, texts to the left."""
    figure = as_float(value)
    if figure is not None:
        return Cell(number(figure, digits=5), figure, "num")
    if value is None or value == "":
        return Cell("")
    text = setting(value)
    return Cell(folded(text), text)


def folded(text: str) -> str | Html:
    """Returns a text, a long one behind its beginning."""
    if len(text) <= _LONG:
        return text
    return tag("details", tag("summary", text[: _LONG - 20] + " ..."), tag("div", text, class_="full"), class_="fold")


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    attributes: Sequence[Mapping[str, object]] = (),
    is_sortable: bool = False,
    name: str = "",
) -> Html:
    """Returns a table that scrolls sideways where it is too wide.

    Args:
        header: names of the columns.
        rows: as many cells each.
        attributes: of each row's element; none where it is empty.
        is_sortable: the script makes the names buttons.
        name: class of the table.
    """
    columns = [{row[column].css for row in rows} for column in range(len(header))]
    heads = [
        tag("th", text, scope="col", class_=next((css for css in ("num", "words") if css in found), None))
        for text, found in zip(header, columns, strict=True)
    ]
    head = tag("tr", heads)
    body = [
        tag("tr", [_cell(cell) for cell in row], **(attributes[index] if attributes else {}))
        for index, row in enumerate(rows)
    ]
    css = " ".join(filter(None, [name, "sortable" if is_sortable else ""])) or None
    return tag("div", tag("table", tag("thead", head), tag("tbody", body), class_=css), class_="scroll")


def facts(pairs: Sequence[tuple[str, str | Html]]) -> Html:
    """Returns names and values as a list."""
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs], class_="facts")


def _cell(cell: Cell) -> Html:
    return tag("td", cell.shown, class_=cell.css or None, data_v=cell.value)
