from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.config.schema import ClusterSection, RunConfig
from slurm_train.errors import ClusterError
from slurm_train.request.acceptance import (
    exclude_flags,
    expedite_flags,
    outlook_of,
    require_acceptable,
    require_room,
    salloc_words,
    step_verdict,
)
from slurm_train.request.batch_script import job_request
from slurm_train.rundir.events import add_bad_nodes, forgive_nodes
from slurm_train.rundir.paths import RunDirectory
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.job_request import JobRequest
from slurm_train.slurm.refusals import Refusal, TestVerdict
from slurm_train.slurm.site import site_of
from tests.fakes.slurm_commands import FakeSlurmCommands
from tests.fakes.slurm_programs import SlurmPrograms
from tests.support.plans import make_plan
from tests.support.refusals import refusal

REQUEST = JobRequest.of_script("#!/bin/bash\n")


def request(*directives: str) -> JobRequest:
    lines = (f"#SBATCH --{directive}\n" for directive in ("nodes=2", "ntasks=4", *directives))
    return JobRequest.of_script(f"#!/bin/bash\n{''.join(lines)}\nsrun --nodes=2 true\n")


def refused(refusal: Refusal) -> TestVerdict:
    return TestVerdict(is_accepted=False, refusal=refusal, message="Slurm's own words", advice=refusal.value)


HINTS = [
    (
        Refusal.RESOURCES,
        {"nodes": 1, "gpus_per_node": 16},
        "1 nodes with 16 GPUs were asked; partition main has 4 nodes, with at most 8 GPUs: lower cluster.nodes or ",
    ),
    (Refusal.RESOURCES, {"nodes": 4, "gpus_per_node": 8, "cpus_per_gpu": 99}, Refusal.RESOURCES.value),
    (Refusal.RESOURCES, {"gpus_per_node": 16, "gpu_flag": "none"}, Refusal.RESOURCES.value),
    (Refusal.GPUS, {"gpu_type": "h200"}, "GPUs in partition main have no type here: drop cluster.gpu_type=h200"),
    (Refusal.PARTITION, {"partition": "nope"}, "partitions here: main; set cluster.partition"),
    (Refusal.QOS, {"qos": "nope"}, Refusal.QOS.value),
    # What the site says itself is not explained away.
    (Refusal.TIME_MISSING, {}, "set cluster.time"),
]


@pytest.mark.parametrize(("why", "cluster", "hint"), HINTS)
def test_a_refusal_is_explained_by_what_there_is(why: Refusal, cluster: dict[str, Any], hint: str) -> None:
    commands: Any = FakeSlurmCommands()
    commands.verdict = refused(why)
    plan = make_plan(cluster=cluster, batch={})
    error = refusal(ClusterError, require_acceptable, REQUEST, commands, plan)
    assert error.message == "Slurm would not take this job: Slurm's own words"
    assert error.hint.startswith(hint)


def test_a_limit_that_slurm_would_take_and_never_start_is_refused() -> None:
    commands: Any = FakeSlurmCommands()
    for directives in ((), ("time=1440",), ("partition=other", "time=1441")):
        assert require_acceptable(request(*directives), commands) == ()
    assert not commands.tested[0].exists(), "the script that Slurm reads is gone afterwards"
    error = refusal(ClusterError, require_acceptable, request("time=1441"), commands)
    assert "cluster.time_limit_min=1441 is more than partition main allows (1440)" in error.message
    assert "set cluster.time_limit_min=1440 or less" in error.hint


@pytest.mark.parametrize(
    ("why", "directives", "hint"),
    [
        (Refusal.POLICY, ("time=1441",), "cluster.time_limit_min=1441 is more than partition main allows"),
        (Refusal.RESOURCES, ("partition=big", "nodes=1"), "1 nodes are fewer than partition big wants of a job (2)"),
        (Refusal.SITE, ("time=1441",), Refusal.SITE.value),
    ],
)
def test_a_refusal_is_explained_by_the_limit_that_the_job_breaks(
    why: Refusal, directives: tuple[str, ...], hint: str
) -> None:
    commands: Any = FakeSlurmCommands()
    commands.listed_partitions.append(replace(commands.listed_partitions[0], name="big", is_default=False))
    commands.records["big"] = {"MinNodes": "2"}
    commands.verdict = refused(why)
    assert refusal(ClusterError, require_acceptable, request(*directives), commands).hint.startswith(hint)


@pytest.mark.parametrize(
    ("words", "is_certain"),
    [
        ("srun: Invalid --gpu-bind argument: gpu:foo", True),
        ("srun: unrecognized option '--cpu-bnd=none'", True),
        # Those of plug-ins, which the nodes may have.
        ("srun: unrecognized option '--auto-resume=1'", False),
        ("srun: unrecognized option '--container-image=a'", False),
        ("srun: unrecognized option '--container-env=A'", False),
        ("srun: can not load PMIx library; Invalid MPI type 'pmix', --mpi=list for acceptable types", False),
        ("", False),
    ],
)
def test_flags_that_srun_does_not_read_are_refused_unless_a_plug_in_may_know_them(words: str, is_certain: bool) -> None:
    commands: Any = FakeSlurmCommands()
    commands.words_of_srun = words
    require_acceptable(REQUEST, commands, make_plan(cluster={}))
    plan = make_plan(cluster={"srun": {"mpi": "pmix"}})
    if is_certain:
        assert words in refusal(ClusterError, require_acceptable, REQUEST, commands, plan).message
        assert step_verdict(plan, commands)[1] == ""
    else:
        require_acceptable(REQUEST, commands, plan)
        assert step_verdict(plan, commands) == ("", words)


# Limits of two partitions in minutes, what was asked, and the limit that is named.
LISTS = [
    ({"low": 30, "main": 1440}, "low,main", 1440, None),
    ({"low": 30, "main": 1440}, "low, main", 1441, 1440),
    ({"low": 30, "main": 1440}, "low", 31, 30),
    ({"low": 30, "main": None}, "low,main", 10**6, None),
    ({"low": 30, "main": 1440}, "low,gone", 31, 30),
]


@pytest.mark.parametrize(("limits", "partition", "asked", "named"), LISTS)
def test_of_several_partitions_the_largest_limit_counts(
    limits: dict[str, int | None], partition: str, asked: int, named: int | None
) -> None:
    commands: Any = FakeSlurmCommands()
    (main,) = commands.listed_partitions
    commands.listed_partitions = [replace(main, name=name) for name in limits]
    commands.limits_min = limits
    outlook = outlook_of(request(f"partition='{partition}'", f"time={asked}"), commands)
    assert (outlook.obstacle is None) == (named is None)
    assert outlook.obstacle is None or f"set cluster.time_limit_min={named} or less" in outlook.obstacle.todo


def test_what_delays_or_ends_a_job_is_a_remark() -> None:
    commands: Any = FakeSlurmCommands()
    commands.listed_partitions.append(replace(commands.listed_partitions[0], name="off", state="down"))
    down = outlook_of(request("partition=off"), commands)
    assert down.waits_for_partition and "partition off is DOWN" in down.remarks[0]
    assert outlook_of(request("partition=off,main"), commands).remarks == ()
    now_s = int(time.time())
    commands.reservations = [
        {"ReservationName": "mine", "StartTime": str(now_s - 60), "EndTime": str(now_s + 3600), "Flags": ""},
        {"ReservationName": "m", "StartTime": str(now_s + 3600), "EndTime": str(now_s + 7200), "Flags": "MAINT,SPEC"},
    ]
    site_of.cache_clear()
    for limit_min, has_remark in ((50, False), (90, True)):
        remarks = outlook_of(request("reservation=mine", f"time={limit_min}"), commands).remarks
        assert ["jobs of reservation mine" in remark for remark in remarks] == [True] * has_remark
    commands.reservations[0]["Flags"] = "FLEX,SPEC_NODES"
    assert outlook_of(request("reservation=mine", "time=90"), commands).remarks == (), "its jobs go on after its end"
    for start_s, has_remark in ((now_s + 600, False), (now_s + 7200, True)):
        # A job that finds other nodes before is not told of it.
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(start_s))
        for wanted in ("begin=now+1hour", "reservation=m"):
            assert "before it" not in "".join(outlook_of(request(wanted, "time=9"), commands, start=start).remarks)
        remarks = outlook_of(request("time=90"), commands, start=start).remarks
        assert ["a job of at most 59 min may end before it" in remark for remark in remarks] == [True] * has_remark


def test_limits_that_slurm_hides_are_unknown_where_they_hold(tmp_path: Path) -> None:
    programs = SlurmPrograms(tmp_path / "bin")
    commands = SlurmCommands({"PATH": programs.path})
    assert outlook_of(request(), commands).unknown == ""
    (tmp_path / "bin" / "config.out").write_text("AccountingStorageEnforce = associations,limits\n")
    assert outlook_of(request(), SlurmCommands({"PATH": programs.path})).unknown


def test_a_refusal_of_several_partitions_is_explained_by_the_largest() -> None:
    commands: Any = FakeSlurmCommands()
    (main,) = commands.partitions()
    small = replace(main, name="low", groups=())
    commands.listed_partitions = [small, replace(main, is_default=False)]
    commands.verdict = refused(Refusal.RESOURCES)
    plan = make_plan(cluster={"partition": "low,main", "gpus_per_node": 16}, batch={})
    assert "partition main has 4 nodes" in refusal(ClusterError, require_acceptable, REQUEST, commands, plan).hint


def test_a_refusal_of_nodes_names_the_blocks_of_the_network() -> None:
    commands: Any = FakeSlurmCommands()
    commands.verdict = refused(Refusal.RESOURCES)
    plan = make_plan(cluster={"nodelist": "node2,node3", "nodes": 2}, batch={})
    for leaves, has_blocks in (({}, False), ({"node1": "switch a"}, False), ({"node1": "block a"}, True)):
        commands.leaves = leaves
        hint = refusal(ClusterError, require_acceptable, REQUEST, commands, plan).hint
        assert ("cluster.sbatch.segment" in hint) is has_blocks


# --- nodes that were found bad ---


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "name" / "id")
    run.path.mkdir(parents=True)
    return run


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """A cluster of four nodes in partition main."""
    return {"PATH": SlurmPrograms(tmp_path / "bin").path}


def bad(run: RunDirectory, *names: str) -> None:
    add_bad_nodes(run, dict.fromkeys(names, "GPU_SICK: errors"), hours=1.0, now_unix_s=time.time())


def test_without_a_list_slurm_is_not_even_asked(run: RunDirectory) -> None:
    assert exclude_flags(request(), run, {"PATH": "/nowhere"}) == ([], "")


@pytest.mark.parametrize(
    ("directives", "names", "flag"),
    [
        ((), ("node3",), "--exclude=node3"),
        (('exclude="node[1]"',), ("node3",), "--exclude=node[1],node3"),
        (("nodes=4",), ("node3",), ""),
        (("partition=main,other",), ("node3",), "--exclude=node3"),
        (("partition=other",), ("node3",), ""),
        (("exclude=node1",), ("node2", "node3"), ""),
        (("nodelist=node[3-4]",), ("node3",), ""),
        (("mem=0\n#SBATCH hetjob", "nodes=1"), ("node3",), ""),
    ],
)
def test_listed_nodes_are_left_out_unless_the_job_needs_them(
    directives: tuple[str, ...], names: tuple[str, ...], flag: str, run: RunDirectory, env: dict[str, str]
) -> None:
    bad(run, *names)
    flags, text = exclude_flags(request(*directives), run, env)
    assert flags == ([flag] if flag else [])
    assert text.startswith(f"left out: {names[0]} (until " if flag else "found bad, and not left out, since the job ")
    assert exclude_flags(request(*directives), run, {"PATH": "/nowhere"})[0] == [], "Slurm does not answer"


def test_nodes_that_slurm_does_not_have_are_no_reason_for_a_flag_that_it_refuses(
    run: RunDirectory, env: dict[str, str], tmp_path: Path
) -> None:
    bad(run, "node3", "gone7")
    sinfo = tmp_path / "bin" / "sinfo"
    names = "".join(f"node{number}|10.0.0.{number}|node{number}\\n" for number in range(1, 5))
    sinfo.write_text(sinfo.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n[ $2 = -N ] && printf '{names}' && exit\n"))
    flags, text = exclude_flags(request(), run, env)
    assert flags == ["--exclude=node3"] and "gone7" not in text
    forgive_nodes(run, ["node3"], now_unix_s=time.time())
    assert exclude_flags(request(), run, env) == ([], "")


# --- an allocation of one's own ---

CLUSTER: dict[str, Any] = {
    "nodes": 2,
    "gpus_per_node": 4,
    "cpus_per_gpu": 3,
    "time_limit_min": 60,
    "partition": "gpu",
    "sbatch": {"reservation": "maint window", "exclusive": True},
}
# As Slurm 22.05 and 24.05 write it.
JOB = {"JobId": "55", "JobState": "RUNNING", "NumNodes": "2", "NumCPUs": "24", "TRES": "cpu=24,node=2,gres/gpu=8"}


def test_an_allocation_is_asked_for_like_a_job() -> None:
    plan = make_plan(cluster=CLUSTER)
    assert salloc_words(job_request(plan), plan.run.submit_script) == [
        "salloc",
        f"--job-name=gpt-stdlib-{plan.run.run_id}",
        "--nodes=2",
        "--ntasks=8",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=3",
        "--partition=gpu",
        "--time=60",
        "--signal=USR2@120",
        "--reservation=maint window",
        "--exclusive",
        "bash",
        str(plan.run.submit_script),
    ]


def test_a_shell_whose_job_is_over_is_no_allocation() -> None:
    plan = make_plan(cluster=CLUSTER)
    require_room(plan, {"JobId": "55", "JobState": "RUNNING"})  # what Slurm does not tell is not refused
    for job, word in (({**JOB, "JobState": "COMPLETED"}, "COMPLETED"), ({"JobId": "55"}, "gone")):
        with pytest.raises(ClusterError, match=f"this shell belongs to job 55, which is {word}"):
            require_room(plan, job)


@pytest.mark.parametrize(
    "job",
    [
        JOB,
        {**JOB, "TRES": "", "ReqTRES": "cpu=1,node=2", "AllocTRES": "cpu=24,mem=1G,node=2,gres/gpu=8,gres/gpu:a100=8"},
    ],
)
@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({}, ""),
        ({"gpus_per_node": 5}, "8 GPUs, 10 asked; 24 CPUs, 30 asked"),
        ({"gpu_flag": "none", "gpus_per_node": 12, "cpus_per_gpu": 1}, ""),
    ],
)
def test_what_an_allocation_lacks_is_said(job: dict[str, str], change: dict[str, Any], missing: str) -> None:
    plan = make_plan(cluster={**CLUSTER, **change}, batch={})
    if not missing:
        require_room(plan, job)
        return
    error = refusal(ClusterError, require_room, plan, job)
    assert error.message == f"the allocation of job 55 is too small for this run: {missing}"


@pytest.mark.parametrize(
    ("cluster", "script", "flags"),
    [
        pytest.param({"nodes": 2}, "#SBATCH --requeue", ["--requeue=expedite"], id="a fixed number of nodes"),
        pytest.param({"nodes": 2}, "#SBATCH --no-requeue", [], id="no requeue"),
        pytest.param({"nodes": "2-4"}, "#SBATCH --requeue", [], id="its supervisor requeues it"),
        pytest.param({"nodes": 2, "spare_nodes": 1}, "#SBATCH --requeue", [], id="spare nodes"),
        pytest.param({"nodes": 2}, "#SBATCH --requeue\n#SBATCH hetjob", [], id="several components"),
    ],
)
def test_a_job_is_brought_back_at_once_where_slurm_does_it(
    cluster: dict[str, Any], script: str, flags: list[str]
) -> None:
    commands = FakeSlurmCommands()
    config = RunConfig(cluster=ClusterSection(**cluster))
    asked = JobRequest.of_script(f"#!/bin/bash\n{script}\n")
    assert expedite_flags(asked, config, commands) == []  # type: ignore[arg-type]
    commands.config |= {"SLURM_VERSION": "26.05.5", "SlurmctldParameters": "enable_expedited_requeue"}
    assert expedite_flags(asked, config, commands) == flags  # type: ignore[arg-type]
    commands.error = ClusterError("no answer")
    assert expedite_flags(asked, config, commands) == []  # type: ignore[arg-type]
