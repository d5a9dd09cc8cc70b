"""Random streams of one rank: seeded apart, and saved as plain tensors and numbers.

Everything that `rng_state` returns passes `torch.load(weights_only=True)`: no pickle of foreign classes.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Returns a 63-bit hash of some integers (splitmix64): close numbers give unrelated hashes."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int, *, data_parallel_rank: int) -> None:
    """Seeds python, numpy and torch for one rank; two ranks never share a stream."""
    mixed = mix(seed, data_parallel_rank)
    seed_streams(mixed)
    # Those of the GPUs that are not in use yet, too.
    torch.manual_seed(mixed)


def seed_streams(seed: int) -> None:
    """Seeds the generators of python, numpy and torch, and that of the GPU in use; 30 us."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch says no types here
        torch.cuda.manual_seed(seed)


def stream_positions(*, of_gpu: bool = True) -> bytes:
    """Returns where the streams of `seed_streams` are; the same bytes as long as nothing is drawn from any of them."""
    has_gpu = of_gpu and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch says no types here
    gpu = torch.cuda.get_rng_state() if has_gpu else torch.empty(0)
    states = (random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes(), gpu.numpy().tobytes())
    return pickle.dumps(states)


def rng_state() -> dict[str, Any]:
    """Returns the state of all streams of this rank."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    # Asking for the state would open a GPU that the process does not use.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch says no types here
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what `rng_state` returned, on the same rank; a GPU's state if it was saved and there is a GPU."""
    python = state["python"]
    numpy_state = state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
