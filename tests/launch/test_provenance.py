from __future__ import annotations

import json
from pathlib import Path

from slurm_train.launch.preparation import Source
from slurm_train.launch.provenance import write_provenance
from slurm_train.launch.snapshot import SourceState


def test_words_code_and_versions_are_kept(tmp_path: Path) -> None:
    source = Source(tmp_path, SourceState(("train.py",), "abc", "diff"), ["train.py"])
    write_provenance(tmp_path / "provenance.json", source, words=["+cluster=2x1"])
    facts = json.loads((tmp_path / "provenance.json").read_text())
    assert facts["words"] == ["+cluster=2x1"] and facts["directory"] == str(tmp_path)
    assert (facts["git_commit"], facts["git_dirty"], facts["git_diff"], facts["num_files"]) == ("abc", True, "diff", 1)
    assert facts["versions"]["torch"] != "not installed" and facts["versions"]["python"].startswith("3.")
