from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import pytest

from slurm_train.slurm.queue_view import Look, QueueView, Wanted
from slurm_train.standing.facts import Standing, Subject, standing_of, wanted_of
from slurm_train.standing.files import FilesReader, read_files
from slurm_train.standing.schema import KEYS, as_mapping
from slurm_train.standing.survey import Survey, Surveyor
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state
from tests.support.run_facts import attempt, beat

LINE = {"step": 120, "loss": 1.25, "tokens_per_s": 51234.5, "step_time_s": 0.5, "mfu": 0.41}
NOW_S = 2e9


def seen(run: Any, look: Look, **values: Any) -> Standing:
    return standing_of(Subject(run, **values), read_files(run), look, now_unix_s=time.time())


def test_a_running_run_in_numbers(has_run: Any) -> None:
    run = has_run(
        job_ids=("12",),
        ledger=(*attempt(0, reason="preempted"), *attempt(1)),
        metrics=(LINE,),
        beats=(beat(0, age_s=1), beat(3, age_s=200, host="node2"), beat(4, age_s=900, phase="end")),
    )
    job = job_state("12", "RUNNING", nodelist="node[1-4]", partition="main")
    found = as_mapping(seen(run, Look(jobs={"12": job}, age_s=0.0), index=3, overrides={"seed": "1"}))
    age_s = found.pop("heartbeat_age_s")
    assert age_s == pytest.approx(200, abs=20), "of the most silent rank that is at work"
    assert found == {
        "run": "gpt-stdlib/3f9a1c07",
        "path": str(run.path),
        "index": 3,
        "overrides": {"seed": "1"},
        "state": "running",
        "note": "",
        "is_active": True,
        "job_id": "12",
        "slurm_state": "RUNNING",
        "slurm_reason": None,
        "slurm_source": "squeue",
        "partition": "main",
        "nodelist": "node[1-4]",
        "jobs_ahead": None,
        "expected_start_unix_s": None,
        "submit_time_unix_s": 100.0,
        "attempt_start_time_unix_s": 10.0,
        "attempts": 2,
        "step": 120,
        "max_steps": 400,
        "loss": 1.25,
        "tokens_per_s": 51234.5,
        "samples_per_s": None,
        "mfu": 0.41,
        "step_time_s": 0.5,
        "time_left_s": 140.0,
        "heartbeat_rank": 3,
        "heartbeat_host": "node2",
    }


def test_a_waiting_run_has_its_place_and_its_expected_start(has_run: Any) -> None:
    job = job_state("12", "PENDING", reason="Priority", start="2026-01-31T09:41:24")
    found = as_mapping(seen(has_run(job_ids=("12",)), Look(jobs={"12": job}, jobs_ahead={"12": 4}, age_s=0.0)))
    assert (found["state"], found["slurm_reason"], found["jobs_ahead"]) == ("queued", "Priority", 4)
    assert found["expected_start_unix_s"] == datetime(2026, 1, 31, 9, 41, 24).timestamp()
    assert found["heartbeat_age_s"] is None and found["time_left_s"] is None


def test_every_run_has_every_key_and_every_key_a_meaning(has_run: Any) -> None:
    for run in (has_run("aaaa0000"), has_run("bbbb0000", result={}, ledger=attempt(0, reason="done"))):
        assert list(as_mapping(seen(run, Look()))) == list(KEYS)


def test_a_loss_that_is_no_number_is_null_in_json(has_run: Any) -> None:
    run = has_run(metrics=({"step": 1, "loss": float("nan")},))
    found = as_mapping(seen(run, Look()))
    assert found["loss"] is None and "NaN" not in json.dumps(found)


def test_a_torn_run_directory_still_has_numbers(has_run: Any) -> None:
    run = has_run(ledger=attempt(0))
    for path in (run.plan, run.job, run.metrics):
        path.write_text("{")
    found = seen(run, Look())
    assert (found.job_id, found.max_steps, found.loss, found.step) == (None, None, None, 0)


def test_what_slurm_is_asked(has_run: Any) -> None:
    runs = {
        "finished": has_run("aaaa0000", job_ids=("1",), result={}),
        "running": has_run("bbbb0000", job_ids=("2",), ledger=attempt(0)),
        "stopped": has_run("cccc0000", job_ids=("3",), submitted_unix_s=1.0, ledger=attempt(0, action="stop")),
        "here": has_run("dddd0000"),
    }
    files = {name: read_files(run) for name, run in runs.items()}
    assert wanted_of(list(files.values())) == Wanted(job_ids=["2", "3"], may_wait=False, settled=["3"])
    waiting = read_files(has_run("eeee0000", job_ids=("5",)))
    requeued = read_files(has_run("ffff0000", job_ids=("6",), ledger=attempt(0, action="requeue")))
    assert wanted_of([files["running"], waiting]).may_wait and wanted_of([requeued]).may_wait


def test_files_of_a_run_that_has_ended_are_read_once_until_they_change(has_run: Any) -> None:
    reader, run = FilesReader(), has_run(ledger=attempt(0, action="stop", reason="failed"))
    first = reader.read(run)
    run.metrics.write_text(json.dumps(LINE) + "\n")
    assert reader.read(run) is first
    run.attempts.write_text(run.attempts.read_text() + json.dumps(attempt(1)[0]) + "\n")
    assert reader.read(run).line == LINE


def test_a_survey_asks_slurm_once_about_all_runs(has_run: Any) -> None:
    subjects = [Subject(has_run(f"{number}aaa0000", job_ids=(str(number),))) for number in range(1, 4)]
    asked = []

    class Slurm(FakeSlurmCommands):
        def queue(self, job_ids: Any, *, whole: bool = False) -> Any:
            asked.append(list(job_ids))
            return super().queue(job_ids, whole=whole)

    slurm = Slurm([job_state("1"), job_state("2", "PENDING", reason="Priority")])
    survey = Surveyor(QueueView(slurm)).look(subjects)
    assert [one.state.value for one in survey.standings] == ["running", "queued", "not_started"]
    assert asked == [["1", "2", "3"]]


def test_a_survey_is_over_when_nothing_is_active_and_slurm_says_so(has_run: Any) -> None:
    stopped = seen(has_run("aaaa0000", job_ids=("1",), submitted_unix_s=1.0, ledger=attempt(0, action="stop")), Look())
    waiting = seen(has_run("bbbb0000", job_ids=("2",)), Look())
    running = seen(has_run("cccc0000", job_ids=("3",)), Look(jobs={"3": job_state("3")}, age_s=0.0))
    answered, silent = Look(age_s=0.0), Look(problem="no answer")
    assert Survey((stopped,), silent).is_over and Survey((stopped,), silent).is_settled
    assert Survey((stopped, waiting), answered).is_over and not Survey((stopped, waiting), answered).is_settled
    assert not Survey((stopped, waiting), silent).is_over, "the job may well be waiting"
    assert not Survey((stopped, running), answered).is_over


def test_an_answer_from_before_the_end_is_about_the_past(has_run: Any) -> None:
    ledger = attempt(0, action="stop", reason="failed", time_unix_s=time.time() - 2)
    run = has_run(job_ids=("12",), submitted_unix_s=1.0, ledger=ledger)
    states = [seen(run, Look(jobs={"12": job_state("12")}, age_s=age_s)).state.value for age_s in (4.0, 0.5)]
    assert states == ["failed", "running"], "asked before the end, and after it (somebody requeued the job)"
