"""Steps and losses are read from what programs print, as it comes, and from reports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slurm_train.tools.rehearsal.marks import REPORTS, Mark, MarkReader, choose_kind
from slurm_train.tools.rehearsal.rehearsal import last_mark_of_epoch


def read(tmp_path: Path, log: str, *, reports: list[dict[str, object]] | None = None, pattern: str = "") -> list[Mark]:
    """Returns the marks of the kind that would be compared; the log comes in two pieces, cut within a line."""
    path = tmp_path / "log"
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in reports or []))
    reader = MarkReader(path, re.compile(pattern) if pattern else None)
    for end in (len(log) // 2, len(log)):
        path.write_text(log[:end])
        reader.read(metrics, attempt=1)
    kind = choose_kind(reader.by_kind)
    return [] if kind is None else reader.of_kind(kind)


@pytest.mark.parametrize(
    ("log", "places", "losses"),
    [
        ("step 1 loss 0.5\nstep 2 loss 1e-05\nstep 3 loss nan\n", [(0, 1), (0, 2), (0, 3)], [0.5, 1e-05, None]),
        (
            "step 0: train loss 4.1, val loss 4.2\niter 0: loss 4.25, time 3ms\niter 1: loss 4.125, time 4ms\n",
            None,
            None,
        ),
        (
            "Train Epoch: 1 [0/600 (0%)]\tLoss: 2.25\nTrain Epoch: 1 [64/600 (10%)]\tLoss: 1.5\n",
            [(1, 0), (1, 64)],
            [2.25, 1.5],
        ),
        (
            " 0%|    | 0/9 [00:00<?]\r 11%|#   | 1/9 [00:01<00:09, loss=3.5]\r 22%|##  | 2/9 [00:02<00:08, loss=2.5]\r",
            [(0, 1), (0, 2)],
            [3.5, 2.5],
        ),
        (
            "{'loss': '1.5', 'epoch': '0.1'}\n{'loss': 1.25, 'grad_norm': 3.0, 'epoch': 0.2}\n",
            [(0.1, 0), (0.2, 0)],
            [1.5, 1.25],
        ),
        ('{"step": 3, "loss": 0.5}\n{"step": 4, "loss": 0.25}\n', [(0, 3), (0, 4)], [0.5, 0.25]),
        # diffusers, open_clip, nanochat, TRL, Lightning, ignite, Keras, Stable-Baselines3
        (
            "Epoch 0:  25%|##   | 1/4 [00:01<00:03,  1.13s/it, loss=9.5, lr=1e-06, step=0]\r"
            "Epoch 0:  25%|##   | 1/4 [00:01<00:03,  1.13s/it, loss=1.5, lr=1e-06, step=1]\r"
            "Epoch 1:  25%|##   | 1/4 [00:01<00:03,  1.13s/it, loss=1.25, lr=4e-06, step=5]\r",
            [(0, 1), (1, 1)],
            [1.5, 1.25],
        ),
        (
            "2026-11-29,04:00:01 | INFO | Train Epoch: 0 [  32/6400 (0%)] Data (t): 0.5 LR: 0.0 Contrastive_loss: 3.5 "
            "(3.5) Loss: 3.5 (3.5)\n2026-11-29,04:00:02 | INFO | Train Epoch: 0 [  64/6400 (1%)] Data (t): 0.5 LR: 0.0 "
            "Contrastive_loss: 3.25 (3.375) Loss: 3.25 (3.375)\n",
            [(0, 32), (0, 64)],
            [3.5, 3.25],
        ),
        (
            "Step 00000 | Validation bpb: 3.3\nstep 00000/00040 (0.00%) | loss: 10.5 | lrm: 1.00 | dt: 500.00ms\n"
            "step 00001/00040 (2.50%) | loss: 10.25 | lrm: 1.00 | dt: 80.00ms\n",
            [(0, 0), (0, 1)],
            [10.5, 10.25],
        ),
        (
            "{'loss': '6.0', 'entropy': '5.9', 'num_tokens': '128', 'mean_token_accuracy': '0', 'epoch': '0.01'}\n"
            "{'loss': '5.5', 'entropy': '5.9', 'num_tokens': '256', 'mean_token_accuracy': '0', 'epoch': '0.02'}\n",
            [(0.01, 0), (0.02, 0)],
            [6.0, 5.5],
        ),
        (
            "Epoch 0:  50%|##   | 1/2 [00:00<00:00, 9.1it/s, v_num=0, train_loss_step=2.5]\r"
            "Epoch 1:  50%|##   | 1/2 [00:00<00:00, 9.1it/s, v_num=0, train_loss_step=1.5, train_loss_epoch=2.0]\r",
            [(0, 1), (1, 1)],
            [2.5, 1.5],
        ),
        (
            "Epoch [1/3]: [7/63]  11%|#    , loss=2.25 [00:00<00:01]\r"
            "Epoch [2/3]: [1/63]   2%|     , loss=2.0 [00:00<00:02]\r",
            [(1, 7), (2, 1)],
            [2.25, 2.0],
        ),
        (
            "Epoch 1/2\n 1/9 ━━━━━━━━━━━━━━━━━━━━ 2s 41ms/step - loss: 2.5\n"
            " 9/9 ━━━━━━━━━━━━━━━━━━━━ 1s 9ms/step - loss: 2.25\n"
            "Epoch 2/2\n 1/9 ━━━━━━━━━━━━━━━━━━━━ 1s 41ms/step - loss: 2.0\n",
            [(1, 1), (1, 9), (2, 1)],
            [2.5, 2.25, 2.0],
        ),
        (
            "| time/              |      |\n|    total_timesteps | 256  |\n"
            "| time/              |      |\n|    total_timesteps | 512  |\n| train/             |      |\n"
            "|    entropy_loss    | -0.7 |\n|    loss            | 8.5  |\n|    value_loss      | 30.5 |\n",
            [(0, 256), (0, 512)],
            [None, 8.5],
        ),
        ("[0/3][1/9] Loss_D: 0.5 Loss_G: 2.5\n[0/3][2/9] Loss_D: 0.25 Loss_G: 2\n", [(0, 1), (0, 2)], [0.5, 0.25]),
        (
            "Epoch 1/5: 4%|4 | 2/54 [0:1<0:3, loss (batch)=0.5]\nEpoch 1/5: 8%|8 | 4/54 [0:2<0:3, loss (batch)=2]\n",
            [(1, 2), (1, 4)],
            [0.5, 2.0],
        ),
        ("loading\ndone\n", [], []),
    ],
)
def test_places_and_losses_are_read_from_common_forms(
    tmp_path: Path, log: str, places: list[tuple[float, float]] | None, losses: list[float | None] | None
) -> None:
    marks = read(tmp_path, log)
    if places is None or losses is None:
        assert [mark.loss for mark in marks] == [4.25, 4.125]
        return
    assert [mark.place for mark in marks] == places
    assert [None if mark.loss is None or mark.loss != mark.loss else mark.loss for mark in marks] == losses


def test_reports_of_this_attempt_come_before_the_log(tmp_path: Path) -> None:
    reports: list[dict[str, object]] = [
        {"step": 1, "loss": 9.0, "attempt": 0},
        {"step": 1, "loss": 0.5, "attempt": 1, "max_steps": 30},
        {"step": 1, "eval_loss": 0.75, "attempt": 1},
        {"step": 2, "loss": 0.25, "attempt": 1, "max_steps": 30, "samples_digest": 7},
    ]
    marks = read(tmp_path, "step 1\nstep 2\nstep 3\n", reports=reports)
    assert [(mark.place, mark.loss, mark.total) for mark in marks] == [((0, 1), 0.5, 30), ((0, 2), 0.25, 30)]
    assert [mark.samples_digest for mark in marks] == [None, 7]


def test_a_pattern_of_ones_own_is_used_alone(tmp_path: Path) -> None:
    log = "step 5 of 9\nit=1 l=0.5\nit=2 l=0.25\nstep 6 of 9\n"
    marks = read(tmp_path, log, pattern=r"it=(?P<step>\d+) l=(?P<loss>\S+)")
    assert [(mark.place, mark.loss) for mark in marks] == [((0, 1), 0.5), ((0, 2), 0.25)]


def test_a_count_that_begins_anew_in_each_epoch_is_not_compared(tmp_path: Path) -> None:
    assert read(tmp_path, "batch 1/2\nbatch 2/2\nbatch 1/2\nbatch 2/2\n") == []


def test_kinds_are_those_of_reports_where_there_are_two() -> None:
    one = [Mark((0, 1), "step 1", 0.5)]
    assert choose_kind({REPORTS: one}) is None


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        ((1, 1, 1, 2, 2), 3),
        ((0.3, 0.7, 1.0, 1.3), 3),
        ((1, 2, 2, 3), 3),
        ((1, 1, 1, 1), None),
        ((1, 2, 3, 4), None),
    ],
)
def test_an_epoch_ends_with_its_last_report(tmp_path: Path, epochs: tuple[float, ...], expected: int | None) -> None:
    reports: list[dict[str, object]] = [
        {"step": step, "epoch": epoch, "attempt": 1} for step, epoch in enumerate(epochs, 1)
    ]
    last = last_mark_of_epoch(read(tmp_path, "", reports=reports))
    assert (None if last is None else last.place[1]) == expected


def test_an_epoch_ends_with_its_last_line(tmp_path: Path) -> None:
    lines = [f"Epoch {epoch}/3 step {step}/4 loss 0.5\n" for epoch in (1, 2) for step in (1, 2, 3, 4)]
    last = last_mark_of_epoch(read(tmp_path, "".join(lines)))
    assert last is not None and last.place == (1, 4)
