"""The forms of the GPT, and a model of transformers, in parts on gloo ranks: they train as one process does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.extras import NEEDS_TRANSFORMERS

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_for_forms", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layouts = _load("test_layouts")

# Every form that differs from the shipped one, in one model: two runs instead of one for each.
GPT = {"_target_": "small_training.DoubleGPT", "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2,
       "positions": "learned", "bias": True, "tied": False}  # fmt: skip
STAGES = {"dp_replicate": 1, "tp": 2, "pp": 2}
POSITIONS = {"dp_replicate": 1, "cp": 2, "tp": 2, "sequence_parallel": True}
SHARDS = {"dp_replicate": 1, "dp_shard": 2, "tp": 2}
# Model, layouts, tolerance of losses and of weights. Llama's norms in transformers round to float32 on the way.
FORMS: dict[str, Any] = {
    "GPT": (GPT, [STAGES, POSITIONS], {}, {}),
    "transformers": ({"_target_": "small_training.double_llama"}, [SHARDS], {"rel": 1e-6}, {"rel": 1e-3, "abs": 1e-6}),
}


@pytest.mark.parametrize("name", ["GPT", pytest.param("transformers", marks=NEEDS_TRANSFORMERS)])
def test_parts_train_as_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, layouts_of_it, losses, weights = FORMS[name]
    monkeypatch.setattr(layouts, "LOSSES", losses or layouts.LOSSES)
    monkeypatch.setattr(layouts, "WEIGHTS", weights or layouts.WEIGHTS)
    for number, parallel in enumerate([{}, *layouts_of_it]):
        config = layouts.config_of(parallel)
        config["model"] = model
        layouts.trainer.run_to_end(tmp_path / str(number), config, ranks=layouts.ranks_of(parallel))
        layouts.assert_same_training(tmp_path / str(number), tmp_path / "0")
