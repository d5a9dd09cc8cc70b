"""The acceptance suite of the GPU checks: what it runs, what it leaves out, and what it says of that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as suite
from tests.gpu.catalogue import CHECKS, GROUPS, Check
from tests.gpu.multi.environment import ON_CPU, SHARES, rank_environment

pytestmark = pytest.mark.full

CHECK = Check("no_sync", "training_checks", "A", usual_s=10, limit_s=20, asserts="no step waits")
MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "device": "cuda"}


def program(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Puts a shell script in the place of Python; $4 is the folder of the check."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def run(folder: Path, *, check: Check = CHECK, left_s: float = 100.0, **env: str) -> suite.Outcome:
    (folder / "scratch").mkdir()
    return suite.run(check, env, left_s=left_s, out=folder, scratch=folder / "scratch")


def test_every_check_has_a_function_a_limit_above_its_usual_time_and_a_name_of_its_own() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS) == 20
    for check in CHECKS:
        text = Path(__file__).with_name(f"{check.module}.py").read_text()
        assert f"\ndef {check.name}(stage: Stage)" in text
        assert check.usual_s < check.limit_s


@pytest.mark.parametrize("group", GROUPS)
def test_each_group_fits_into_the_ten_minutes_of_a_machine_that_is_lent(group: str) -> None:
    usual_s = [check.usual_s for check in CHECKS if check.group == group]
    # Starting Python and looking at the machine come on top.
    assert 0 < sum(usual_s) + 5 * len(usual_s) < 560


def test_a_machine_without_a_compiler_is_named(tmp_path: Path) -> None:
    env = {**os.environ, "CC": "no-such-compiler", "CXX": "no-such-compiler", "PYTHONPATH": str(suite.REPOSITORY)}
    found = suite.machine({**env, "CUDA_VISIBLE_DEVICES": ""}, device="cpu")
    assert found["compile_obstacles"] == ["no C++ compiler (CXX=no-such-compiler)"]


def test_a_check_without_enough_time_is_left_out(tmp_path: Path) -> None:
    assert run(tmp_path, left_s=9.0) == suite.Outcome("no_sync", "left out: no budget")


def test_figures_of_a_check_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, monkeypatch, """echo said; echo '{"figures": {"steps": 9}}' > $4/result.json""")
    found = run(tmp_path)
    assert (found.status, found.figures, found.error) == ("passed", {"steps": 9}, "")
    assert (tmp_path / "log.txt").read_text() == "==== no_sync\nsaid\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("""echo '{"error": "moments changed"}' > $4/result.json; exit 1""", "moments changed"),
        ("exit 3", "it ended with exit code 3 and without a result; see log.txt"),
        ("""echo '{"figures": {}}' > $4/result.json; exit 134""", "it ended with exit code 134"),
    ],
)
def test_a_check_fails_by_its_word_or_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    program(tmp_path, monkeypatch, body)
    found = run(tmp_path)
    assert found.status == "FAILED" and found.error.startswith(said)


def test_a_check_that_takes_too_long_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, "sleep 300 & sleep 300")
    found = run(tmp_path, check=Check("no_sync", "training_checks", "A", 0.1, 0.5, ""))
    assert (found.status, found.error) == ("TIMED OUT", "not done within 0 s; see log.txt")


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["passed", "left out: no budget"], 0),
        (["passed", "FAILED"], 1),
        (["TIMED OUT"], 1),
        (["left out: no budget"], 2),
    ],
)
def test_exit_code(statuses: list[str], code: int) -> None:
    assert suite.exit_code([suite.Outcome("no_sync", status) for status in statuses]) == code


def test_results_are_written_after_each_check(tmp_path: Path) -> None:
    outcomes = [
        suite.Outcome("no_sync", "passed", 12.3, {"steps": 9, "ratio": 1.23456, "all": [1]}),
        suite.Outcome("save_race", "FAILED", 4.0, error="step_3 has other values"),
    ]
    suite.write(outcomes, MACHINE, out=tmp_path, seconds=17.0)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["machine"] == MACHINE
    assert [one["status"] for one in found["checks"]] == ["passed", "FAILED"]
    text = (tmp_path / "summary.md").read_text()
    assert (
        "| `no_sync` | passed | 12 | no step waits for the device, in eight settings | steps 9, ratio 1.235 |" in text
    )
    assert "## save_race\n\n```\nstep_3 has other values\n```" in text
    assert "CPU" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "summary.md"]


def test_the_checks_see_the_repository_the_wheels_and_no_job(tmp_path: Path) -> None:
    env: dict[str, Any] = {"PYTHONPATH": "/mine", "SLURM_JOB_ID": "1", "HOME": "/root"}
    found = suite.environment(env, device="cpu", site=tmp_path)
    assert found["PYTHONPATH"] == f"{suite.REPOSITORY}:{tmp_path}:/mine"
    assert found["CUDA_VISIBLE_DEVICES"] == "" and "SLURM_JOB_ID" not in found
    assert "CUDA_VISIBLE_DEVICES" not in suite.environment(env, device="cuda", site=None)


@pytest.mark.parametrize(("given", "expected"), [({}, ":4096:8"), ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8")])
def test_cublas_has_a_fixed_workspace_before_the_first_product_of_a_check(given: dict[str, str], expected: str) -> None:
    # torch reads it once per process, and `resume_bits` trains in the default mode before the deterministic one.
    assert suite.environment(given, device="cuda", site=None)["CUBLAS_WORKSPACE_CONFIG"] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({SHARES: "1", "RANK": "1"}, "rank1 Socket"),
        ({SHARES: "1"}, "None Socket"),
        ({SHARES: "1", "RANK": "1", "NCCL_HOSTID": "mine"}, "mine Socket"),
        ({"RANK": "1"}, "None None"),
        ({SHARES: "1", ON_CPU: "1", "RANK": "1"}, "None None"),
    ],
)
def test_ranks_that_share_a_gpu_are_hosts_of_their_own_for_nccl(given: dict[str, str], expected: str) -> None:
    env = rank_environment({"PATH": os.environ["PATH"], **given})
    program = "import os; print(os.environ.get('NCCL_HOSTID'), os.environ.get('NCCL_NET'))"
    assert subprocess.check_output([sys.executable, "-c", program], env=env, text=True).strip() == expected


def test_a_line_of_a_script_that_hangs_costs_its_own_time_alone(tmp_path: Path) -> None:
    script = tmp_path / "lines.sh"
    here = Path(__file__).parent
    script.write_text(f'. {here}/lines.sh "$@"\nline 1 hangs sleep 60\nline 5 fails false\nline 5 ends true\nfinish\n')
    done = subprocess.run(["bash", str(script), str(tmp_path / "out")], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    found = [line.split(" after")[0] for line in (tmp_path / "out" / "lines.txt").read_text().splitlines()[:3]]
    assert found == ["hangs: exit code 124", "fails: exit code 1", "ends: exit code 0"]


@pytest.mark.parametrize(("script", "budget_s"), [("correctness.sh", 430), ("speed.sh", 330)])
def test_the_lines_of_a_script_fit_into_its_time(script: str, budget_s: int) -> None:
    text = Path(__file__).with_name(script).read_text()
    limits = [int(line.split()[1]) for line in text.splitlines() if line.startswith("line ")]
    assert len(limits) > 3 and sum(limits) <= budget_s and f"{budget_s} s" in text


PAGE = suite.REPOSITORY / "docs" / "gpu-measured.md"
# What a figure is about: the code that runs in every step, and saves.
HOT_PATH = [f"slurm_train/{room}" for room in ("train", "models", "distributed", "checkpoint")]


def lacks(section: str, *, age_of: Callable[[str], int | None]) -> list[str]:
    """Returns what a section of the page leaves unsaid about its figures.

    Args:
        section: with figures.
        age_of: gives the commits to the hot path since a commit; None for an unknown one.
    """
    ages = [age_of(commit) for commit in re.findall(r"[Cc]ommit `([0-9a-f]{8})`", section)]
    is_old = "**old**" in section
    problems = {
        "no commit": not ages,
        "an unknown commit": None in ages,
        "not marked as old": not is_old and any(age is not None and age > 200 for age in ages),
        "alone or beside others": not re.search(r"\balone\b|\bbeside\b", section),
        "how many samples": not re.search(r"\bmedians?\b|\bonce\b|\bone run\b", section),
    }
    return [text for text, is_so in problems.items() if is_so]


def commits_since(commit: str) -> int | None:
    words = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *HOT_PATH]
    done = subprocess.run(words, cwd=suite.REPOSITORY, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else None


def test_every_figure_on_the_page_names_its_commit_and_old_ones_are_marked() -> None:
    if commits_since("HEAD") is None:
        pytest.skip("the history is not here")
    # A limit, "at most 25 ms", is no figure.
    figure = re.compile(r"(?<!at most )\b\d[\d.]* ms\b|tokens/s")
    sections = [section for section in PAGE.read_text().split("\n## ")[1:] if figure.search(section)]
    assert len(sections) >= 3
    assert {section.partition("\n")[0]: lacks(section, age_of=commits_since) for section in sections} == {
        section.partition("\n")[0]: [] for section in sections
    }


@pytest.mark.parametrize(
    ("section", "problems"),
    [
        ("Commit `00000001`, alone, medians of four turns: 5 ms", []),
        ("Commit `00000200`, alone, once: 5 ms", ["not marked as old"]),
        ("Commit `00000200`, **old**, alone, once: 5 ms", []),
        ("commit `0000000f`: 5 ms", ["an unknown commit", "alone or beside others", "how many samples"]),
        ("alone, once: 5 ms", ["no commit"]),
    ],
)
def test_a_figure_without_its_circumstances_is_found(section: str, problems: list[str]) -> None:
    ages = {"00000001": 200, "00000200": 201}
    assert lacks(section, age_of=ages.get) == problems


def test_an_empty_folder_of_wheels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no wheels"):
        suite.install(tmp_path, tmp_path / "site")


@pytest.mark.slow
def test_a_check_runs_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--out", str(tmp_path), "--device", "cpu", "--only", "nan_is_masked", "nvml"]
    )
    assert suite.main() == 0
    found = json.loads((tmp_path / "results.json").read_text())["checks"]
    assert [one["status"] for one in found] == [suite.DRY, suite.NEEDS_GPU]
    assert "**On the CPU: this tries the checks themselves and is no result.**" in (tmp_path / "summary.md").read_text()
    assert found[0]["figures"]["tensors"] == 72
