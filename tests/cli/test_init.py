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


def test_an_existing_file_is_compared_and_kept_without_force(shell: Any, home: Path) -> None:
    path = Path(shell.types("init", "--yes").out.strip())
    assert "is up to date" in shell.types("init", "--yes").err
    path.write_text(path.read_text().replace("account: dev", "account: mine"))
    assert "--force replaces it" in shell.refuses("-  account: mine\n+  account: dev", "init --yes")
    assert "account: mine" in path.read_text()
    done = shell.types("init", "--yes", "--force")
    assert done.code == 0 and "+  account: dev" in done.err and "account: dev" in path.read_text()


def test_a_person_answers_and_silence_is_the_default(shell: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Account, QOS (the first answer is none), minutes, interface, shell line.
    monkeypatch.setattr("sys.stdin", Terminal("\nfast\nurgent\n90\nib0\nmodule load cuda\n"))
    done = shell.types("init")
    assert done.code == 0
    assert "Which QOS? (normal, urgent) [normal] " in done.err and "qos='fast' is not among them" in done.err
    site = yaml.safe_load(Path(done.out.strip()).read_text())
    assert (site["cluster"]["qos"], site["cluster"]["setup"]) == ("urgent", ["module load cuda"])
    assert site["partitions"]["main"]["cluster"]["time_limit_min"] == 90


def test_what_init_cannot_do_is_refused_and_nothing_is_written(
    shell: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.refuses("cannot be the name of a site", "init a/b --yes")
    shell.refuses("there is no terminal to answer at", "init")
    monkeypatch.setattr("sys.stdin", Terminal("\n"))
    shell.refuses("the answers ended early", "init")
    shell.leaves_slurm()
    shell.refuses("no sbatch on the PATH", "init --yes")
    assert not home.exists()


def test_what_slurm_does_not_say_is_told(shell: Any, home: Path) -> None:
    shell.slurm.refuse("sbatch: error: Batch job submission failed: Unable to contact slurm controller")
    assert "what Slurm would take:" in shell.types("init", "--yes").err
    shell.slurm.be_site(RECORDED / "no_accounting")
    done = shell.types("init", "lab", "--yes")
    assert done.code == 0 and "#   accounts: `sacctmgr" in Path(done.out.strip()).read_text()
