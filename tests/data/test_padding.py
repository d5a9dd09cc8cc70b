from __future__ import annotations

import torch

from slurm_train.data.padding import IGNORED, pad


def test_inputs_are_padded_with_zeros_and_targets_with_what_does_not_count() -> None:
    inputs, targets = pad([(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 4])), (torch.tensor([5]), torch.tensor([6]))])
    assert inputs.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert targets.tolist() == [[2, 3, 4], [6, IGNORED, IGNORED]]


def test_values_without_length_are_stacked() -> None:
    inputs, labels = pad([(torch.ones(2, 3), torch.tensor(1)), (torch.ones(1, 3), torch.tensor(0))])
    assert inputs.shape == (2, 2, 3) and labels.tolist() == [1, 0]
