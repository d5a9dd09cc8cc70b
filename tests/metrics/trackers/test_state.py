"""What is on disk of a tracker: a key that stays, and how far it is."""

from __future__ import annotations

import signal
from pathlib import Path

from slurm_train.metrics.trackers.state import (
    TrackerState,
    first_state,
    new_lines,
    num_unsent,
    read_state,
    tracker_ids,
    why_ended,
    write_state,
)
from tests.support.tracked_runs import add_lines, make_run, step_line, steps


def test_a_key_is_chosen_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert read_state(run, "wandb") is None
    first = first_state(run, "wandb")
    assert first.key.startswith("3f9a1c07-") and len(first.key) == 15
    assert first_state(run, "wandb") == first
    assert first_state(run, "mlflow").key != first.key
    assert run.trackers.stat().st_mode & 0o077 == 0


def test_a_file_that_is_shorter_than_what_was_sent_is_sent_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_lines(run, steps(1, 2))
    state = TrackerState(key="k", tracker_id="t", sent_bytes=9000, sure_bytes=9000)
    first_state(run, "wandb")
    write_state(run, "wandb", state)
    assert first_state(run, "wandb") == TrackerState(key="k", tracker_id="t")


def test_lines_are_read_when_they_are_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert new_lines(run.metrics, 0) == ([], 0)
    add_lines(run, steps(1, 2))
    with run.metrics.open("a") as file:
        file.write('{"step": 3')
    lines, end = new_lines(run.metrics, 0)
    assert [line["step"] for line in lines] == [1, 2]
    with run.metrics.open("a") as file:
        file.write('}\nno json\n{"no": "step"}\n')
    lines, end = new_lines(run.metrics, end)
    assert lines == [{"step": 3}] and end == run.metrics.stat().st_size


def test_what_was_not_sent_is_counted_over_any_length(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert num_unsent(run, "wandb") == 0
    add_lines(run, [step_line(step, note="x" * 1000) for step in range(600)])
    assert num_unsent(run, "wandb") == 600
    lines, end = new_lines(run.metrics, 0)
    write_state(run, "wandb", TrackerState(key=first_state(run, "wandb").key, sent_bytes=end))
    assert 0 < len(lines) < 600
    assert num_unsent(run, "wandb") == 600 - len(lines)


def test_a_checkpoint_gets_the_ids_that_are_known(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert tracker_ids(run) == {}
    first_state(run, "wandb")
    assert tracker_ids(run) == {}
    write_state(run, "wandb", TrackerState(key="k", tracker_id="k"))
    assert tracker_ids(run) == {"trackers": {"wandb": "k"}}


def test_why_a_process_ended() -> None:
    state = TrackerState(key="k", problem="no network")
    assert why_ended(state, 1, timeout_s=5) == "no network"
    assert why_ended(state, -signal.SIGALRM, timeout_s=5) == "it did not answer within 5 s"
    assert why_ended(None, -9, timeout_s=5) == "its process ended with code -9"
