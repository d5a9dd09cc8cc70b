"""What the nodes of a job are asked, and what is made of their answers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from slurm_train.assets import read_template
from slurm_train.errors import EXIT_FAILURE, EXIT_WRONG_USE, NodesError, RunError, SilentNodesError
from slurm_train.rundir.files import is_there
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise import asking
from slurm_train.supervise.asking import require_seen_by_all, silent_nodes
from tests.support import nfs_mounts
from tests.support.nfs_mounts import clients

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
    sizes = ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=1", "--nodelist=node[1-3]", "--overlap"]
    nothing = ["--gres=none", "--mem=0", "--cpu-bind=none", "--mpi=none"]
    assert (tmp_path / "words").read_text().split()[:11] == [*sizes, *nothing, "--chdir=/"]
    assert list(run.logs.iterdir()) == []


def test_the_ranks_of_uneven_nodes_are_asked_in_one_step(run: RunDirectory, tmp_path: Path) -> None:
    """20.11 refuses a command for each component: "already allocated 1 nodes to previous components"."""
    het = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": "41", "SLURM_JOB_ID_HET_GROUP_1": "42"}
    env = fake_srun(tmp_path, "for n in node1 node2 node3 node3; do echo fine $n; done") | het
    require_seen_by_all(run, ("node3", "node1", "node2"), env)
    words = (tmp_path / "words").read_text().splitlines()
    assert (words[0], words[5]) == ("--het-group=0,1", "--chdir=/") and ":" not in words


def test_a_question_to_the_nodes_takes_over_no_request_of_the_job(run: RunDirectory, tmp_path: Path) -> None:
    asked = {
        "SLURM_GPUS": "4",
        "SLURM_GPUS_PER_NODE": "2",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_GPU": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_CPUS_PER_GPU": "8",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_MEM_PER_GPU": "1024",
        "SLURM_MEM_PER_NODE": "1024",
        "SLURM_TRES_PER_TASK": "gres/gpu:1",
        "SLURM_STEP_GRES": "gpu:2",
        "SLURM_DISTRIBUTION": "cyclic",
        "SLURM_HINT": "nomultithread",
        "SLURM_LABELIO": "1",
        "SLURM_STDOUTMODE": "/runs/log",
        "SLURM_EXPORT_ENV": "NONE",
        "SRUN_EXPORT_ENV": "NONE",
        "SLURM_MPI_TYPE": "pmix",
        "SLURM_THREADS_PER_CORE": "1",
        "SLURM_EXCLUSIVE": "1",
    }
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_NODELIST": "node[1-4]"}
    env = fake_srun(tmp_path, f"env > {tmp_path}/env; {ASK_ALL}")
    require_seen_by_all(run, NODES, {**env, **asked, **kept})
    lines = (tmp_path / "env").read_text().splitlines()
    seen = dict(line.split("=", 1) for line in lines if line.startswith(("SLURM", "SRUN")))
    assert seen == {**kept, "SLURM_TASKS_PER_NODE": "1(x4)"}


def test_a_question_to_uneven_nodes_takes_over_no_request_of_a_component(run: RunDirectory, tmp_path: Path) -> None:
    """With them srun of 22.05 made no step: "Invalid Trackable RESource (TRES) specification"."""
    ids = {"SLURM_JOB_ID_HET_GROUP_0": "41", "SLURM_JOB_ID_HET_GROUP_1": "42"}
    kept = {"SLURM_HET_SIZE": "2", **ids, "SLURM_JOB_NODELIST_HET_GROUP_0": "node1"}
    asked = dict.fromkeys(("GPUS_PER_NODE", "NTASKS", "NTASKS_PER_NODE", "NPROCS", "TASKS_PER_NODE"), "2")
    of_parts = {f"SLURM_{name}_{kind}_GROUP_0": value for name, value in asked.items() for kind in ("HET", "PACK")}
    env = fake_srun(tmp_path, f"env > {tmp_path}/env; for n in node1 node2 node3; do echo fine $n; done")
    require_seen_by_all(run, NODES, {**env, **of_parts, **kept})
    lines = (tmp_path / "env").read_text().splitlines()
    assert dict(line.split("=", 1) for line in lines if line.startswith("SLURM")) == kept


def test_what_srun_says_of_a_binding_that_is_not_there_is_no_complaint(run: RunDirectory, tmp_path: Path) -> None:
    noise = "srun: cluster configuration lacks support for cpu binding"
    error = refusal(run, fake_srun(tmp_path, f"echo fine node1; echo fine node3; echo '{noise}' >&2"))
    assert (error.code, error.nodes) == ("NODE_MISSING", ("node2",)) and "binding" not in error.message


REFUSED = [
    ("srun: error: Unable to create step for job 110: Insufficient GRES available in allocation", SilentNodesError),
    ("srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification", SilentNodesError),
    ("srun: error: Unable to confirm allocation for job 7: Invalid job id specified", SilentNodesError),
    ("srun: fatal: --ntasks-per-node is mutually exclusive with --ntasks-per-gpu", NodesError),
]


@pytest.mark.parametrize(("said", "kind"), REFUSED)
def test_a_step_that_srun_cannot_create_blames_no_node(
    said: str, kind: type[NodesError], run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_REFUSED_S", 0.5)
    env = fake_srun(tmp_path, f"echo '{said}' >&2; echo 'srun: Force Terminated' >&2; exit 1")
    error = refusal(run, env)
    assert type(error) is kind and (error.code, error.nodes) == ("STEP_REFUSED", ())
    assert said in error.message and "exclude" not in error.hint
    assert silent_nodes(run, NODES, env) == []


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


def test_the_question_itself_finds_what_is_wrong(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_REFUSED_S", 0.5)
    run.logs.rmdir()
    refused = refusal(run, fake_srun(tmp_path, "echo 'srun: error: Unable to create step' >&2; exit 1"))
    assert "srun: error: Unable to create step" in refused.message and refused.code == "STEP_REFUSED"
    assert refusal(run, fake_srun(tmp_path, ASK_ALL)).code == "FS_READONLY"
    run.config.unlink()
    assert refusal(run, fake_srun(tmp_path, ASK_ALL)).code == "FS_MISSING"


def test_nodes_that_do_not_see_the_attempt_are_behind(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_LATE_S", 1)
    env = fake_srun(tmp_path, ASK_ALL)
    with pytest.raises(SilentNodesError, match=r"nodes node1, node2, node3 do not see .*/attempt_3 1 s after"):
        require_seen_by_all(run, NODES, env, attempt=3)
    run.epochs.mkdir()
    (run.epochs / "attempt_3").touch()
    require_seen_by_all(run, NODES, env, attempt=3)


def test_an_absent_controller_is_not_waited_for_without_end(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_RETRY_S", 0.5)
    monkeypatch.setattr(asking, "_TIMEOUT_S", 0.2)
    error = refusal(run, fake_srun(tmp_path, "exec sleep 60"))
    assert error.message.startswith("no answer from node1, node2, node3 within")


def test_while_the_controller_is_away_nodes_are_asked_again(run: RunDirectory, tmp_path: Path) -> None:
    away = "echo 'srun: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    require_seen_by_all(run, NODES, fake_srun(tmp_path, f"if mkdir {tmp_path}/asked; then {away}; fi\n{ASK_ALL}"))


def test_nodes_that_do_not_answer_twice_are_silent(run: RunDirectory, tmp_path: Path) -> None:
    first = f"if mkdir {tmp_path}/asked 2>/dev/null; then echo fine node1; else echo fine node3; fi"
    assert silent_nodes(run, NODES, fake_srun(tmp_path, first)) == ["node2"]
    assert "--nodelist=node[2-3]" in (tmp_path / "words").read_text().split()
    assert silent_nodes(run, NODES, fake_srun(tmp_path, ASK_ALL)) == []
    assert silent_nodes(run, NODES, fake_srun(tmp_path, "exit 1")) == [], "where no node answers none is blamed"


@pytest.mark.parametrize(
    ("answers", "is_requeued"),
    [
        (["RUNNING node1,node2", "", "RESIZING node2", "RUNNING node2"], True),
        (["RUNNING node1,node2", "PENDING "], False),
        (["Welcome to the lab", "RUNNING node2"], True),
    ],
)
def test_the_guard_requeues_a_running_job_that_has_lost_its_first_node(
    tmp_path: Path, answers: list[str], is_requeued: bool
) -> None:
    (tmp_path / "answers").write_text("".join(f"{line}\n" for line in answers))
    programs = {
        "squeue": "echo Welcome; head -n 1 answers; echo Bye; sed -i 1d answers",
        "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else echo "$3" | tr , "\\n"; fi',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ["/bin/sh", "-c", read_template("guard.sh"), "sh", "7", "node1", "0", "batch.log"]
    subprocess.run(words, cwd=tmp_path, env=env, check=True, timeout=30)
    assert (tmp_path / "requeued").exists() == is_requeued
    assert is_requeued == ((tmp_path / "batch.log").exists())


@pytest.mark.full
@pytest.mark.skipif(bool(nfs_mounts.missing()), reason=f"needs {nfs_mounts.missing()}")
def test_a_node_that_has_looked_for_the_attempt_before_it_was_opened_sees_it(tmp_path: Path) -> None:
    with clients(tmp_path) as (first, second):
        for name in ("epochs", "logs"):
            (first.path / "run" / name).mkdir(parents=True)
        (first.path / "run" / "config.yaml").touch()
        seen = second.path / "run"
        assert not is_there(seen / "epochs" / "attempt_1")
        (first.path / "run" / "epochs" / "attempt_1").touch()
        # The client remembers the absent name for half a minute.
        assert not (seen / "epochs" / "attempt_1").exists()
        question = ["/bin/sh", "-c", read_template("see_run.sh"), "sh", str(seen), "epochs/attempt_1", "0"]
        env = {**os.environ, "SLURMD_NODENAME": "n1"}
        answer = subprocess.run(question, env=env, capture_output=True, text=True, check=True)
        assert answer.stdout == "fine n1\n"
