"""What a job is called: "123", or "123_4" for an element of an array."""

from __future__ import annotations

import re

_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")
_STEP_ID = re.compile(r"[0-9]+(_[0-9]+)?\.[0-9]+")


def is_job_id(text: str) -> bool:
    """Returns whether the text is one job or one array element: "123" or "123_4"."""
    return _JOB_ID.fullmatch(text) is not None


def is_step_id(text: str) -> bool:
    """Returns whether the text is a numbered step of a job: "123.0"."""
    return _STEP_ID.fullmatch(text) is not None
