"""Repositories of the Hub: asked for, pinned and fetched where a run is submitted, or refused."""

from __future__ import annotations

import builtins
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from slurm_train.code import hub as launch_hub
from slurm_train.code.hub import fetch_hub_files, hub_snapshots, pin_hub_files, pin_path, require_snapshots
from slurm_train.config.data_kinds import PACKED
from slurm_train.config.schema import CAUSAL_LM, RunConfig, TrainSection
from slurm_train.errors import ConfigError
from tests.fakes.hub import Hub, Repository, serving

library = pytest.importorskip("huggingface_hub")
pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("huggingface_hub.utils")

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"[]",
    "modeling_tiny.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same once more",
    "original/config.json": b"{}",
}
FETCHED = ["config.json", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one repository, and an empty cache."""
    launch_hub._look_up.cache_clear()
    with serving() as server:
        monkeypatch.setattr(library.constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(library.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(library.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(library.constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        server.repositories["lab/tiny"] = Repository()
        server.repositories["lab/tiny"].commit(FILES)
        yield server
    launch_hub._look_up.cache_clear()


class Asked(NamedTuple):
    """What is typed of a model."""

    path: str | None = "lab/tiny"
    revision: str | None = None

    @property
    def config(self) -> RunConfig:
        return RunConfig(model={"_target_": CAUSAL_LM, "path": self.path, "revision": self.revision})


def in_cache(tmp_path: Path, commit: str, name: str = "lab--tiny") -> str:
    return str(tmp_path / "cache" / f"models--{name}" / "snapshots" / commit)


def test_a_repository_becomes_the_folder_of_its_commit_and_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    commit = hub.repositories["lab/tiny"].references["main"]
    config, pinned = pin_hub_files(Asked().config, cwd=tmp_path)
    folder = in_cache(tmp_path, commit)
    assert config.model == {"_target_": CAUSAL_LM, "path": folder}
    assert not (tmp_path / "cache").exists() and hub.fetched == []
    (files,) = pinned
    assert (files.commit, files.missing) == (commit, FETCHED) and "3 files of 11 B are fetched into" in files.words
    fetch_hub_files(pinned)
    assert sorted(hub.fetched) == FETCHED == sorted(path.name for path in Path(folder).iterdir())
    assert files.missing == [] and "in the cache" in files.words

    launch_hub._look_up.cache_clear()
    again, pinned = pin_hub_files(Asked().config, cwd=tmp_path)
    fetch_hub_files(pinned)
    assert again == config and sorted(hub.fetched) == FETCHED
    (snapshot,) = hub_snapshots(config)
    assert snapshot[:3] == ("model.path", "lab/tiny", commit) and str(snapshot.folder) == folder


@pytest.mark.parametrize(("path", "revision"), [("lab/tiny", "v1"), ("lab/tiny@v1", None), ("lab/tiny@v1", "v1")])
def test_a_revision_is_what_it_was_when_main_has_moved(hub: Hub, tmp_path: Path, path: str, revision: str) -> None:
    repository = hub.repositories["lab/tiny"]
    old = repository.references["v1"] = repository.references["main"]
    repository.commit(FILES | {"model.safetensors": b"later"})
    config, _ = pin_hub_files(Asked(path, revision).config, cwd=tmp_path)
    assert (config.model or {})["path"] == in_cache(tmp_path, old)
    # A pinned configuration asks nobody.
    asked = len(hub.asked)
    assert pin_hub_files(config, cwd=tmp_path) == (config, ()) and len(hub.asked) == asked


def test_the_shape_alone_takes_no_weights(hub: Hub, tmp_path: Path) -> None:
    config, pinned = pin_hub_files(Asked("lab/tiny/config.json").config, cwd=tmp_path)
    fetch_hub_files(pinned)
    assert sorted(hub.fetched) == ["config.json", "tokenizer.json"]
    assert Path((config.model or {})["path"]).name == "config.json" and len(list(hub_snapshots(config))) == 1


def test_the_data_take_the_model_s_tokenizer_or_another_and_first_weights_come_from_the_hub_too(
    hub: Hub, tmp_path: Path
) -> None:
    hub.repositories["lab/other"] = Repository()
    commit = hub.repositories["lab/other"].commit({"tokenizer.json": b"{ }"})
    repository = hub.repositories["lab/tiny"]
    old = repository.references["v1"] = repository.references["main"]
    repository.commit(FILES | {"config.json": b"{ }"})
    packed = {"_target_": PACKED.target, "path": "text"}
    for tokenizer, folder in (
        ("lab/tiny", in_cache(tmp_path, old)),
        ("lab/other", in_cache(tmp_path, commit, "lab--other")),
    ):
        model = Asked(revision="v1").config.model
        config, _ = pin_hub_files(RunConfig(model=model, data={**packed, "tokenizer": tokenizer}), cwd=tmp_path)
        assert (config.data or {})["tokenizer"] == folder
    config, _ = pin_hub_files(RunConfig(train=TrainSection(init_from="lab/tiny@v1")), cwd=tmp_path)
    assert config.train.init_from == in_cache(tmp_path, old)


def test_a_folder_of_that_name_wins(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "lab" / "tiny").mkdir(parents=True)
    config, pinned = pin_hub_files(Asked().config, cwd=tmp_path)
    assert (config.model, pinned, hub.asked) == ({"_target_": CAUSAL_LM, "path": "lab/tiny"}, (), [])


@pytest.mark.parametrize("path", ["llama", "./lab/tiny", "/lab/tiny", "a/b/c", "lab/tiny.json", "lab/w.safetensors"])
def test_what_is_written_as_a_path_is_one(hub: Hub, tmp_path: Path, path: str) -> None:
    assert pin_path("model.path", path, "weights", tmp_path, []) == path and hub.asked == []


def test_a_model_in_the_home_is_found_there(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config, pinned = pin_hub_files(Asked("~/llama").config, cwd=tmp_path / "elsewhere")
    assert (config.model or {})["path"] == f"{tmp_path}/llama" and pinned == () and hub.asked == []


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked("lab/none"), "no such folder here, and no repository lab/none"),
        (Asked("lab/tiny", "v9"), "has no revision v9"),
        (Asked("lab/gated"), "is gated"),
        (Asked("lab/pickles"), r"has no model.safetensors at main"),
        (Asked("lab/tiny@v1", "v2"), "two revisions"),
        (Asked("./here", "v2"), "for a repository of the Hub"),
        (Asked(None, "v2"), "for a repository of the Hub"),
        (Asked("lab/tiny--x"), "no repository lab/tiny--x"),
    ],
)
def test_what_cannot_be_fetched_is_refused_and_nothing_is_written(
    hub: Hub, tmp_path: Path, asked: Asked, message: str
) -> None:
    hub.repositories["lab/gated"] = Repository(is_gated=True)
    hub.repositories["lab/gated"].commit(FILES)
    hub.repositories["lab/pickles"] = Repository()
    hub.repositories["lab/pickles"].commit({"config.json": b"{}", "pytorch_model.bin": b"weights"})
    with pytest.raises(ConfigError, match=message) as caught:
        pin_hub_files(asked.config, cwd=tmp_path)
    assert caught.value.hint and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("how", ["closed", "failing", "offline"])
def test_without_the_hub_the_cache_is_enough_and_without_both_it_is_said(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def goes_away() -> None:
        hub.status = 503
        if how == "closed":
            monkeypatch.setattr(library.constants, "ENDPOINT", "http://127.0.0.1:9")
        if how == "offline":
            monkeypatch.setattr(library.constants, "HF_HUB_OFFLINE", True)
            library.utils.close_session()

    config, pinned = pin_hub_files(Asked().config, cwd=tmp_path)
    fetch_hub_files(pinned)
    launch_hub._look_up.cache_clear()
    goes_away()
    again, pinned = pin_hub_files(Asked().config, cwd=tmp_path)
    assert again == config and "in the cache" in pinned[0].words
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    launch_hub._look_up.cache_clear()
    with pytest.raises(ConfigError, match="there is no such folder here, ") as caught:
        pin_hub_files(Asked().config, cwd=tmp_path)
    assert "name a folder" in caught.value.hint or "name the folder" in caught.value.hint
    monkeypatch.undo()
    library.utils.close_session()


def test_a_cache_that_lacks_weights_is_not_enough(hub: Hub, tmp_path: Path) -> None:
    _, pinned = pin_hub_files(Asked("lab/tiny/config.json").config, cwd=tmp_path)
    fetch_hub_files(pinned)
    hub.status = 503
    with pytest.raises(ConfigError, match="cannot be asked for lab/tiny"):
        pin_hub_files(Asked().config, cwd=tmp_path)


def test_a_hub_that_goes_away_a_full_disk_and_a_cache_of_others_are_said(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pinned = pin_hub_files(Asked().config, cwd=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10, 0, 10))
        with pytest.raises(ConfigError, match=r"11 B are to be fetched, and .* has 10 B free"):
            fetch_hub_files(pinned)
    for number in (errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        with monkeypatch.context() as patch:

            def refuses(*_words: Any, number: int = number, **_named: Any) -> str:
                raise OSError(number, "it does not work", "/shared/hf")

            patch.setattr(library, "snapshot_download", refuses)
            with pytest.raises(ConfigError, match="cannot be written: /shared/hf"):
                fetch_hub_files(pinned)
    hub.repositories["lab/tiny"].is_gated = True
    with pytest.raises(ConfigError, match="is gated"):
        fetch_hub_files(pinned)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *words: Any, **named: Any) -> Any:
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *words, **named)

    launch_hub._look_up.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="huggingface_hub is missing") as caught:
        pin_hub_files(Asked().config, cwd=tmp_path)
    assert "slurm-train[hf]" in caught.value.hint


def test_a_node_that_does_not_see_the_folder_says_so(hub: Hub, tmp_path: Path) -> None:
    config, pinned = pin_hub_files(Asked().config, cwd=tmp_path)
    with pytest.raises(ConfigError, match=r"node7 does not see model\.path=.* lab/tiny") as caught:
        require_snapshots(config, host="node7")
    assert "HF_HOME" in caught.value.hint and pinned[0].commit in caught.value.hint
    fetch_hub_files(pinned)
    require_snapshots(config, host="node7")
