from __future__ import annotations

import os

import pytest

from slurm_train.cli.devcluster import main
from slurm_train.errors import ClusterError


@pytest.mark.parametrize(
    "words", [["up"], ["down"], ["kill-node", "node1"], ["start-node", "node1"], ["add-user", "me"]]
)
def test_what_changes_the_machine_needs_root(monkeypatch, words):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match=f"devcluster {words[0]} needs root"):
        main(words)


@pytest.mark.parametrize("words", [[], ["sideways"], ["up", "--nodes", "many"], ["kill-node"]])
def test_wrong_words_are_wrong_use(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: python -m slurm_train devcluster" in capsys.readouterr().err


def test_status_of_nothing_says_so_and_is_not_healthy(tmp_path, capsys):
    assert main(["status", "--state", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"nothing is up in {tmp_path}; python -m slurm_train devcluster up\n"
