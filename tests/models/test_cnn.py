from __future__ import annotations

import torch

from slurm_train.models.cnn import CNN


def test_learns_a_handful_of_images_each_by_itself() -> None:
    torch.manual_seed(0)
    model, images, labels = CNN(features=8), torch.rand(10, 1, 8, 8), torch.arange(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(images).argmax(dim=1) == labels).all()
    torch.testing.assert_close(model(images)[:2], model(images[:2]))
