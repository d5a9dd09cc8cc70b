"""A job as a value: what lies beside its script says the same as the script; an edited script says it itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.request.batch_script import job_request
from slurm_train.rundir.jobs import write_request
from slurm_train.slurm.job_request import JobRequest, directives, record_of
from tests.support.plans import make_plan

CLUSTERS: list[dict[str, Any]] = [
    {"nodes": 2, "gpus_per_node": 8, "env": {"GREETING": "it's $HOME & more"}, "setup": ["module load cuda"]},
    {"nodes": 3, "gpus_per_node": [4, 2, 2], "sbatch": {"comment": "a # b", "exclusive": True}},
]


def request_of(cluster: dict[str, Any]) -> JobRequest:
    return job_request(make_plan(cluster=cluster), default_python="/opt/my env/bin/python")


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_record_has_what_was_asked_for(cluster: dict[str, Any], tmp_path: Path) -> None:
    request = request_of(cluster)
    script = tmp_path / "submit.sh"
    write_request(script, request)
    read = JobRequest.read(script)
    assert read == replace(request, script=request.text())
    assert read.text() == request.text() == script.read_text()


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_script_of_before_says_the_same_as_its_record(cluster: dict[str, Any], tmp_path: Path) -> None:
    request = request_of(cluster)
    script = tmp_path / "submit.sh"
    write_request(script, request)
    record_of(script).unlink()
    read = JobRequest.read(script)
    assert (read.components, read.python, read.run) == (request.components, request.python, request.run)
    assert read.text() == request.text()


EDITED = [
    ("#SBATCH --time=90", {"time": "90"}),
    ("#SBATCH --time=90 --hold  # tomorrow", {"time": "90", "hold": True}),
    ("#SBATCH --time 90", {"time": "90"}),
    ("#SBATCH -t 90", {"-t": "90"}),
    ("#SBATCH --comment=it's", {"comment": "it's"}),
    ("##SBATCH --time=90", {}),
]


@pytest.mark.parametrize(("line", "flags"), EDITED)
def test_what_a_person_has_put_into_a_script_holds(line: str, flags: dict[str, Any], tmp_path: Path) -> None:
    request = request_of(CLUSTERS[0])
    script = tmp_path / "submit.sh"
    write_request(script, request)
    edited = script.read_text().replace("#SBATCH --requeue\n", f"#SBATCH --requeue\n{line}\n")
    script.write_text(edited)
    read = JobRequest.read(script)
    assert read.text() == edited
    assert read.flags == {**request.flags, **flags}
    # The lines that its array gets ask sbatch for the same.
    again = JobRequest.of_script(directives(read.components) + "\n")
    assert again.components == read.components


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"script_sha256": "0"}'])
def test_a_record_that_is_none_is_not_believed(record: str, tmp_path: Path) -> None:
    script = tmp_path / "submit.sh"
    write_request(script, request_of(CLUSTERS[0]))
    record_of(script).write_text(record)
    assert JobRequest.read(script).flags["nodes"] == "2"
