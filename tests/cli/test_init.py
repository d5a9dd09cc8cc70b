from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tools.site.sites import RECORDED

GOLDEN = RECORDED.parent / "golden"


class Terminal(io.StringIO):
    """A person's answers, a line each."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def home(shell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's home, at a cluster like the recorded devcluster."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    shell.slurm.be_site(RECORDED / "devcluster")
    return tmp_path / "home"


def test_a_site_file_is_written_and_chosen_by_its_name(shell: Any, home: Path) -> None:
    printed = shell.types("init", "devcluster", "--yes", "--print")
    assert not home.exists() and shell.left() == []
    done = shell.types("init", "devcluster", "--yes")
    path = home / ".config" / "slurm_train" / "site" / "devcluster.yaml"
    assert (done.code, done.out) == (0, f"{path}\n")
    assert path.read_text() == printed.out == (GOLDEN / "devcluster.yaml").read_text()
    planned = shell.types("plan", "+cluster=2x4", "site=devcluster")
    assert planned.code == 0
    for flag in ("--partition=main", "--account=dev", "--qos=normal", "--cpus-per-task=8", "--time=1440"):
        assert f"#SBATCH {flag}\n" in planned.out


def test_the_name_is_the_clusters_own_unless_one_is_given(shell: Any, home: Path) -> None:
    assert shell.types("init", "--yes").out.endswith("site/devcluster.yaml\n")
    assert shell.types("init", "other", "--yes").out.endswith("site/other.yaml\n")
    shell.refuses("cannot be the name of a site", "init a/b --yes")


def test_it_can_be_written_elsewhere_and_found_there(shell: Any, home: Path) -> None:
    assert shell.types("init", "here", "--yes", "--config-dir", "conf").code == 0
    assert not home.exists()
    done = shell.types("plan", "--config-dir", "conf", "+cluster=1x1", "site=here")
    assert done.code == 0 and "--partition=main" in done.out


def test_without_slurm_there_is_nothing_to_look_at(shell: Any, home: Path) -> None:
    shell.leaves_slurm()
    shell.refuses("no sbatch on the PATH", "init --yes")
    assert not home.exists()


def test_an_existing_file_is_compared_and_kept_without_force(shell: Any, home: Path) -> None:
    path = Path(shell.types("init", "--yes").out.strip())
    assert "is up to date" in shell.types("init", "--yes").err
    path.write_text(path.read_text().replace("account: dev", "account: mine"))
    assert "--force replaces it" in shell.refuses("-  account: mine\n+  account: dev", "init --yes")
    assert "account: mine" in path.read_text()
    done = shell.types("init", "--yes", "--force")
    assert done.code == 0 and "+  account: dev" in done.err and "account: dev" in path.read_text()


def test_without_a_terminal_nothing_is_asked_and_printing_takes_the_defaults(shell: Any, home: Path) -> None:
    assert "--yes" in shell.refuses("there is no terminal to answer at", "init")
    printed = shell.types("init --print")
    assert printed.code == 0 and yaml.safe_load(printed.out)["cluster"]["qos"] == "normal" and not home.exists()


def test_a_person_answers_and_silence_is_the_default(shell: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Account, QOS (the first answer is none), minutes, interface, shell line.
    monkeypatch.setattr("sys.stdin", Terminal("\nfast\nurgent\n90\nib0\nmodule load cuda\n"))
    done = shell.types("init")
    assert done.code == 0
    assert "Which QOS? (normal, urgent) [normal] " in done.err and "qos='fast' is not among them" in done.err
    site = yaml.safe_load(Path(done.out.strip()).read_text())
    assert site["cluster"] == {
        "partition": "main",
        "account": "dev",
        "qos": "urgent",
        "gpu_flag": "gpus-per-node",
        "network_interface": "ib0",
        "setup": ["module load cuda"],
    }
    assert site["partitions"]["main"]["cluster"]["time_limit_min"] == 90


def test_answers_that_end_early_write_nothing(shell: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    shell.refuses("the answers ended early", "init")
    assert not home.exists()


def test_commands_that_refuse_are_told_in_the_file_and_here(shell: Any, home: Path) -> None:
    shell.slurm.be_site(RECORDED / "no_accounting")
    done = shell.types("init", "lab", "--yes")
    assert done.code == 0 and "Slurm does not say: accounts: `sacctmgr" in done.err
    assert "#   accounts: `sacctmgr" in Path(done.out.strip()).read_text()


def test_a_controller_that_is_away_costs_the_trial_alone(shell: Any, home: Path) -> None:
    shell.slurm.refuse("sbatch: error: Batch job submission failed: Unable to contact slurm controller")
    done = shell.types("init", "--yes")
    assert (
        done.code == 0 and "what Slurm would take:" in done.err and "account: dev" in Path(done.out.strip()).read_text()
    )


def test_a_site_that_does_not_exist_is_named_with_those_that_do(shell: Any, home: Path) -> None:
    shell.types("init", "--yes")
    err = shell.refuses("there is no configuration 'site/nowhere'", "plan +cluster=1x1 site=nowhere")
    assert "there are: devcluster" in err


def test_a_later_edit_of_the_file_changes_no_run(shell: Any, home: Path) -> None:
    path = Path(shell.types("init", "--yes").out.strip())
    run = Path(shell.types("+cluster=1x2", "site=devcluster").out.split()[1])
    before = (run / "config.yaml").read_text()
    path.write_text("cluster: {partition: other, account: none}\n")
    assert yaml.safe_load(before)["cluster"]["account"] == "dev" and yaml.safe_load(before)["site"] == "devcluster"
    shell.slurm.queue("4711", "COMPLETED")
    assert shell.types("resume", run.name).code == 0
    assert (run / "config.yaml").read_text() == before
    assert "--account=dev" in str(shell.slurm.said("submitted.sh"))
    path.unlink()
    shell.slurm.queue("4711", "COMPLETED")
    assert shell.types("resume", run.name).code == 0, "the run does not need the file any more"
