"""What `make test` guarantees, each with the test that would fail without it.

`tests/homes.py` ends a collection of quick tests where one of these tests is gone or has moved to another home.
"""

from __future__ import annotations

GUARANTEES: dict[str, str] = {}
