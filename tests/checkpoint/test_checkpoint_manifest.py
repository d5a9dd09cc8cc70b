from __future__ import annotations

import json

import pytest

from slurm_train.checkpoint.manifest import FileRecord, Manifest
from slurm_train.errors import CheckpointError

RECORD = FileRecord(bytes=3, xxh3_128="0123456789abcdef" * 2)


@pytest.fixture
def manifest(kit):
    return Manifest.of(kit.header(7, extra={"lr_retune": "sqrt", "scale": 0.1}), {"b.pt": RECORD, "a.pt": RECORD})


def changed(manifest, **changes):
    return json.dumps(json.loads(manifest.to_json()) | changes)


def test_text_and_back_gives_an_equal_manifest(manifest):
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.digest() == manifest.digest()
    assert manifest.num_bytes == 6


def test_digest_changes_with_any_fact(manifest, kit):
    other = Manifest.of(kit.header(8), manifest.files)
    assert other.digest() != manifest.digest()


def test_another_format_version_is_refused_with_what_to_do(manifest):
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_json(changed(manifest, format_version=2))
    assert caught.value.message == "manifest.json has format version 2; this version reads 1"
    assert caught.value.hint == "load it with the version of slurm_train that wrote it"


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "null", '{"format_version": true}', '{"format_version": 1}'])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(CheckpointError):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "7"},
        {"step": True},
        {"step": -1},
        {"samples": 1.5},
        {"mesh": []},
        {"unknown": 1},
        {"files": []},
        {"files": {"a.pt": {"bytes": 1}}},
        {"files": {"a.pt": {"bytes": -1, "xxh3_128": "0" * 32}}},
        {"files": {"a.pt": {"bytes": 1, "xxh3_128": "0" * 31}}},
        {"files": {"a.pt": {"bytes": 1, "xxh3_128": "G" * 32}}},
        {"job": "1/../2"},
    ],
)
def test_wrong_types_and_unknown_keys_are_refused(manifest, changes):
    with pytest.raises(CheckpointError):
        Manifest.from_json(changed(manifest, **changes))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\nb", "a\0b", "manifest.json", "COMPLETE"]
)
def test_file_names_that_lead_elsewhere_are_refused(manifest, kit, name):
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Manifest.of(kit.header(7), {name: RECORD})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Manifest.from_json(changed(manifest, files={name: {"bytes": 3, "xxh3_128": "0" * 32}}))


def test_a_header_that_json_cannot_hold_is_refused(kit):
    with pytest.raises(CheckpointError, match="what JSON cannot"):
        Manifest.of(kit.header(7, extra={"loss": float("nan")}), {}).to_json()
