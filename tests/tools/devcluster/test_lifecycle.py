"""Whole clusters, built and removed in a place of their own."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.full]


def test_up_is_idempotent_and_down_leaves_no_trace(sandbox):
    done = sandbox(
        """
        devcluster up --nodes 2 --gpus 2 2>&1 | cat
        devcluster up --nodes 2 --gpus 2; echo "again $?"
        devcluster up --nodes 3 --gpus 2; echo "other shape $?"
        devcluster up --state /var/lib/other; echo "second cluster $?"
        srun --nodes=2 hostname
        cd /; sbatch --output=/dev/null --wrap 'sleep 77' >/dev/null
        until pgrep -x sleep >/dev/null; do sleep 0.1; done
        cd - >/dev/null
        devcluster status >/dev/null; echo "status $?"
        devcluster down
        check_no_trace "after down"
        devcluster down; echo "down again $?"
        devcluster status; echo "status of nothing $?"
        """
    )
    said = done.stdout.splitlines()
    assert any(line.startswith("up: 2 nodes x 2 GPUs in ") for line in said)
    wanted = ["again 0", "other shape 2", "second cluster 2", "status 0", "no trace after down"]
    assert [line for line in said if line in wanted] == wanted, done
    assert {"node1", "node2", "down again 0", "status of nothing 1"} <= set(said), done
    assert "asked for 3 nodes x 2 GPUs, but a cluster of 2 nodes x 2 GPUs is up" in done.stderr


@pytest.mark.faults
def test_down_removes_what_a_killed_up_left(sandbox):
    """`up` dies while it makes the database, then while the daemons start, then loses its state directory."""
    done = sandbox(
        """
        killed_when() {
          devcluster up --nodes 2 --gpus 1 2>/mnt/said & up=$!
          until grep -q "$1" /mnt/said; do sleep 0.02; done
          sleep 0.3; kill -9 $up; wait $up 2>/dev/null
        }
        killed_when mariadbd; devcluster down; check_no_trace "killed early"
        killed_when slurmctld; rm -rf /var/lib/slurm-train-devcluster; devcluster down; check_no_trace "killed late"
        """
    )
    assert done.stdout.splitlines() == ["no trace killed early", "no trace killed late"], done


@pytest.mark.faults
def test_a_step_that_fails_is_quoted_and_undone(sandbox):
    done = sandbox(
        """
        "$PYTHON" -m http.server 26819 >/mnt/http 2>&1 & holder=$!
        until ss -Hltn | grep -q :26819; do sleep 0.02; done
        devcluster up --nodes 1 --gpus 1; echo "up $?"
        kill $holder; wait $holder 2>/dev/null
        check_no_trace "after failure"
        """
    )
    assert done.stdout.splitlines() == ["up 2", "no trace after failure"], done
    assert "error: slurmdbd " in done.stderr
    assert "Address already in use" in done.stderr


@pytest.mark.faults
@pytest.mark.campaign
def test_preemption_requeues_and_a_killed_node_comes_back(sandbox):
    done = sandbox(
        """
        devcluster up --nodes 2 --gpus 2 2>/dev/null
        until_true() { for _ in $(seq 600); do eval "$1" && return; sleep 0.1; done; echo "never: $1"; }
        cd /
        # A job that ended by itself within the grace would not be requeued.
        stay='srun sh -c "trap : TERM; while :; do sleep 0.5; done"'
        normal=$(sbatch --parsable --requeue --nodes=2 --gpus-per-node=2 -o /dev/null --wrap "$stay")
        until_true '[ "$(squeue -h -j $normal -o %t)" = R ]'
        sbatch --qos=urgent --nodes=2 --gpus-per-node=2 -o /dev/null --wrap 'true' >/dev/null
        until_true 'scontrol show job $normal | grep -q Restarts=1'
        until_true '[ "$(squeue -h -j $normal -o %t)" = R ]'
        echo "requeued"
        cd - >/dev/null
        devcluster kill-node node2 2>&1
        # 22.05 says "down*"; 24.11 "mixed*" as long as it waits for the end of the job there.
        until_true 'sinfo -h -n node2 -o %T | grep -q "[*]$"'
        devcluster status | grep -o "slurmd-node2.*DEAD"; echo
        devcluster start-node node2 2>&1
        devcluster kill-node --with-jobs node2 2>&1
        echo "left on node2: $(ip netns pids node2 | wc -l)"
        devcluster start-node node2 2>&1
        devcluster kill-node node9 2>&1
        """
    )
    assert [line.rstrip() for line in done.stdout.splitlines()] == [
        "requeued",
        "killed on node2: slurmd",
        "slurmd-node2   DEAD",
        "",
        "node2 is back",
        "killed on node2: everything",
        "left on node2: 0",
        "node2 is back",
        "error: no node 'node9' in this cluster",
        "hint: one of node1, node2",
    ], done
