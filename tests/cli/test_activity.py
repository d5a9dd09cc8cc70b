"""Two people, or one in two terminals, who type the same at the same moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.errors import RunError
from slurm_train.rundir.jobs import Holder, read_job, take_lock, this_process
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import read_table
from slurm_train.status.activity import find_active, writing
from tests.cli.conftest import Shell
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.support.command_line import Person

# Takes half a second, and Slurm knows the job before it answers.
SBATCH = """#!/bin/sh
[ "$1" = --test-only ] && exit 0
echo x >> {here}/calls; job=$((4710 + $(wc -l < {here}/calls)))
for script; do :; done
elements=$(sed -n 's/^#SBATCH --array=0-//p' "$script")
for index in $([ -z "$elements" ] || seq 0 "$elements"); do
  echo "${{job}}_$index|PENDING|None||N/A|N/A|main" >> {here}/squeue.out
done
[ -n "$elements" ] || echo "$job|PENDING|None||N/A|N/A|main" >> {here}/squeue.out
sleep 0.5; echo $job
"""


@pytest.mark.parametrize("words", [("+cluster=1x1",), ("resume", "3f9a1c07")])
def test_of_two_who_type_the_same_at_once_one_submits(words: tuple[str, ...], shell: Shell) -> None:
    (shell.slurm.folder / "sbatch").write_text(SBATCH.format(here=shell.slurm.folder))
    if words[0] == "resume":
        shell.has_run(job_ids=("12",))
    argv = [sys.executable, "-m", "slurm_train", *words]
    env = Person(shell.folder).environment()
    started = [
        subprocess.Popen(argv, cwd=shell.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in started]
    assert sorted(process.returncode for process in started) == [0, 2], said
    assert shell.slurm.said("calls") == "x\n"
    assert sum("is active already: Slurm job 4711" in err for _, err in said) == 1
    (run,) = (RunDirectory(path.parent) for path in shell.folder.glob("runs/*/*/config.yaml"))
    assert not run.submission_lock.exists() and not run.lock.exists()


@pytest.mark.parametrize(
    "typed",
    [
        ("-m +cluster=1x1 seed=1,2", "-m +cluster=1x1 seed=2,3"),
        ("-m +cluster=1x1 seed=1,2", "-m +cluster=1x1 seed=1,2"),
        ("-m +cluster=1x1 seed=1,2", "+cluster=1x1 seed=2"),
    ],
)
def test_runs_that_two_commands_share_are_submitted_once(typed: tuple[str, str], shell: Shell) -> None:
    (shell.slurm.folder / "sbatch").write_text(SBATCH.format(here=shell.slurm.folder))
    env = Person(shell.folder).environment()
    started = []
    for words in typed:
        argv = [sys.executable, "-m", "slurm_train", *words.split()]
        started.append(
            subprocess.Popen(argv, cwd=shell.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=120) for process in started]
    runs = [RunDirectory(path.parent) for path in shell.folder.glob("runs/gpt-stdlib/*/config.yaml")]
    assert len(runs) == len({seed for words in typed for seed in words.rpartition("seed=")[2].split(",")}), said
    assert {len(read_job(run).job_ids) for run in runs} == {1}, said
    for process, (_, err) in zip(started, said, strict=True):
        assert process.returncode == 0 or "is active already: Slurm job 4711_1" in err
    assert not (shell.folder / "runs" / ".submitting_sweeps").exists()


def test_a_sweep_leaves_a_run_to_the_command_that_submits_it(shell: Shell) -> None:
    run = read_table(shell.submits_sweep("-m +cluster=1x1 seed=1,2"))[0].run
    take_lock(run.submission_lock, this_process(), is_alive=lambda _holder: True)
    assert "0 runs are finished, 1 active; 1 to submit" in shell.types("-m +cluster=1x1 seed=1,2").err


def test_nothing_is_written_under_live_ranks(tmp_path: Path) -> None:
    run, commands = RunDirectory(tmp_path / "gpt" / "one"), FakeSlurmCommands([job_state("11")])
    run.path.mkdir(parents=True)
    take_lock(run.lock, Holder(job_id="11", host="node1", pid=1, started="1"), is_alive=lambda _holder: True)
    with pytest.raises(RunError, match="is being run by Slurm job 11"), writing(run, commands):  # type: ignore[arg-type]  # the fake
        raise AssertionError("must not get here")
    assert find_active([run], commands)[run].jobs == ("11",)  # type: ignore[arg-type]  # the fake
    assert read_job(run) is None


def test_a_job_id_that_slurm_has_given_to_another_run_is_left_alone(shell: Shell) -> None:
    old, new = shell.has_run("old", "aaaa0000", job_ids=("12",)), shell.has_run("new", "bbbb0000", job_ids=("12",))
    shell.slurm.queue("12", "PENDING")
    shell.slurm.has_script("12", new.submit_script)
    shell.refuses("neither queued nor running", "cancel aaaa0000")
    assert shell.slurm.said("cancelled") is None
    assert shell.types("resume aaaa0000").job_and_run == ("4711", old)
    shell.refuses("is active already: Slurm job 12", "resume bbbb0000")
    shell.types("cancel bbbb0000")
    assert "12" in (shell.slurm.said("cancelled") or "").split()
