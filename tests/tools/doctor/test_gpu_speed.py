"""The speeds of a node's GPUs: how they are asked for, DCGM's reports, and which GPU the rules name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_train.rundir.files import to_records
from slurm_train.tools.doctor.facts import GpuSpeed, GpuSpeeds, Job
from slurm_train.tools.doctor.gpu_speed import diagnose, failures_of, read_speeds
from slurm_train.tools.doctor.node_rules import _slow_gpus


def speeds(node: str, *tflops: float, copies: float = 4000.0, kind: str = "NVIDIA H200", **more: Any) -> GpuSpeeds:
    gpus = [GpuSpeed(name=str(index), kind=kind, tflops=one, copy_gb_per_s=copies) for index, one in enumerate(tflops)]
    return GpuSpeeds(node=node, gpus=gpus, **more)


def said(*found: GpuSpeeds) -> list[tuple[str, str, str]]:
    job = Job(names=("node1", "node2", "node3"), world_size=3, gpu_speeds=list(found))
    return [(one.code, one.node, one.seen) for one in _slow_gpus(job)]


def test_the_slow_gpu_or_memory_is_named_among_all_nodes() -> None:
    computes = "GPU 2 (NVIDIA H200) computes 512 TFLOP/s in bfloat16, the others 781"
    assert said(speeds("node1", 780, 790, 512), speeds("node2", 775, 785, 781)) == [("SLOW_GPU", "node1", computes)]
    copies = "GPU 0 (NVIDIA H200) copies 2100 GB/s within its memory, the others 4000"
    assert said(speeds("node1", 780, 780), speeds("node2", 781, copies=2100.0)) == [("SLOW_GPU", "node2", copies)]


@pytest.mark.parametrize(
    "found",
    [
        (speeds("node1", 780, 300),),
        (speeds("node1", 780, 780, 780), speeds("node2", 250, kind="NVIDIA A100")),
        (speeds("node1", 780, 700, 690),),
    ],
    ids=["either of two may be at fault", "of another kind", "a few percent"],
)
def test_no_gpu_is_named_where_none_stands_out(found: tuple[GpuSpeeds, ...]) -> None:
    assert said(*found) == []


def test_a_node_whose_gpus_exchange_slowly_is_named() -> None:
    nodes = [speeds(f"node{number}", 780, 780, all_reduce_gb_per_s=360.0) for number in (1, 2)]
    slow = speeds("node3", 780, 780, all_reduce_gb_per_s=24.0)
    assert said(*nodes, slow) == [
        ("SLOW_GPU", "node3", "all_reduce between its 2 GPUs moves 24 GB/s, on the other nodes 360")
    ]
    assert said(nodes[0], slow) == []


def test_what_dcgm_finds_and_what_went_wrong_is_told() -> None:
    assert said(
        speeds("node1", 780, diagnosis="Memory of GPU 0 failed"), GpuSpeeds(node="node2", error="no torch")
    ) == [
        ("GPU_SICK", "node1", "DCGM: Memory of GPU 0 failed"),
        ("SLOW_GPU", "node2", "no torch"),
    ]


OLD = {"DCGM GPU Diagnostic": {"test_categories": [
    {"category": "Hardware", "tests": [
        {"name": "GPU Memory", "results": [{"gpu_ids": "0", "status": "PASS"}, {"gpu_ids": "3", "status": "FAIL"}]},
        {"name": "Denylist", "results": [{"gpu_ids": "0", "status": "SKIP"}]}]}]}}  # fmt: skip
NEW = {"DCGM Diagnostic": {"test_categories": [
    {"category": "Integration", "tests": [
        {"name": "pcie", "results": [{"entity_group": "GPU", "entity_id": 1, "status": "Fail"}],
         "test_summary": {"status": "Fail"}}]}]}}  # fmt: skip


@pytest.mark.parametrize(
    ("report", "failures"), [(OLD, ["GPU Memory of GPU 3 failed"]), (NEW, ["pcie of GPU 1 failed"]), ({}, [])]
)
def test_failures_are_found_in_the_reports_of_both_releases(report: Any, failures: list[str]) -> None:
    assert list(failures_of(report)) == failures


def test_without_dcgm_there_is_no_diagnosis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert diagnose() == ""


def test_a_broken_answer_of_dcgm_is_no_diagnosis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dcgmi").write_text("#!/bin/sh\necho no host engine\n")
    (tmp_path / "dcgmi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert diagnose() == ""


def test_what_an_installed_dcgm_finds_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dcgmi").write_text(f"#!/bin/sh\necho '{json.dumps([OLD, OLD])}'\nexit 226\n")
    (tmp_path / "dcgmi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert diagnose() == "GPU Memory of GPU 3 failed"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("""echo warning; echo '{"gpus": [], "diagnosis": ""}'""", {"gpus": [], "diagnosis": ""}),
        ("echo CUDA error >&2; exit 1", {"error": "its GPUs could not be measured: CUDA error"}),
        ("exit 7", {"error": "its GPUs could not be measured: exit code 7"}),
    ],
)
def test_the_program_s_answer_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, found: dict[str, Any]
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert read_speeds(timeout_s=20) == found


def test_a_program_that_takes_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", late)
    assert read_speeds(timeout_s=60) == {"error": "the measurement of its GPUs was not done within 60 s"}


def test_facts_survive_the_way_to_rank_0() -> None:
    gpu = {"name": "0", "kind": "NVIDIA H200", "tflops": 780.5, "copy_gb_per_s": 4100.0}
    value = {"node": "node1", "gpus": [gpu], "all_reduce_gb_per_s": None, "diagnosis": ""}
    assert to_records(GpuSpeeds, [value]) == [GpuSpeeds(node="node1", gpus=[GpuSpeed(**gpu)])]
