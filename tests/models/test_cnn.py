from __future__ import annotations

import torch

from slurm_train.models.cnn import CNN


def test_gives_one_score_per_class() -> None:
    assert CNN()(torch.rand(3, 1, 8, 8)).shape == (3, 10)
    assert CNN(num_classes=4, channels=3, features=8, side=12)(torch.rand(2, 3, 12, 12)).shape == (2, 4)


def test_one_image_does_not_depend_on_the_others() -> None:
    model = CNN()
    images = torch.rand(6, 1, 8, 8)
    torch.testing.assert_close(model(images)[:2], model(images[:2]))


def test_learns_a_handful_of_images() -> None:
    torch.manual_seed(0)
    model, images, labels = CNN(features=8), torch.rand(10, 1, 8, 8), torch.arange(10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(images).argmax(dim=1) == labels).all()
