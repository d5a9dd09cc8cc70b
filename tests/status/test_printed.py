"""Where a program is by its log: lines as libraries print them, and lines that say nothing of progress."""

from __future__ import annotations

import pytest

from slurm_train.status.printed import Printed, began_anew, newest_line, newest_printed

# One line is enough.
CERTAIN = {
    "mmengine": (
        "04/21 21:03:53 - mmengine - INFO - Epoch(train) [1][10/90]  lr: 1.000e-02  eta: 0:00:25  time: 0.010",
        "epoch 1, 10/90",
    ),
    "mmengine by iterations": ("07/10 12:00:01 - mmengine - INFO - Iter(train) [ 1500/80000]  lr: 1e-02", "1500/80000"),
    "mmdetection 2": ("2020-05-21 04:01:33,217 - mmdet - INFO - Epoch [1][19/678]\tlr: 0.00020", "epoch 1, 19/678"),
    "ImageNet example": ("Epoch: [3][  10/1252]\tTime  0.41 (  0.55)\tData  0.00 (  0.1)", "epoch 3, 10/1252"),
    "torchvision": ("Epoch: [0]  [ 100/7393]  eta: 1:01:12  lr: 0.02  loss: 1.5 (1.6)", "epoch 0, 100/7393"),
    "in brackets": ("[Epoch 3][200/500] loss: 1.2", "epoch 3, 200/500"),
    "DCGAN": ("[0/25][12/250] Loss_D: 0.3652 Loss_G: 2.3718 D(x): 0.8301", "epoch 0/25, 12/250"),
    "DCGAN with words": ("[Epoch 0/200] [Batch 12/938] [D loss: 0.7] [G loss: 0.69]", "epoch 0/200, 12/938"),
    "word_language_model": ("| epoch   1 |   200/ 2983 batches | lr 20.00 | loss  5.44", "epoch 1, 200/2983"),
    "Swin": ("INFO Train: [12/300][830/1251]\teta 0:02:40 lr 0.0007", "epoch 12/300, 830/1251"),
    "timm": ("Train: 0 [  50/1251 (  4%)]  Loss: 6.94 (6.95)  Time: 0.5s, 400/s", "epoch 0, 50/1251"),
    "OpenPCDet": ("INFO  Train:    1/3 ( 33%) [  49/323 ( 15%)]  Loss: 36.77 (81.7)", "epoch 1/3, 49/323"),
    "MNIST example": ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 1.781", "epoch 1, 640/60000"),
    "fairseq": (
        '2021-01-05 | INFO | train_inner | {"epoch": 1, "update": 0.053, "loss": "14.2", "num_updates": "100"}',
        "epoch 1, 100",
    ),
    "fairseq, end of an epoch": (
        '| train | {"epoch": 21, "train_num_updates": "643", "train_lr": "2"}',
        "epoch 21, 643",
    ),
    "fairseq 0.6": ("| epoch 010  2000 / 8223 loss=1.27 (1.50), wps=962", "epoch 10, 2000/8223"),
    "detectron2": ("[11/01 11:23:38 d2.utils.events]: eta: 8:08:27  iter: 639  total_loss: 1.194  lr: 0.006", "639"),
    "Megatron": (" iteration      201/  250000 | consumed samples:       205824 | elapsed time", "201/250000"),
    "Stable-Baselines3": ("|    total_timesteps      | 2048        |", "2048"),
    "Composer": ("[epoch=1][batch=12/300]:", "epoch 1, 12/300"),
    "Ultralytics": (
        "     5/1000      6.74G      1.432        1.3       1.26          5        640:  50%|███  | 8/16 [00:05<00:02",
        "epoch 5/1000, 8/16",
    ),
    "Lightning": ("Epoch 3:  40%|████      | 40/100 [00:12<00:18,  3.2it/s, v_num=0]", "epoch 3, 40/100"),
    "tqdm": ("\r  4%|▍         | 12/300 [00:04<01:27,  3.2it/s]", "12/300"),
    "tqdm with words": ("Training:   5%|▍     | 1/20 [00:04<01:27,  4.59s/it, loss=0.880]", "1/20"),
    "torchtune": ("1|12|Loss: 1.2345:  40%|████ | 12/30 [00:10<00:15]", "12/30"),
    "Keras": (" 12/300 [=>....................] - ETA: 12s - loss: 0.3", "12/300"),
    "Keras 3": (" 12/300 ━━━━━━━━━━━━━━━━━━━━ 12s 41ms/step - loss: 0.3", "12/300"),
    "Lightning with rich": (
        "Epoch 5/6  ━━━━━━╸━━━━━━ 12/20 0:00:02 • 0:00:00 9.61it/s loss: 0.000",
        "epoch 5/6, 12/20",
    ),
    "transformers": ("{'loss': 0.5234, 'grad_norm': 1.2, 'learning_rate': 4e-05, 'epoch': 1.23}", "epoch 1.23"),
}
# Two lines of a kind are needed, here with 17 and 18.
COMMON = {
    "step {}/300 | loss 1.2": "18/300",
    "step {}": "18",
    "rank 0 of 2 step {}": "18",
    "iter {}: loss 2.4049, time 929.14ms, mfu 16.59%": "18",
    "step 000{}/21400 (0.47%) | loss: 5.1 | dt: 300ms": "18/21400",
    "\x1b[31mstep: {}  \x1b[32mloss:  7.9\x1b[0m": "18",
    "[INFO] [logging.py:96:log_dist] [Rank 0] step={}, skipped=0, lr=[0.1]": "18",
    "Epoch 1 | step {}/99 | loss 0.5": "epoch 1, 18/99",
    "Epoch {}/50 - loss 0.3": "epoch 18/50",
    "===> Epoch {} Complete: Avg. Loss: 0.013": "epoch 18",
    "global_step={}, episodic_return=12": "18",
    "Training epoch 0, iteration {}/299, lr: 0.1": "epoch 0, 18/299",
    "[step={}/300,epoch=1]": "epoch 1, 18/300",
    '{{"step": {}, "loss": 1.2}}': "18",
    "Step {} of 100: loss=0.5": "18/100",
    "Episode {}\tLast reward: 20.00": "18",
}
NOT = [
    *("  Total optimization steps = {}", "  Num Epochs = {}", "max_steps={}", "max_step={}", "warmup_steps={}"),
    *("step time: {} ms", "step 0.{}", "lr step size {}", "batch size {}", "log every step {}", "steps per epoch {}"),
    *("eval step {}/30", "Epoch(val) [200][{}/40]", "Resuming from step {}", "saved /x/step_{}.pt", "timestep {}"),
    "Downloading data: 12%|█ | {}/300 [00:04<01:27",
    "Loading checkpoint shards:  60%|██  | {}/30 [00:01<00:00",
    "Map:   4%|▍ | {}/300 [00:04<01:27,",
    "Validation DataLoader 0: 40%|██ | {}/30 [00:01<00:02",
    "Sanity Checking DataLoader 0:  90%|██| {}/20 [00:01<",
    "                 Class     Images  Instances      Box(P          R      mAP50):  90%|██| {}/20 [00:04<00:00",
    "Evaluating:  50%|█ | {}/20 [00:01<",
    "{{'eval_loss': 0.5, 'eval_runtime': 3, 'epoch': {}.0}}",
    *("12:00:{} started", "2026/01/{} hello", "version 2.{} of 3", "loss {}.5", ""),
]


@pytest.mark.parametrize(("line", "words"), CERTAIN.values(), ids=CERTAIN)
def test_a_line_of_a_library_says_where_the_program_is(line: str, words: str) -> None:
    printed = newest_printed(f"starting\n{line}\nsaving a checkpoint\n")
    assert printed is not None and printed.words == words


@pytest.mark.parametrize(("line", "words"), COMMON.items())
def test_a_common_form_counts_where_it_is_repeated(line: str, words: str) -> None:
    assert newest_printed(line.format(18)) is None
    printed = newest_printed("\n".join(line.format(number) for number in (17, 18)))
    assert printed is not None and printed.words == words


@pytest.mark.parametrize("line", NOT)
def test_other_numbers_are_no_progress(line: str) -> None:
    assert newest_printed("\n".join(line.format(number) for number in (17, 18))) is None


def test_a_step_counts_more_than_the_epoch_beside_it() -> None:
    log = "\r 31%|███ | 40/128 [00:04<00:09]\r    \r{'loss': '0.1391', 'learning_rate': '3.4e-05', 'epoch': '2.5'}\n"
    assert newest_printed(log) == Printed(step=40, max_steps=128)


def test_a_bar_of_an_evaluation_hides_no_progress_before_it() -> None:
    printed = newest_printed("  4%|▍ | 12/300 [00:04<01:27]\rEvaluating:  50%|█ | 10/20 [00:01<00:01]\r")
    assert printed == Printed(step=12, max_steps=300)


def steps(*numbers: int) -> str:
    return "".join(f"loading 1/2\nstep {number} loss 1\n" for number in numbers)


def bars(*numbers: int) -> str:
    return "".join(f"\r 4%|▍ | {number}/300 [00:04<01:27]" for number in numbers)


def epochs(*numbers: int) -> str:
    return "".join(f"Epoch {number}/9\n" for number in numbers)


@pytest.mark.parametrize(
    ("begin", "before", "found"),
    [
        (steps(1, 2), steps(*range(1, 61)), (1, 60)),
        (steps(51, 52), steps(*range(1, 61)), None),
        # It has come no further than its first line; both have.
        (steps(1), steps(*range(1, 61)), None),
        (steps(1, 2), steps(1, 2), None),
        # A bar begins at 0, also where the training goes on.
        (bars(0, 51, 52), bars(*range(61)), None),
        (bars(0, 1, 2), bars(*range(61)), (0, 60)),
        # Another kind of line says nothing, and neither does a bar of each epoch.
        (bars(0, 1, 2), steps(*range(1, 61)), None),
        (bars(0, 1, 2), bars(*range(61), *range(41)), None),
        (bars(0, 1, 2), bars(*range(100)) * 9 + bars(*range(40)), None),
        (epochs(1, 2), epochs(1, 2, 3), ("epoch 1/9", "epoch 3/9")),
        (epochs(3, 4), epochs(1, 2, 3), None),
    ],
)
def test_a_program_that_begins_anew_is_told_from_one_that_goes_on(
    begin: str, before: str, found: tuple[object, object] | None
) -> None:
    # As much of a log as is read of a long one.
    begin_before, end_before = before[:2000], before[-2000:]
    anew = began_anew(begin, begin_before=begin_before, end_before=end_before, num_bytes_before=len(before.encode()))
    if found is None:
        assert anew is None
    else:
        assert anew is not None
        assert tuple(printed.step or printed.words for printed in anew) in (found, ("0/300", found[1]))


def test_the_newest_line_is_the_program_s_without_signs_for_terminals() -> None:
    assert newest_line("a\n\x1b[31mstep 3\x1b[0m\r\x1b[Kstep 4\n----\nslurm_train: a remark\n") == "step 4"
