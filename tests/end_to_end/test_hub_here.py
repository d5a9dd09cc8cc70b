"""A model of the Hub: fetched where the run is made, trained and resumed by ranks that reach no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from slurm_train.models.causal_lm import causal_lm
from slurm_train.rundir.paths import RunDirectory
from tests.fakes.hub import TOKENS_MODULE, Hub, Repository, serving
from tests.support.command_line import Done
from tests.support.extras import NEEDS_TRANSFORMERS
from tests.support.warm_commands import WarmPerson

pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.slow, pytest.mark.full]

SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}  # fmt: skip
WORDS = ("run.name=hub", "model=hf", "model.path=lab/tiny", "data._target_=mine.Tokens", "train.max_steps=2",
         "train.evaluate=false", "batch.global_size=4", "run.processes=1", "checkpoint.every_steps=1",
         "train.sample_tokens=0")  # fmt: skip
TOKEN = "hf_" + "secretsecret"


def tiny_files(folder: Path, *, seed: int) -> dict[str, bytes]:
    """Returns the files of a llama with random weights."""
    torch.manual_seed(seed)
    causal_lm(model_type="llama", config=SHAPE).network.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with serving() as server:
        server.repositories["lab/tiny"] = Repository()
        server.repositories["lab/tiny"].commit(tiny_files(tmp_path / "first", seed=0))
        yield server


class Typist:
    """A person whose environment names a Hub and a cache."""

    def __init__(self, folder: Path, url: str) -> None:
        folder.mkdir()
        (folder / "mine.py").write_text(TOKENS_MODULE)
        self.person = WarmPerson(folder)
        self.env = {"HF_ENDPOINT": url, "HF_HOME": str(folder.parent / "hf"), "HF_TOKEN": TOKEN}

    def types(self, *words: str) -> Done:
        return self.person.types(*words, env=self.env, timeout_s=280)


def settings_of(run: RunDirectory) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(run.config.read_text())
    return values


def test_a_model_is_fetched_once_pinned_and_trained_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    typist = Typist(tmp_path / "project", hub.url)
    repository = hub.repositories["lab/tiny"]
    commit = repository.references["main"]

    planned = typist.types("plan", *WORDS)
    assert planned.code == 0 and f"lab/tiny at {commit[:12]} (main)" in planned.err and "are fetched" in planned.err
    assert hub.fetched == [] and not (tmp_path / "hf" / "hub").exists()

    done = typist.types("write", *WORDS)
    assert done.code == 0, done.err
    run = RunDirectory(Path(done.out.strip()))
    folder = settings_of(run)["model"]["path"]
    assert folder == str(tmp_path / "hf" / "hub" / "models--lab--tiny" / "snapshots" / commit)
    assert json.loads(run.provenance.read_text())["hub"] == [
        {"key": "model.path", "repository": "lab/tiny", "commit": commit, "folder": folder}
    ]
    fetched = list(hub.fetched)
    assert "model.safetensors" in fetched
    again = typist.types("write", *WORDS)
    assert again.out == done.out and hub.fetched == fetched

    # Of a later commit the same words are another run; the first stays what it is.
    later = repository.commit(tiny_files(tmp_path / "second", seed=1))
    planned = typist.types("plan", *WORDS)
    assert later[:12] in planned.err and str(run.path) not in planned.err
    num_asked = len(hub.asked)
    hub.status = 503
    typist.env["HF_ENDPOINT"] = "http://127.0.0.1:9"
    resumed = typist.types("resume", str(run.path))
    assert resumed.code == 0 and run.result.exists(), resumed.err
    assert (tmp_path / "project" / "offline").read_text() == "1" and len(hub.asked) == num_asked
    longer = typist.types("resume", str(run.path), "train.max_steps=3", "--accept", "train.max_steps")
    assert longer.code == 0, longer.err
    assert settings_of(run)["model"]["path"] == folder and len(hub.asked) == num_asked

    assert f"Bearer {TOKEN}" in hub.tokens
    kept = [path for path in (tmp_path / "project").rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if TOKEN.encode() in path.read_bytes()]


def test_the_login_half_asks_and_fetches_without_torch(hub: Hub, tmp_path: Path) -> None:
    typist = Typist(tmp_path / "project", hub.url)
    code = (
        "import sys; from pathlib import Path\n"
        "from slurm_train.code.hub import fetch_hub_files, pin_path\n"
        "pinned = []\n"
        "print(pin_path('model.path', 'lab/tiny', 'weights', Path(), pinned))\n"
        "fetch_hub_files(pinned)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = typist.person.runs(typist.person.python, "-c", code, env=typist.env)
    assert done.code == 0 and (Path(done.out.strip()) / "model.safetensors").is_file(), done.err


def test_a_refusal_leaves_no_run(hub: Hub, tmp_path: Path) -> None:
    typist = Typist(tmp_path / "project", hub.url)
    for words in (("model.path=lab/none",), ("model.revision=v9",)):
        for verb in ((), ("plan",)):
            done = typist.types(*verb, *WORDS, *words)
            assert done.code == 2 and "Hub" in done.err and "hint:" in done.err, done.err
    assert not (tmp_path / "project" / "runs").exists() and hub.fetched == []


def test_a_tokenizer_of_the_hub_prepares_text(hub: Hub, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    hub.repositories["lab/words"] = Repository()
    hub.repositories["lab/words"].commit({"tokenizer.json": tokenizer.to_str().encode()})
    typist = Typist(tmp_path / "project", hub.url)
    (tmp_path / "project" / "text.txt").write_text("one two\n" * 50)
    done = typist.types("prepare", "text.txt", "--out", "shards", "--held-out", "0", "--tokenizer", "lab/words")
    assert done.code == 0 and "lab/words at" in done.err, done.err
    assert (tmp_path / "project" / "shards" / "tokenizer.json").is_file() and hub.fetched == ["tokenizer.json"]
