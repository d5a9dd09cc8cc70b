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


def test_status_of_nothing_says_so_and_is_not_healthy(tmp_path, capsys):
    assert main(["status", "--state", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"nothing is up in {tmp_path}; python -m slurm_train devcluster up\n"
