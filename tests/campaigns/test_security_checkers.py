"""The checkers of the two security campaigns see what they are there to see."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurm_train.plan.plan import RunPlan
from tests.campaigns import hostile_words, secrets
from tests.campaigns.hostile_words import Bench, Case, Found
from tests.support.plans import render_script

pytestmark = pytest.mark.full


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    (tmp_path / "project").mkdir()
    return Bench(tmp_path / "project", tmp_path / "trap")


def outcome(case: Case, bench: Bench) -> Found:
    found = Found()
    # A generator that always asks bash as well.
    hostile_words._try(case, bench, found, _Always())
    return found


class _Always(random.Random):
    def random(self) -> float:
        return 0.0


def careless_render(change: Callable[[str], str], plan: RunPlan, **kwargs: Any) -> str:
    """Renders a script with something wrong."""
    return change(render_script(plan, **kwargs))


@pytest.mark.parametrize("where", hostile_words.FIELDS)
def test_a_harmless_string_in_any_field_is_no_finding(where: str, bench: Bench) -> None:
    text = "/usr/bin/python3" if where == "cluster.python" else "plain"
    found = outcome(Case(where, text), bench)
    assert found.problems == []


@pytest.mark.parametrize("where", ["cluster.env value", "cluster.sbatch value", "cluster.srun value"])
def test_a_script_that_quotes_nothing_is_found(where: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    careless = partial(careless_render, lambda script: script.replace("'", ""))
    monkeypatch.setattr(hostile_words, "render_script", careless)
    text = f"a b; touch {bench.trap}"
    found = outcome(Case(where, text), bench)
    assert found.problems or bench.trap.exists()


def test_a_change_of_the_value_a_crash_and_a_write_are_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_: str) -> str:
        raise UnicodeError("x")

    def write(script: str) -> str:
        (bench.project / "left").touch()
        return script

    def change(script: str) -> str:
        return script.replace("plain", "plane")

    for fault in (crash, write, change):
        careless = partial(careless_render, fault)
        monkeypatch.setattr(hostile_words, "render_script", careless)
        assert outcome(Case("cluster.env value", "plain"), bench).problems, fault


@pytest.mark.parametrize("form", [str.encode, lambda text: text.encode("utf-16-le")])
def test_a_planted_canary_is_found_in_any_file_and_name(form: Callable[[str], bytes], tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "weights.bin").write_bytes(b"\x00\xff" + form(secrets.CANARY) + b"\x01")
    (tmp_path / "a" / f"x{secrets.CANARY}").touch()
    (tmp_path / "a" / "clean").write_text("canary")
    assert secrets.hits(tmp_path) == ["a/b/weights.bin", f"a/x{secrets.CANARY}"]
    assert secrets.hits(tmp_path, skip=[tmp_path / "a"]) == []


def test_what_others_may_read_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "private").touch(0o600)
    (tmp_path / "open").touch(0o644)
    (tmp_path / "open").chmod(0o604)
    assert secrets.open_to_others(tmp_path) == [str(tmp_path / "open")]


def test_the_project_of_the_campaign_is_full_of_canaries(tmp_path: Path) -> None:
    project = secrets._project(tmp_path)
    assert secrets.hits(project) == [".env", ".git/config", "settings.py"]
    shown = subprocess.run(["git", "-C", str(project), "diff"], capture_output=True, text=True, check=True).stdout
    assert secrets.CANARY in shown
