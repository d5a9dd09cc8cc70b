"""A Hydra application gets one folder for all starts, unless its configuration or its words fix one."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_train.worker.hydra_folder import hydra_folder_word

DECORATED = "import hydra\n@hydra.main(version_base='1.3', config_path='conf')\ndef main(cfg): ...\n"
BY_NAME = "from hydra import main as entry\n@entry(config_path='conf')\ndef main(cfg): ...\n"
TIMED = {"hydra/default.yaml": "run:\n  dir: ${paths.log_dir}/runs/${now:%Y-%m-%d}\nsweep:\n  dir: x\n"}
INDIRECT = {"train.yaml": "hydra:\n  run:\n    dir: ${out}\nout: logs/${now:%H}\n"}
FIXED = {"train.yaml": "hydra:\n  run:\n    dir: .\n"}
REFERRED = {"train.yaml": "hydra:\n  run:\n    dir: out/${name}\n"}


@pytest.mark.parametrize(
    ("source", "files", "words", "gets_one"),
    [
        (DECORATED, {}, ["trainer=cpu"], True),
        (BY_NAME, {}, [], True),
        (DECORATED, TIMED, [], True),
        (DECORATED, INDIRECT, [], True),
        (DECORATED, FIXED, [], False),
        (DECORATED, REFERRED, [], False),
        (DECORATED, TIMED, ["hydra.run.dir=mine"], False),
        (DECORATED, TIMED, ["++hydra.run.dir=mine"], False),
        (DECORATED, TIMED, ["-m", "lr=1,2"], False),
        ("import hydra\nprint('@hydra.main')\n", {}, [], False),
        ("def main(:\n", {}, [], False),
    ],
)
def test_a_folder_that_is_named_by_the_time_is_replaced(
    tmp_path: Path, source: str, files: dict[str, str], words: list[str], *, gets_one: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    for name, text in files.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    word = hydra_folder_word(script, words, Path("/runs/a/1f/out"))
    assert word == ("hydra.run.dir=/runs/a/1f/out" if gets_one else "")


def test_a_folder_with_signs_of_hydra_s_grammar_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_NAME)
    assert hydra_folder_word(tmp_path / "train.py", [], Path("/a, b/out")) == "hydra.run.dir='/a, b/out'"
