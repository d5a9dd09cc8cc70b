"""The speeds of a node's GPUs: how they are asked for, DCGM's reports, and which GPU the rules name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_train.tools.doctor.facts import GpuSpeed, GpuSpeeds, JobFacts
from slurm_train.tools.doctor.gpu_speed import diagnose, failures_of, read_speeds
from slurm_train.tools.doctor.node_rules import find_faults


def speeds(node: str, *tflops: float, copies: float = 4000.0, kind: str = "H200", **more: Any) -> GpuSpeeds:
    gpus = [GpuSpeed(name=str(index), kind=kind, tflops=one, copy_gb_per_s=copies) for index, one in enumerate(tflops)]
    return GpuSpeeds(node=node, gpus=gpus, **more)


def exchanging(node: str, rate: float) -> GpuSpeeds:
    return speeds(node, 780, 780, all_reduce_gb_per_s=rate)


FOUND = {
    "the slow one of three": (
        [speeds("node1", 780, 790, 512), speeds("node2", 775)],
        ("SLOW_GPU", "node1", "GPU 2 (H200) computes 512 TFLOP/s in bfloat16, the others 780"),
    ),
    "slow memory": (
        [speeds("node1", 780, 780), speeds("node2", 781, copies=2100.0)],
        ("SLOW_GPU", "node2", "GPU 0 (H200) copies 2100 GB/s within its memory, the others 4000"),
    ),
    "either of two may be at fault": ([speeds("node1", 780, 300)],),
    "of another kind": ([speeds("node1", 780, 780, 780), speeds("node2", 250, kind="A100")],),
    "a few percent": ([speeds("node1", 780, 700, 690)],),
    "a slow exchange": (
        [exchanging("node1", 360), exchanging("node2", 360), exchanging("node3", 24)],
        ("SLOW_GPU", "node3", "all_reduce between its 2 GPUs moves 24 GB/s, on the other nodes 360"),
    ),
    "one of two nodes exchanges slowly": ([exchanging("node1", 360), exchanging("node3", 24)],),
    "DCGM": (
        [speeds("node1", 780, diagnosis="Memory of GPU 0 failed")],
        ("GPU_SICK", "node1", "DCGM: Memory of GPU 0 failed"),
    ),
    "no figures": ([GpuSpeeds(node="node2", error="no torch")], ("SLOW_GPU", "node2", "no torch")),
}


@pytest.mark.parametrize("case", FOUND)
def test_the_gpu_that_stands_out_is_named(case: str) -> None:
    facts, *expected = FOUND[case]
    job = JobFacts(names=("node1", "node2", "node3"), world_size=3, gpu_speeds=facts)
    assert [(one.code, one.node, one.seen) for one in find_faults(job)] == expected


OLD = {"DCGM GPU Diagnostic": {"test_categories": [
    {"category": "Hardware", "tests": [
        {"name": "GPU Memory", "results": [{"gpu_ids": "0", "status": "PASS"}, {"gpu_ids": "3", "status": "FAIL"}]},
        {"name": "Denylist", "results": [{"gpu_ids": "0", "status": "SKIP"}]}]}]}}  # fmt: skip
NEW = {"DCGM Diagnostic": {"test_categories": [
    {"category": "Integration", "tests": [
        {"name": "pcie", "results": [{"entity_group": "GPU", "entity_id": 1, "status": "Fail"}],
         "test_summary": {"status": "Fail"}}]}]}}  # fmt: skip


@pytest.mark.parametrize(("report", "failure"), [(OLD, "GPU Memory of GPU 3 failed"), (NEW, "pcie of GPU 1 failed")])
def test_failures_are_found_in_the_reports_of_both_releases(report: Any, failure: str) -> None:
    assert list(failures_of(report)) == [failure]


def program(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_without_dcgm_or_with_a_broken_one_there_is_no_diagnosis(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert diagnose() == ""
    program(tmp_path / "dcgmi", "echo no host engine")
    assert diagnose() == ""


def test_what_an_installed_dcgm_finds_is_told_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "dcgmi").write_text(f"#!/bin/sh\necho '{json.dumps([OLD, OLD])}'\nexit 226\n")
    (tmp_path / "dcgmi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert diagnose() == "GPU Memory of GPU 3 failed"


@pytest.mark.parametrize(
    ("body", "timeout_s", "found"),
    [
        ("""echo warning; echo '{"gpus": [], "diagnosis": ""}'""", 20, {"gpus": [], "diagnosis": ""}),
        ("echo CUDA error >&2; exit 1", 20, {"error": "its GPUs could not be measured: CUDA error"}),
        ("exit 7", 20, {"error": "its GPUs could not be measured: exit code 7"}),
        ("exec sleep 60", 0.2, {"error": "the measurement of its GPUs was not done within 0 s"}),
    ],
)
def test_the_program_s_answer_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, timeout_s: float, found: dict[str, Any]
) -> None:
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", body))
    assert read_speeds(timeout_s=timeout_s) == found
