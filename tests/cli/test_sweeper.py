"""Sweepers of Hydra's that choose points by the values of earlier ones, and sweeps in Hydra's own keys."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from slurm_train.cli.multirun import objective
from slurm_train.errors import EXIT_REQUEUE, StudyError
from slurm_train.rundir.paths import RunDirectory
from slurm_train.rundir.sweep import SweepDirectory, read_table
from tests.cli.conftest import Shell
from tests.support.refusals import refusal

FOUND: list[float] = []
GIVES_UP_AT = [0.0]


class Halving(Sweeper):
    """Goes from lr=8 to half of it as long as that is better, two points at a time, one of them twice."""

    def __init__(self, *, seed: int | None) -> None: ...

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        lr, best = 8.0, float("inf")
        while True:
            batch = [[*arguments, f"optim.lr={value}"] for value in (lr, lr / 2, lr)]
            values = [one.return_value for one in self.launcher.launch(batch, initial_job_idx=0)]
            assert values[0] == values[2]
            FOUND.append(values[0])
            logging.getLogger("hydra_plugins.halving").info("so far: %s", lr)
            if lr == GIVES_UP_AT[0]:
                raise ValueError("No trials are completed yet.")
            if values[0] >= best:
                return
            lr, best = lr / 2, values[0]


# Makes sbatch finish every run of the array at once, with (lr - 1.5)^2 as its value.
FINISH = """
case "$*" in *submit*|*sh) for r in $(cat {root}/runs/sweeps/*/arrays/*/runs.txt); do
  lr=$(sed -n 's/^  lr: //p' "$r/config.yaml" | head -1)
  value=$(awk "BEGIN {{ print ($lr - 1.5) ^ 2 }}")
  echo "{{\\"step\\": 1, \\"eval_loss\\": $value}}" > "$r/result.json"
done;; esac
"""


@pytest.fixture
def halving(shell: Shell) -> Iterator[str]:
    """Installs the sweeper as a plugin of Hydra's, which lives in a package of that name; gives the words for it."""
    FOUND.clear()
    package, module = ModuleType("hydra_plugins"), ModuleType("hydra_plugins.halving")
    package.__path__ = []
    module.Halving = Halving  # type: ignore[attr-defined]
    package.halving = module  # type: ignore[attr-defined]
    shell.patch.setitem(sys.modules, "hydra_plugins", package)
    shell.patch.setitem(sys.modules, "hydra_plugins.halving", module)
    Halving.__module__ = "hydra_plugins.halving"
    Plugins.instance().register(Halving)
    node = {"_target_": "hydra_plugins.halving.Halving", "seed": None}
    ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=node, provider="test")
    program = shell.slurm.folder / "sbatch"
    program.write_text(program.read_text() + FINISH.format(root=shell.folder))
    yield "-m hydra/sweeper=halving +cluster=1x8 seed=3"
    ConfigStore.instance().repo["hydra"]["sweeper"].pop("halving.yaml")


def test_a_sweeper_that_needs_values_gets_them_from_the_results(shell: Shell, halving: str) -> None:
    shell.refuses("chooses its points as it goes", f"plan {halving}")
    assert shell.types(halving).code == 0
    values = [(lr - 1.5) ** 2 for lr in (8, 4, 2, 1)]
    assert values == FOUND
    assert list((shell.folder / "multirun").iterdir()), "a place for files of the sweeper's own"
    (sweep,) = (shell.folder / "runs" / "sweeps").iterdir()
    table = read_table(SweepDirectory(sweep))
    assert [(one.index, dict(one.overrides)) for one in table] == [
        (index, {"optim.lr": str(lr)}) for index, lr in enumerate((8.0, 4.0, 2.0, 1.0, 0.5))
    ]
    assert shell.slurm.times_asked("sbatch") == 4, "what is finished is not submitted again"
    rows = shell.types(f"collate {sweep.name}").out.splitlines()
    assert [float(row.split("|")[3]) for row in rows[2:]] == [8, 4, 2, 1, 0.5]
    assert shell.types(f"{halving} sweep.objective=eval_loss").code == 0, "a driver that is started anew catches up"
    assert values * 2 == FOUND and shell.slurm.times_asked("sbatch") == 4
    assert len(list(sweep.parent.iterdir())) == 1 and len(read_table(SweepDirectory(sweep))) == 5


def test_what_a_sweeper_says_is_shown_and_what_it_raises_is_an_error(shell: Shell, halving: str) -> None:
    shell.patch.setattr(f"{__name__}.GIVES_UP_AT", [4.0])
    done = shell.types(halving)
    said = [line for line in done.err.splitlines() if line.startswith("so far")]
    assert (done.code, said) == (1, ["so far: 8.0", "so far: 4.0"])
    assert "error: the sweeper gave up: No trials are completed yet.\nhint: `status`" in done.err


def test_a_sweep_may_stand_in_a_file_of_the_users_own_and_words_win(shell: Shell) -> None:
    (shell.folder / "site").mkdir()
    text = "defaults: [config, _self_]\nhydra:\n  sweeper:\n    params:\n      seed: range(3)\n      optim.lr: 1,2\n"
    (shell.folder / "site" / "study.yaml").write_text(text)
    words = "-m --config-dir site --config-name study +cluster=1x8"
    assert "6 runs: seed (3) x optim.lr (2)" in shell.types(words).err
    assert "3 runs: seed (3)\n" in shell.types(f"{words} optim.lr=5").err


def test_a_run_without_the_value_that_is_asked_for_is_an_error(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.result.write_text('{"loss": 2.0, "eval_loss": 1.0}')
    assert (objective(run, None), objective(run, "loss")) == (1.0, 2.0)
    assert "has no result eval_f1" in refusal(StudyError, objective, run, "eval_f1").message
    run.result.write_text('{"loss": 2.0, "eval_loss/dataloader_idx_0": 1.0}')
    refused = refusal(StudyError, objective, run, None)
    assert "has no result eval_loss" in refused.message and "eval_loss/dataloader_idx_0; set" in refused.hint
    run.result.write_text('{"loss": 2.0}')
    assert objective(run, None) == 2.0
    for value in ("NaN", "Infinity", "null"):
        run.result.write_text(f'{{"loss": 2.0, "eval_loss": {value}}}')
        assert "eval_loss of " in refusal(StudyError, objective, run, None).message, "not the loss in its place"


def test_a_study_ends_with_the_reason_of_its_failed_run(shell: Shell, halving: str) -> None:
    program = shell.slurm.folder / "sbatch"
    start = '{"event": "start", "attempt": 0, "time_unix_s": 1.0}'
    end = '{"event": "end", "attempt": 0, "time_unix_s": 2.0, "reason": "failed", "note": "rank 3 on node2: E: x"}'
    line = f"printf '%s\\n%s\\n' '{start}' '{end}' > \"$r/attempts.jsonl\""
    program.write_text(re.sub(r"echo .*result.json\"", lambda _: line, program.read_text()))
    done = shell.types(halving)
    assert done.code == 1 and FOUND == []
    assert "ended without a result for the sweeper: rank 3 on node2: E: x\nhint: `logs " in done.err
    assert "what is finished is not trained again" in done.err


def test_a_study_has_one_direction(shell: Shell, halving: str) -> None:
    words = f"{halving} +hydra.sweeper.direction=[minimize,maximize]"
    assert "sweep.objective" in shell.refuses("direction=['minimize', 'maximize'] asks for several values", words)


def test_ctrl_c_ends_a_study_whose_runs_may_fail(halving: str, shell: Shell) -> None:
    shell.patch.setattr("slurm_train.cli.here.train_each", lambda *_, **__: EXIT_REQUEUE)
    done = shell.types(halving.replace("+cluster=1x8", "run.processes=1"))
    assert (done.code, FOUND) == (EXIT_REQUEUE, []), done.err
