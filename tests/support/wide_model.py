"""The tiny project's module with a model whose width is a word of the command line, so that a save takes time."""

from __future__ import annotations

from tests.support.command_line import TINY_MODULE

WIDE_MODULE = f"""{TINY_MODULE}
class Tiny(nn.Module):
    def __init__(self, step_s: float = 0.0, width: int = 16):
        super().__init__()
        self.step_s = step_s
        self.layers = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 1))
    def forward(self, x):
        time.sleep(self.step_s)
        return self.layers(x)
"""
