"""Hostile values through a real sbatch and back out of `scontrol show job`."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from slurm_train.errors import ConfigError
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.flags import check_flag_value, flag_word

pytestmark = [pytest.mark.slurm, pytest.mark.full]

_ALPHABET = [chr(code) for code in range(32, 127)] + ["\u00e9", "$(id)", "#SBATCH --hold", " JobState=FAILED ", "''"]


def _values() -> list[str]:
    rng = random.Random(3)
    drawn = ["".join(rng.choice(_ALPHABET) for _ in range(rng.randrange(1, 9))) for _ in range(120)]
    return [value for value in drawn if _is_accepted(value)][:100]


def _is_accepted(value: str) -> bool:
    try:
        check_flag_value(value)
    except ConfigError:
        return False
    return True


def test_accepted_values_arrive_byte_for_byte(real_slurm: SlurmCommands, tmp_path: Path) -> None:
    values = _values()
    assert len(values) > 60
    job_ids: list[str] = []
    try:
        for index, value in enumerate(values):
            script = tmp_path / f"{index}.sh"
            flags = {"hold": True, "comment": value, "job-name": f"j {value}"}
            lines = [f"#SBATCH {flag_word(*flag)}" for flag in flags.items()]
            script.write_text("\n".join(["#!/bin/bash", *lines, "true", ""]), encoding="utf-8")
            argv = ["sbatch", "--parsable", str(script)]
            done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=tmp_path)
            job_ids.append(done.stdout.strip().split(";")[0])
        shown = [real_slurm.show_job(job_id) for job_id in job_ids]
        # Slurm itself adds a blank to the comment, so one at its end cannot be told.
        assert [fields["Comment"] for fields in shown] == [value.rstrip() for value in values]
        assert [fields["JobName"] for fields in shown] == [f"j {value}".rstrip() for value in values]
        assert {fields["JobState"] for fields in shown} == {"PENDING"}
    finally:
        real_slurm.cancel(job_ids)
