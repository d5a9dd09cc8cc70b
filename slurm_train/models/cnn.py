"""A small convolutional network for small grey images.

Shapes: B batch, K input channels, H and W sides of the image, F features, N classes.
"""

from __future__ import annotations

import math

from torch import Tensor, nn


class CNN(nn.Module):
    """Three 3 x 3 convolutions, one halving of the image, one linear layer.

    GroupNorm instead of BatchNorm: what one image gives must not depend on the others of its micro-batch, or the split
    of a batch over ranks would change the result.

    Args:
        num_classes: classes to tell apart.
        channels: channels of the image, 1 for grey.
        features: width of the first layer; the others have twice as many.
        side: height and width of the image in pixels, even.
        dropout: probability before the last layer.
    """

    def __init__(
        self, *, num_classes: int = 10, channels: int = 1, features: int = 32, side: int = 8, dropout: float = 0.0
    ) -> None:
        super().__init__()
        wide = 2 * features
        self.layers = nn.Sequential(
            *_convolution(channels, features),
            *_convolution(features, wide),
            nn.MaxPool2d(2),
            *_convolution(wide, wide),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(wide * (side // 2) ** 2, num_classes),
        )

    def init_weights(self, name: str, part: Tensor) -> None:
        """Gives the values of torch's own layers: uniform in +-1/sqrt(inputs), norms one and zero.

        Args:
            name: of a parameter.
            part: rows of it, which are changed in place.
        """
        layer = self.get_submodule(name.rpartition(".")[0])
        is_weight = name.endswith("weight")
        if isinstance(layer, nn.GroupNorm):
            nn.init.constant_(part, 1.0 if is_weight else 0.0)
        elif is_weight:
            nn.init.kaiming_uniform_(part, a=math.sqrt(5))
        else:
            assert isinstance(layer, nn.Linear)
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(part, -bound, bound)

    def forward(self, images_BKHW: Tensor) -> Tensor:
        """Returns the logits of the classes, float32 (B, N).

        Args:
            images_BKHW: float32 (B, K, H, W) in [0, 1].
        """
        logits_BN: Tensor = self.layers(images_BKHW)
        return logits_BN


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU()]
