"""What a run has come from: the stretches of training between its loads."""

from __future__ import annotations

from pathlib import Path

from slurm_train.rundir.lineage import Origin, Stretch, first_step_of, is_on_line, read_line, record_origin
from slurm_train.rundir.paths import RunDirectory


def test_an_overtaken_attempt_that_writes_late_is_not_what_the_run_goes_on_from(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    record_origin(run, 1, Origin(step=20, save_id="00000014"))
    record_origin(run, 0, Origin())
    line = read_line(run)
    assert line == [Stretch(1, "00000014"), Stretch(0, "", 20)]
    assert [first_step_of(run, attempt, default=7) for attempt in (0, 1, 2)] == [0, 20, 7]
    steps = [step for step in (19, 20, 21) if is_on_line(line, attempt=0, parent="", step=step)]
    assert steps == [19, 20], "what attempt 0 has trained after the load is left"
