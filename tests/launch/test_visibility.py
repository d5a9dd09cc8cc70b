from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.errors import EXIT_FAILURE, EXIT_WRONG_USE, NodesError, RunError, SilentNodesError
from slurm_train.launch import visibility
from slurm_train.launch.visibility import require_seen_by_all
from slurm_train.rundir.paths import RunDirectory

NODES = ("node1", "node2", "node3")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.config.write_text("seed: 0\n")
    return run


def fake_srun(folder: Path, body: str) -> dict[str, str]:
    """Writes an `srun` that keeps its words in a file and then does as the body says; returns an environment."""
    command = folder / "srun"
    command.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {folder}/words\n{body}\n')
    command.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


# Runs the very question that the nodes would be asked, once per node.
ASK_ALL = 'while [ "${1#--}" != "$1" ]; do shift; done\nfor n in node1 node2 node3; do SLURMD_NODENAME=$n "$@"; done'


def test_nodes_that_see_the_run_raise_nothing_and_leave_nothing(run: RunDirectory, tmp_path: Path) -> None:
    env = fake_srun(tmp_path, ASK_ALL)
    require_seen_by_all(run, NODES, env)
    assert (tmp_path / "words").read_text().split()[:4] == [
        "--nodes=3",
        "--ntasks=3",
        "--ntasks-per-node=1",
        "--chdir=/",
    ]
    assert list(run.logs.iterdir()) == []


def test_the_components_of_uneven_nodes_are_asked_in_one_step(run: RunDirectory, tmp_path: Path) -> None:
    het = {
        "SLURM_HET_SIZE": "2",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "node3",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "node[1-2]",
    }
    env = fake_srun(tmp_path, "for n in node1 node2 node3; do echo fine $n; done") | het
    require_seen_by_all(run, ("node3", "node1", "node2"), env)
    words = (tmp_path / "words").read_text().splitlines()
    first, second = words[: words.index(":")], words[words.index(":") + 1 :]
    assert first[:3] == ["--het-group=0", "--nodes=1", "--ntasks=1"]
    assert second[:3] == ["--het-group=1", "--nodes=2", "--ntasks=2"]
    assert first[-3] == second[-3] == str(run.path) and words[-1] != ":"


def test_a_single_node_is_asked_only_from_a_login_node(run: RunDirectory, tmp_path: Path) -> None:
    env = fake_srun(tmp_path, "echo blind node1")
    require_seen_by_all(run, ("node1",), env | {"SLURMD_NODENAME": "node1"})
    assert not (tmp_path / "words").exists()
    with pytest.raises(RunError, match="node node1 does not see"):
        require_seen_by_all(run, ("node1",), env)


def refusal(run: RunDirectory, env: dict[str, str]) -> NodesError:
    with pytest.raises(NodesError) as caught:
        require_seen_by_all(run, NODES, env)
    return caught.value


@pytest.mark.parametrize(
    ("answers", "message", "code", "nodes"),
    [
        ("fine node1; blind node3; blind node2", "nodes node2, node3 do not see the run", "FS_MISSING", "node2,node3"),
        ("fine node1; readonly node2; fine node3", "node node2 does not write to the run", "FS_READONLY", "node2"),
        ("srun: step created; fine node1; fine node3", "no answer from node2 within 25 s", "NODE_MISSING", "node2"),
    ],
)
def test_nodes_that_cannot_run_it_are_named(
    answers: str, message: str, code: str, nodes: str, run: RunDirectory, tmp_path: Path
) -> None:
    body = "; ".join(f"echo {one}" for one in answers.split("; "))
    error = refusal(run, fake_srun(tmp_path, body))
    assert error.message.startswith(message) and (error.code, ",".join(error.nodes)) == (code, nodes)
    # Silence may pass, a path that is not there does not.
    assert error.exit_code == (EXIT_FAILURE if isinstance(error, SilentNodesError) else EXIT_WRONG_USE)


def test_the_question_itself_finds_what_is_wrong(run: RunDirectory, tmp_path: Path) -> None:
    run.logs.rmdir()
    assert refusal(run, fake_srun(tmp_path, ASK_ALL)).code == "FS_READONLY"
    run.config.unlink()
    assert refusal(run, fake_srun(tmp_path, ASK_ALL)).code == "FS_MISSING"


def test_nodes_that_do_not_see_the_attempt_are_behind(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visibility, "_LATE_S", 1)
    env = fake_srun(tmp_path, ASK_ALL)
    with pytest.raises(SilentNodesError, match=r"nodes node1, node2, node3 do not see .*/attempt_3 1 s after"):
        require_seen_by_all(run, NODES, env, attempt=3)
    run.epochs.mkdir()
    (run.epochs / "attempt_3").touch()
    require_seen_by_all(run, NODES, env, attempt=3)


def test_a_step_that_slurm_refuses_is_quoted(run: RunDirectory, tmp_path: Path) -> None:
    error = refusal(run, fake_srun(tmp_path, "echo 'srun: error: Unable to create step' >&2; exit 1"))
    assert "srun: error: Unable to create step" in error.message


def test_while_the_controller_is_away_nodes_are_asked_again(run: RunDirectory, tmp_path: Path) -> None:
    away = "echo 'srun: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    require_seen_by_all(run, NODES, fake_srun(tmp_path, f"if mkdir {tmp_path}/asked; then {away}; fi\n{ASK_ALL}"))


def test_an_absent_controller_is_not_waited_for_without_end(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visibility, "_PATIENCE_S", 0.5)
    monkeypatch.setattr(visibility, "_TIMEOUT_S", 0.2)
    error = refusal(run, fake_srun(tmp_path, "exec sleep 60"))
    assert error.message.startswith("no answer from node1, node2, node3 within")
