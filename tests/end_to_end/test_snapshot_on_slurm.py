"""Code that is edited while a job waits: the job runs what was submitted, and so does a requeue after another edit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_train.code.provenance import environment_of
from slurm_train.rundir.events import read_events
from tests.support import light_training
from tests.support.command_line import Person
from tests.support.installed_projects import LAYOUTS, install_editable, make_venv
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import command, wait_for_state, wait_until_finished, wait_until_step

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.full]

# The version that a rank sees, of a file beside its program and of two packages that are installed in editable mode.
EDITED = """
import json, os, pathlib
import hatch_src, st_flat

seen = pathlib.Path(os.environ["SEEN"])
with seen.open("a") as file:
    print(json.dumps(["old", hatch_src.VERSION, st_flat.VERSION]), file=file)
"""
WORDS = ("+cluster=1x1", *light_training.words(step_s=0.5, save_every=2), "cluster.sbatch.hold=true")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """An interpreter in which two projects are installed in editable mode, and the projects."""
    parent = tmp_path_factory.mktemp("installed")
    python = make_venv(parent / "venv")
    projects = [layout.write(parent) for layout in LAYOUTS if layout.name in ("hatch_src", "st_flat")]
    install_editable(python, projects)
    return python, projects


def edit(person: Person, projects: list[Path], version: str) -> None:
    """Has everything that the job could import say another version."""
    (person.folder / "edited.py").write_text(EDITED.replace('"old"', f'"{version}"'))
    for layout in LAYOUTS:
        for project in projects:
            if project.name == layout.name:
                init = project / layout.folder / "__init__.py"
                init.write_text(f'from {layout.name}._version import BUILT\nVERSION = "{version}"\n')


def test_code_edited_while_a_job_waits_or_is_requeued_changes_nothing(
    slurm_cluster: object, layouts: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    python, (flat, src) = layouts
    # The first project is where the person is; the other one lies elsewhere and is copied because it is named.
    person = Person(flat, python=str(python))
    light_training.add_program(person)
    program = person.folder / "light_training.py"
    program.write_text(program.read_text().replace("import argparse\n", "import argparse\nimport edited\n"))
    edit(person, [flat, src], "old")
    words = (*WORDS, f"run.root={tmp_path}/runs", f"run.snapshot_folders=[{src}]", f"cluster.env.SEEN={tmp_path}/seen")
    submitted = person.types(*words)
    job, run = submitted.job_and_run
    edit(person, [flat, src], "edited while it waits")
    command("scontrol", "release", job)
    wait_until_step(run, 4)
    edit(person, [flat, src], "edited while it runs")
    command("scontrol", "requeue", job)
    wait_for_state(job, "PENDING")
    command("scontrol", "release", job, must=False)
    wait_until_finished(run, within_s=240)
    assert len(ledger_lines(run)) == 2
    assert [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()] == [["old"] * 3] * 2
    assert "imported from the run's copy of the code: " in run.rank_log(1, 0).read_text()
    attempt, submission = environment_of(run), json.loads(run.provenance.read_text())["environment"]
    assert attempt is not None and attempt["slurm"] == submission["slurm"] != ""
    assert read_events(run, "environment") == []
    now = person.types("diff", "--root", f"{tmp_path}/runs", run.run_id, "--stat")
    assert "edited.py: +1 -1" in now.out and ".folders/hatch_src/src/hatch_src/__init__.py: +1 -1" in now.out, now.out
