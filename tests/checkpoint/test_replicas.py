"""That ranks hold the same values: what a digest sees, and who is named.

Real ranks that differ are in `tests/train/test_health.py` (a flipped bit) and `tests/session/test_training.py`.
"""

from __future__ import annotations

import pytest
import torch

from slurm_train.checkpoint.replicas import digest_of_parameters, find_divergent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_bit_changes_the_digest_of_parameters(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    num_bits = 8 * tensor.element_size()
    seen = {int(digest_of_parameters([tensor]))}
    for element in range(tensor.numel()):
        for bit in range(num_bits):
            flipped = tensor.clone()
            mask = 1 << bit if bit < num_bits - 1 else -(1 << bit)
            flipped.view(-1).view(integers)[element] ^= mask
            seen.add(int(digest_of_parameters([flipped])))
    assert len(seen) == 1 + tensor.numel() * num_bits
    # Offloaded parameters are not where the rank's device is; the meta device stands for any other.
    assert digest_of_parameters([tensor.to("meta")]).is_meta


@pytest.mark.parametrize("tensors", [[], [torch.zeros(0)], [torch.zeros(0, 3), torch.zeros(0)]])
def test_a_rank_without_an_element_has_a_digest(tensors: list[torch.Tensor]) -> None:
    assert int(digest_of_parameters(tensors)) == int(digest_of_parameters(tensors))


def test_a_digest_of_complex_numbers_counts_both_parts() -> None:
    digests = {int(digest_of_parameters([torch.tensor([z], dtype=torch.complex128)])) for z in (1 + 1j, 1 + 2j, 2 + 1j)}
    assert len(digests) == 3


def test_the_order_of_tensors_and_elements_counts() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    digests = {int(digest_of_parameters(tensors)) for tensors in ([one, two], [two, one], [one, one], [two, two])}
    assert len(digests) == 4


@pytest.mark.parametrize(
    ("digests", "divergent"), [([7, 7], []), ([7, 8], [1]), ([8, 7, 7], [0]), ([7, 8, 7, 9], [1, 3])]
)
def test_the_minority_is_named(digests: list[int], divergent: list[int]) -> None:
    assert find_divergent(digests) == divergent
