from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_train.config.schema import ClusterSection
from slurm_train.distributed import interfaces, master
from slurm_train.distributed.master import (
    PORTS,
    candidate_ports,
    chosen_address,
    is_under_torchrun,
    master_of,
    meeting_ports,
    probe_port,
    read_ports,
)
from slurm_train.errors import ClusterError, ConfigError

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[5-8]", "SLURM_TASKS_PER_NODE": "2(x4)"}
TASK = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "1"}
STEP = {**JOB, **TASK, "SLURM_STEP_NODELIST": "node[7-8]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}

MASTERS = [
    ("the step's first host wins over the job's", STEP, "node7"),
    ("a probed address does not override the step", {**STEP, "MASTER_ADDR": "node9"}, "node7"),
    ("the job's first host where the step has no list", {**JOB, **TASK}, "node5"),
    ("the address that our supervisor has found", {**STEP, "SLURM_TRAIN_ATTEMPT": "0", "MASTER_ADDR": "::1"}, "::1"),
    ("ranks of a local launch inside a job", {**STEP, "RANK": "0", "MASTER_ADDR": "::1"}, "::1"),
    ("torchrun", {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node2"}, "node2"),
    ("a shell inside a job is no rank", {**JOB, "MASTER_ADDR": "node9"}, "node9"),
    ("where srun was called does not count", {**STEP, "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}, "node7"),
    ("one process alone", {}, "127.0.0.1"),
]


@pytest.mark.parametrize(("env", "host"), [case[1:] for case in MASTERS], ids=[case[0] for case in MASTERS])
def test_where_rank_0_lives(env: dict[str, str], host: str) -> None:
    assert master_of(env) == host


@pytest.mark.parametrize("env", [{"WORLD_SIZE": "2"}, {**JOB, "WORLD_SIZE": "32"}])
def test_several_ranks_never_fall_back_to_this_machine(env: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match="MASTER_ADDR is not set"):
        master_of(env)


def test_ranks_have_the_same_list_of_ports_and_another_run_attempt_job_or_step_has_another() -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    lists = [meeting_ports("3f9a1c07", attempt=1, env={**step, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    assert all(ports == lists[0] for ports in lists) and len(set(lists[0])) == 32
    others = [
        meeting_ports("3f9a1c08", attempt=1, env=step),
        meeting_ports("3f9a1c07", attempt=0, env=step),
        meeting_ports("3f9a1c07", attempt=1, env={**step, "SLURM_JOB_ID": "8"}),
        meeting_ports("3f9a1c07", attempt=1, env={**step, "SLURM_STEP_ID": "1"}),
    ]
    assert len({ports[0] for ports in (lists[0], *others)}) == 5
    # Whatever machine and Python it is.
    assert candidate_ports("1234_5.0:2", ephemeral_low=32768)[:3] == [18638, 28481, 26965]


def test_a_port_that_was_probed_comes_first_but_not_one_that_torchrun_has_taken() -> None:
    own = meeting_ports("x", attempt=0, env={})
    firsts = {"4711": [4711], "": [], "auto": [], "-1": []}
    found = {given: meeting_ports("x", attempt=0, env={"MASTER_PORT": given}) for given in firsts}
    assert found == {given: [*first, *own] for given, first in firsts.items()}
    under_torchrun = {"MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "x", "RANK": "0"}
    assert 29400 not in meeting_ports("x", attempt=0, env=under_torchrun)
    assert is_under_torchrun(under_torchrun) and not is_under_torchrun({"MASTER_PORT": "29400"})


def test_probing_passes_over_ports_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"MASTER_PORT": "1", "SLURM_JOB_ID": "99"}
    first = probe_port("a-run", attempt=0, env=env)
    assert first == probe_port("a-run", attempt=0, env={"SLURM_JOB_ID": "99"}), "an inherited port is not believed"
    with socket.create_server(("", first)):
        assert probe_port("a-run", attempt=0, env=env) != first
        monkeypatch.setattr(master, "candidate_ports", lambda _, **__: [first] * 32)
        assert probe_port("a-run", attempt=0, env=env) not in (0, first), "the kernel gives one"


@pytest.mark.parametrize(("low", "high"), [(15000, 15000), (1024, 32768)])
def test_ports_are_below_the_ephemeral_range_where_there_is_room(low: int, high: int) -> None:
    drawn = {port for job in range(500) for port in candidate_ports(str(job), ephemeral_low=low)}
    assert min(drawn) > 10000 and max(drawn) < high and len(drawn) > 3000
    assert not {10250, 11211, 20049, 27017, 29500} & drawn, "customary ports"


@pytest.mark.parametrize(("text", "high"), [("15000\t60999\n", 15000), ("x y", 32768)])
def test_the_kernels_range_is_read(text: str, high: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(master, "_RANGE_FILE", tmp_path / "range")
    assert candidate_ports("7") == candidate_ports("7", ephemeral_low=high)


@pytest.mark.parametrize(
    ("text", "ports"),
    [("20000-20100", range(20000, 20101)), (" 1024-1024", range(1024, 1025)), ("40000", range(40000, 40001))],
)
def test_a_range_of_ports_that_a_site_opens(text: str, ports: range) -> None:
    assert read_ports(text) == ports
    found = candidate_ports("seed", within=text)
    assert set(found) <= set(ports) and len(set(found)) == min(len(ports), 32)
    assert found == candidate_ports("seed", within=text), "every rank computes the same list"


@pytest.mark.parametrize("text", ["", "80-90", "20100-20000", "20000-70000", "20000:20100", "many", "-1"])
def test_no_range_of_ports(text: str) -> None:
    with pytest.raises(ConfigError, match="is no range of ports"):
        read_ports(text)


def test_ranks_meet_within_the_range_of_their_job() -> None:
    env = {PORTS: "40000-40010", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert set(meeting_ports("run", attempt=0, env=env)) == set(range(40000, 40011))
    assert 40000 <= probe_port("run", attempt=0, env=env) <= 40010
    firsts = {meeting_ports("run", attempt=attempt, env=env)[0] for attempt in range(40)}
    assert len(firsts) > 5, "attempts differ"


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, ""),
        ({"rendezvous_address": "ib0"}, "10.79.0.11"),
        ({"rendezvous_address": "%Ni"}, "node1i"),
        ({"rendezvous_address": "%N-ib.cluster", "network_interface": "ib0"}, "node1-ib.cluster"),
        ({"network_interface": "ib0"}, "10.79.0.11"),
        ({"network_interface": "eth0", "rendezvous_address": "ib0"}, "10.79.0.11"),
        ({"network_interface": "ib7"}, ""),
        # NCCL's forms, of which none is one interface.
        ({"network_interface": "ib0,eth0"}, ""),
        ({"network_interface": "^lo,docker0"}, ""),
        ({"network_interface": "=ib0"}, ""),
    ],
)
def test_where_the_ranks_meet_as_configured(settings: dict[str, str], address: str) -> None:
    on_node1 = {"eth0": "10.78.0.11", "ib0": "10.79.0.11"}
    cluster = ClusterSection(**settings)  # type: ignore[arg-type]
    assert chosen_address(cluster, "node1", address_on=lambda name: on_node1.get(name, "")) == address


def test_the_address_of_an_interface_is_printed_by_a_plain_python_anywhere() -> None:
    for name, address in {**interfaces.interface_addresses(), "none7": ""}.items():
        command = [sys.executable, "-I", interfaces.__file__, name]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
        assert done.stdout.strip() == address
