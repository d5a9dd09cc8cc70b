"""Limits of a shell that Slurm passes on: which of them a training may come to, and which its ranks have."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest

from slurm_train.slurm.limits import in_words, passed_on, read_limits, tight, way_out

_GIB = 1 << 30


@pytest.mark.parametrize(
    ("limits", "run_s", "cpus", "found"),
    [
        ({}, None, None, []),
        ({"CPU": 3600}, None, 4, ["CPU"]),
        ({"CPU": 3600}, 3600.0, None, ["CPU"]),
        ({"CPU": 3600}, 3600.0, 4, ["CPU"]),
        # It is over before its processes can have computed so long.
        ({"CPU": 14400}, 3600.0, 4, []),
        ({"AS": 64 * _GIB, "DATA": 8 * _GIB, "FSIZE": _GIB}, None, None, ["FSIZE", "DATA", "AS"]),
        ({"AS": 2048 * _GIB, "FSIZE": 1024 * _GIB}, None, None, []),
        # Nearly every user has one.
        ({"NPROC": 4096}, None, None, []),
    ],
)
def test_a_limit_is_tight_where_a_training_may_come_to_it(
    limits: dict[str, int], run_s: float | None, cpus: int | None, found: list[str]
) -> None:
    assert tight(limits, run_s=run_s, cpus=cpus) == found


@pytest.mark.parametrize(
    ("site", "found"),
    [
        ({}, ["CPU", "AS"]),
        ({"setting": "ALL", "but": "(null)"}, ["CPU", "AS"]),
        ({"setting": "NONE"}, []),
        ({"setting": "CPU,NOFILE"}, ["CPU"]),
        ({"setting": "", "but": "MEMLOCK, CPU"}, ["AS"]),
        ({"setting": "ALL", "propagate": "NONE"}, []),
        ({"setting": "NONE", "propagate": "ALL"}, ["CPU", "AS"]),
        ({"setting": "NONE", "propagate": "AS"}, ["AS"]),
        ({"setting": "(null)", "but": "CPU", "propagate": "RLIMIT_CPU"}, ["CPU"]),
        ({"setup": ["module load x", "ulimit -v unlimited"]}, ["CPU"]),
        ({"setup": ["ulimit -S -t unlimited -v unlimited"]}, []),
        ({"setup": ["ulimit -St unlimited; train -v"]}, []),
        ({"setup": ["ulimit -n 65536", "make -t"]}, ["CPU", "AS"]),
    ],
)
def test_ranks_have_what_the_site_passes_on_and_setup_leaves(site: dict[str, Any], found: list[str]) -> None:
    settings: dict[str, Any] = {"setting": "ALL", "but": "", "propagate": "", "setup": (), **site}
    assert passed_on(["CPU", "AS"], **settings) == found


def test_limits_are_those_of_the_process_and_finite() -> None:
    soft = {"CPU": (resource.RLIMIT_CPU, 3600), "FSIZE": (resource.RLIMIT_FSIZE, 5 * _GIB)}

    def set_limits() -> None:
        for number, limit in soft.values():
            resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))

    program = "from slurm_train.slurm.limits import read_limits; print(dict(read_limits()))"
    done = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=set_limits, capture_output=True, text=True, check=True
    )
    found = eval(done.stdout)
    assert found == {**read_limits(), "CPU": 3600, "FSIZE": 5 * _GIB}
    assert in_words(found, "CPU") == "1 h of processor time (ulimit -t)"
    assert in_words(found, "FSIZE") == "5.0 GiB in one file (ulimit -f)"
    assert "ulimit -t unlimited,ulimit -f unlimited" in way_out(["CPU", "FSIZE"])
