"""A sweep as CSV, Markdown and columns."""

from __future__ import annotations

from slurm_train.tools.report.collate import as_columns, as_csv, as_markdown


def test_a_table_keeps_its_values() -> None:
    table = [{"index": 0, "x": 0.1 + 0.2, "y": "a|b"}, {"index": 1, "x": 2.5, "y": 3}, {"index": 2, "x": 1, "y": None}]
    assert as_csv(table) == "index,x,y\n0,0.30000000000000004,a|b\n1,2.5,3\n2,1,\n"
    assert as_markdown(table).splitlines()[2] == "| 0 | 0.3 | a\\|b |"
    assert as_columns(table) == {"index": [0, 1, 2], "x": [0.1 + 0.2, 2.5, 1.0], "y": ["a|b", "3", None]}
