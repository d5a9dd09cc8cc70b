"""What a resume reads of a checkpoint beside its tensors: at thousands of ranks the description has gigabytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.checkpoint.metadata import METADATA_FILE
from tests.train.small_runs import config_of, run_to_end


@pytest.mark.distributed
def test_description_is_read_once_to_load(tmp_path: Path) -> None:
    config = {**config_of(), "callbacks": [{"_target_": "slurm_train.train.callbacks.EMA", "decay": 0.9}]}
    run_to_end(tmp_path / "run", config, ranks=1)
    text = run_to_end(tmp_path / "run", config, ranks=1, attempt=1, fault={"tells_opened": METADATA_FILE})
    resume, _, rest = text.partition("resuming from")
    assert "(step 20)" in rest
    assert resume.count(f"opened {METADATA_FILE}") == 3, "for its hash, for what it says about files, and to load"
