from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tools.site.sites import RECORDED


@pytest.fixture
def site(shell: Any) -> Any:
    shell.slurm.be_site(RECORDED / "devcluster")
    return shell


def test_the_doctor_tells_of_a_site_and_submits_nothing(site: Any) -> None:
    done = site.types("doctor")
    assert done.code == 0
    assert "  Slurm          22.05.8, cluster devcluster\n" in done.out
    assert "can be preempted by jobs of QOS urgent" in " ".join(done.out.split())
    assert "note: SHORT_GRACE: partition main: " in done.out
    assert site.slurm.said("submitted_words") is None and site.left() == []


def test_without_slurm_the_exit_code_is_one(shell: Any) -> None:
    shell.refuses("asks for no nodes", "doctor optim.lr=1")
    shell.leaves_slurm()
    done = shell.types("doctor")
    assert done.code == 1 and done.out.startswith("error: NO_SLURM: ")
    assert json.loads(shell.types("doctor", "--json").out)["findings"][0]["level"] == "error"


def test_under_torchrun_there_is_nothing_to_look_with(site: Any) -> None:
    err = site.refuses("there is no preflight under torchrun", "doctor +cluster=2x1 cluster.launcher=torchrun")
    assert "add cluster.launcher=srun" in err


def test_the_job_of_the_doctor_looks_and_does_not_train(site: Any) -> None:
    # The fake job ends at once without a word.
    site.refuses("the job ended without a report on its nodes", "doctor +cluster=2x1")
    script = site.slurm.said("submitted.sh")
    assert "#SBATCH --job-name=.doctor-" in script and "#SBATCH --no-requeue" in script
    (config,) = site.folder.glob("runs/.doctor/*/config.yaml")
    for line in ("only: true", "bandwidth: true", "enabled: true"):
        assert f"  {line}\n" in config.read_text().partition("preflight:")[2]


def test_whatever_the_run_is_called_the_doctor_touches_no_folder_of_a_run(site: Any) -> None:
    words = ("+cluster=2x1", "run.name=mine")
    assert site.types(*words).code == 0
    (run,) = (path.parent for path in site.folder.glob("runs/mine/*/config.yaml"))
    checkpoint = run / "checkpoints" / "checkpoint_0000004"
    checkpoint.mkdir()
    before = {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))}
    for _ in range(2):
        assert "the job ended without a report" in site.types("doctor", *words).err
    assert {path: path.stat().st_mtime_ns for path in (run, *run.rglob("*"))} == before
    assert len(list(site.folder.glob("runs/.doctor/*/config.yaml"))) == 2, "each has a folder of its own"
    assert ".doctor" not in site.types("status").out


def test_a_controller_that_does_not_answer_is_an_error(site: Any) -> None:
    (site.slurm.folder / "sinfo.out").unlink()
    done = site.types("doctor")
    assert done.code == 1 and "error: CONTROLLER_AWAY: " in done.out
