from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from slurm_train.errors import ClusterError
from slurm_train.slurm.commands import ControllerAway, Finished, MissingCommand, SlurmCommands, run_process
from slurm_train.slurm.records import Phase
from slurm_train.slurm.refusals import Refusal
from tests.fakes.slurm_commands import FakeSlurmCommands
from tests.support.refusals import refusal

RUNNING_7 = "7|RUNNING|None|node1|2026-01-01T00:00:00|2026-01-01T01:00:00|main\n"
ENDED_8 = "8|COMPLETED|None|node1|2026-01-01T00:00:00|2026-01-01T01:00:00|main|0:0\n"
AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
GONE = "slurm_load_jobs error: Invalid job id specified\n"


class Script:
    """A runner that plays back one answer per program name and notes the calls."""

    def __init__(self, **answers: Finished | list[Finished]) -> None:
        self.answers = {name: answer if isinstance(answer, list) else [answer] for name, answer in answers.items()}
        self.calls: list[list[str]] = []
        self.envs: list[Mapping[str, str]] = []

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout_s: float) -> Finished:
        self.calls.append(list(argv))
        self.envs.append(env)
        answers = self.answers[argv[0]]
        return answers.pop(0) if len(answers) > 1 else answers[0]


def ok(stdout: str = "") -> Finished:
    return Finished(0, stdout, "")


def bad(stderr: str, code: int = 1) -> Finished:
    return Finished(code, "", stderr)


def slurm(runner: Script) -> SlurmCommands:
    return SlurmCommands({"PATH": "/bin", "SLURM_JOB_ID": "1", "SLURM_CONF": "/c"}, runner=runner)


def test_one_squeue_call_answers_for_all_jobs() -> None:
    script = Script(squeue=ok(RUNNING_7 + RUNNING_7.replace("7|", "9_1|", 1)))
    assert list(slurm(script).job_states(["7", "9_1", "7"])) == ["7", "9_1"]
    assert script.calls == [
        ["squeue", "-h", "-t", "all", "-r", "-o", "%i|%T|%r|%N|%S|%e|%P", "-j", "7,9_1"],
    ]
    of_ours = {"SLURM_BITSTR_LEN": "0", "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    assert script.envs == [{"PATH": "/bin", "SLURM_CONF": "/c", **of_ours}]


def test_what_squeue_does_not_know_is_asked_of_sacct() -> None:
    script = Script(squeue=ok(RUNNING_7), sacct=ok(ENDED_8 + ENDED_8.replace("8|", "7|", 1)))
    found = slurm(script).job_states(["7", "8", "99"])
    assert {job_id: (job.phase, job.source) for job_id, job in found.items()} == {
        "7": (Phase.RUNNING, "squeue"),
        "8": (Phase.COMPLETED, "sacct"),
    }
    assert script.calls[1] == [
        *["sacct", "-n", "-P", "-X", "-o", "JobID,State,Reason,NodeList,Start,End,Partition,ExitCode"],
        *["-j", "8,99"],
    ]


def test_many_elements_are_asked_for_by_their_array_and_only_they_are_told() -> None:
    rows = "".join(RUNNING_7.replace("7|", f"12_{task}|", 1) for task in range(5))
    script = Script(squeue=ok(rows), sacct=ok(ENDED_8.replace("8|", "12_9|", 1) + ENDED_8.replace("8|", "12_8|", 1)))
    assert set(slurm(script).job_states(["12_0", "12_3", "13_1", "12_9"])) == {"12_0", "12_3", "12_9"}
    assert [call[-1] for call in script.calls] == ["12,13_1", "13_1,12_9"]


def test_the_queue_is_one_squeue_about_these_jobs_or_about_all() -> None:
    waiting = "50|7|PENDING|Priority||N/A|N/A|main\n60|6|PENDING|Resources||N/A|N/A|main\n"
    script = Script(squeue=[ok(RUNNING_7), ok(waiting)])
    assert list(slurm(script).queue(["7", "9"])[0]) == ["7"]
    jobs, ahead = slurm(script).queue(["7"], whole=True)
    assert (list(jobs), ahead) == (["7"], {"7": 1})
    assert script.calls == [
        ["squeue", "-h", "-t", "all", "-r", "-o", "%i|%T|%r|%N|%S|%e|%P", "-j", "7,9"],
        ["squeue", "-h", "-t", "all", "-a", "-o", "%Q|%i|%T|%r|%N|%S|%e|%P"],
    ]
    assert slurm(script).queue([]) == ({}, {}) and slurm(script).accounted([]) == slurm(script).job_states([]) == {}
    assert len(script.calls) == 2


def test_without_any_answer_the_error_is_that_of_squeue() -> None:
    script = Script(squeue=bad(AWAY), sacct=bad("sacct: error: no database\n"))
    error = refusal(ClusterError, slurm(script).job_states, ["8"])
    assert list(slurm(Script(squeue=bad(AWAY), sacct=ok(ENDED_8))).job_states(["8"])) == ["8"]
    gone = Script(squeue=bad(GONE), sacct=bad("Slurm accounting storage is disabled\n"))
    assert slurm(gone).job_states(["8"]) == {}
    assert error.message == (
        "`squeue -h -t all -r -o '%i|%T|%r|%N|%S|%e|%P' -j 8` ended with exit code 1: "
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    )


@pytest.mark.parametrize("job_id", ["", "7;reboot", "--me", "7\n", "7,8", "7_[1-2]"])
def test_only_job_ids_reach_a_command(job_id: str) -> None:
    script = Script()
    commands = slurm(script)
    for call in (commands.job_states, commands.cancel):
        with pytest.raises(ClusterError, match="is not a job id"):
            call([job_id])
    for single in (commands.show_job, commands.requeue):
        with pytest.raises(ClusterError, match="is not a job id"):
            single(job_id)
    assert script.calls == []


@pytest.mark.parametrize(
    "stderr",
    [
        "",
        "scancel: error: Kill job error on job id 7: Job/step already completing or completed\n",
        "scancel: error: Kill job error on job id 7: Invalid job id specified\n",
    ],
)
def test_cancelling_a_job_that_has_ended_is_no_error(stderr: str) -> None:
    script = Script(scancel=bad(stderr) if stderr else ok())
    slurm(script).cancel(["7", "9_1"])
    slurm(script).cancel([])
    slurm(script).cancel_step("7.0", kill=True)
    assert script.calls == [["scancel", "7", "9_1"], ["scancel", "--signal=KILL", "7.0"]]


def test_cancelling_somebody_elses_job_is_an_error() -> None:
    script = Script(scancel=bad("scancel: error: Kill job error on job id 7: Access/permission denied\n", 210))
    with pytest.raises(ClusterError, match=r"`scancel 7` ended with exit code 210: .*Access/permission denied"):
        slurm(script).cancel(["7"])


@pytest.mark.parametrize(("is_over", "form"), [(False, ["incomplete"]), (True, [])])
def test_a_requeue_uses_the_form_that_spares_cancelled_jobs(is_over: bool, form: list[str]) -> None:
    script = Script(scontrol=ok())
    slurm(script).requeue("7_1", is_over=is_over)
    assert script.calls == [["scontrol", "requeue", *form, "7_1"]]


def test_restarts_are_read_from_the_record() -> None:
    assert slurm(Script(scontrol=ok("JobId=7 JobName=x\n   Requeue=1 Restarts=3\n"))).restarts("7") == 3
    with pytest.raises(ClusterError, match="has no number of restarts: Restarts=''"):
        slurm(Script(scontrol=ok("JobId=7 JobName=x\n"))).restarts("7")


def test_a_refused_requeue_is_an_error_and_an_absent_controller_is_another() -> None:
    refused = bad("Requested operation is presently disabled for job 7\n")
    with pytest.raises(ClusterError, match=r"`scontrol requeue incomplete 7` ended .* presently disabled") as caught:
        slurm(Script(scontrol=refused)).requeue("7")
    assert not isinstance(caught.value, ControllerAway)
    for words in ("Unable to contact slurm controller (connect failure)", "Unexpected message received"):
        with pytest.raises(ControllerAway, match=r"connect failure|Unexpected message"):
            slurm(Script(scontrol=bad(f"slurm_load_jobs error: {words}\n"))).requeue("7")
    with pytest.raises(ControllerAway, match=r"ended with exit code -15"):
        slurm(Script(scontrol=bad("", -15))).requeue("7")


def test_steps_are_listed_and_ended_one_by_one() -> None:
    script = Script(squeue=ok("7.0|attempt_0\n7.batch|batch\n"), scancel=ok())
    assert slurm(script).steps("7") == {"7.0": "attempt_0", "7.batch": "batch"}
    slurm(script).cancel_step("7.0")
    assert script.calls[1] == ["scancel", "7.0"]
    for not_a_step in ("7", "7.batch", "x.0", "", "7.0 8"):
        with pytest.raises(ClusterError, match="is not the id of a step"):
            slurm(script).cancel_step(not_a_step)


def test_the_ends_of_earlier_starts_come_from_accounting() -> None:
    script = Script(sacct=ok("Welcome to the lab\n7|NODE_FAIL\n7|CANCELLED by 0\n7|RUNNING\n"))
    assert slurm(script).ended_states("7") == ["NODE_FAIL", "CANCELLED"]
    assert slurm(Script(sacct=bad("no accounting\n"))).ended_states("7") == []


def test_a_refusal_is_a_verdict_and_an_absent_controller_is_not() -> None:
    script = Script(sbatch=bad("allocation failure: Invalid qos specification\n"))
    assert slurm(script).test_only(Path("/run/submit.sh")).refusal is Refusal.QOS
    assert script.calls == [["sbatch", "--test-only", "/run/submit.sh"]]
    away = Script(sbatch=bad("allocation failure: Unable to contact slurm controller (connect failure)\n"))
    with pytest.raises(ClusterError, match="Unable to contact slurm controller"):
        slurm(away).test_only(Path("/run/submit.sh"))


def test_availability_is_what_the_path_has(tmp_path: Path) -> None:
    for name in ("sbatch", "squeue"):
        assert not SlurmCommands({"PATH": str(tmp_path)}).is_available()
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert SlurmCommands({"PATH": str(tmp_path)}).is_available()
    assert not SlurmCommands({}).is_available()


def test_a_missing_command_says_where_to_go(tmp_path: Path) -> None:
    assert str(refusal(ClusterError, SlurmCommands({"PATH": str(tmp_path)}).partitions)) == (
        "there is no sinfo on this machine\n"
        "hint: run this where Slurm's commands are (a login node), or without +cluster to train on this machine"
    )


def test_a_process_gets_no_input_and_only_the_given_environment_and_is_ended_when_it_hangs() -> None:
    program = "import os, sys; print(repr(sys.stdin.read()), os.environ.get('A'), os.environ.get('HOME'))"
    done = run_process([sys.executable, "-S", "-c", program], env={"A": "1"}, timeout_s=30)
    assert done == Finished(0, "'' 1 None\n", "")
    with pytest.raises(ControllerAway, match=r"did not answer in 0\.2 s"):
        run_process([sys.executable, "-S", "-c", "import signal; signal.pause()"], env={}, timeout_s=0.2)


def test_a_node_without_scontrol_asks_squeue(tmp_path: Path) -> None:
    line = "7|RUNNING|None|2|2026-01-01T00:00:00|1|N/A|2026-01-01T00:00:00|N/A|1:00:00|main|normal||\\n"
    (tmp_path / "squeue").write_text(f"#!/bin/sh\nprintf '{line}'\n")
    (tmp_path / "squeue").chmod(0o755)
    commands = SlurmCommands({"PATH": str(tmp_path)})
    job = commands.show_job("7")
    assert (job["JobState"], job["Restarts"], job["PreemptTime"]) == ("RUNNING", "2", "2026-01-01T00:00:00")
    assert "EligibleTime" not in job and commands.restarts("7") == 2
    with pytest.raises(MissingCommand, match="there is no scontrol on this machine"):
        commands.requeue("7")


def test_a_node_of_two_partitions_is_named_once() -> None:
    said = "n001|10.98.76.11|blade1\nn001|10.98.76.11|blade1\nn002|10.98.76.12|blade2\n"
    names = [("n001", "10.98.76.11", "blade1"), ("n002", "10.98.76.12", "blade2")]
    assert SlurmCommands({}, runner=Script(sinfo=ok(said))).node_names() == names


BANNER = "\x1b[1mWelcome to the lab|3 messages, quota=80%\x1b[0m\r\n\r\n"


@pytest.mark.parametrize(
    ("ask", "command", "text", "answer"),
    [
        (lambda slurm: slurm.version(), "scontrol", "slurm 22.05.8\n", "22.05.8"),
        (lambda slurm: slurm.version(), "scontrol", "slurm-wlm 21.08.5\n", "21.08.5"),
        (lambda slurm: list(slurm.job_states(["7"])), "squeue", RUNNING_7, ["7"]),
        (lambda slurm: list(slurm.accounted(["8"])), "sacct", ENDED_8, ["8"]),
        (lambda slurm: slurm.own_scripts(), "squeue", "12_[0-3]|/a/x.sh\n", {"12_[0-3]": "/a/x.sh"}),
        (lambda slurm: slurm.steps("77"), "squeue", "77.batch|batch\n", {"77.batch": "batch"}),
        (lambda slurm: slurm.show_job("7")["Restarts"], "scontrol", "JobId=7 JobName=x\n   Restarts=2\n", "2"),
        (lambda slurm: slurm.show_config()["MaxArraySize"], "scontrol", "MaxArraySize   = 1001\n", "1001"),
        (lambda slurm: slurm.show_partition("main")["Nodes"], "scontrol", "PartitionName=main\n   Nodes=n1\n", "n1"),
        (lambda slurm: len(slurm.show_partitions()), "scontrol", "PartitionName=a\n\nPartitionName=b\n", 2),
        (lambda slurm: slurm.federation(), "scontrol", "Federation: wide\n", "wide"),
        (lambda slurm: slurm.node_address("n1"), "sinfo", "n1|10.0.0.1\n", "10.0.0.1"),
        (lambda slurm: slurm.node_names(), "sinfo", "n1|10.0.0.1|h1\n", [("n1", "10.0.0.1", "h1")]),
        (
            lambda slurm: slurm.partitions()[0].num_nodes,
            "sinfo",
            "main|main*|up|4|1-infinite|1:00|n/a|gpu:8|64|2|512|idle\n",
            4,
        ),
        (lambda slurm: slurm.associations("me")[0].account, "sacctmgr", "a|lab|a||||||||||\n", "a"),
        (lambda slurm: slurm.all_qos()[0].name, "sacctmgr", "normal|0|00:00:00||cluster||||||||||||||\n", "normal"),
    ],
)
@pytest.mark.parametrize(("before", "after"), [("", ""), (BANNER, ""), ("", BANNER), (BANNER, BANNER)])
def test_lines_of_a_site_around_an_answer_do_not_hide_it(
    before: str, after: str, ask: Callable[[SlurmCommands], object], command: str, text: str, answer: object
) -> None:
    assert ask(slurm(Script(**{command: ok(f"{before}{text}{after}")}))) == answer


@pytest.mark.parametrize("line", ["7   c5  batch  normal  ada  COMPLETININVALID  3  train", "  7|RUNNING"])
def test_a_job_in_columns_of_a_sites_own_is_not_gone(line: str) -> None:
    script = Script(squeue=ok(f"JOBID CLUSTER STATE\n{line}\n"), sacct=ok(f"{line}\n"))
    for ask in (slurm(script).queue, slurm(script).accounted, slurm(script).job_states):
        assert "prints other columns" in refusal(ClusterError, ask, ["7"]).message
    assert slurm(Script(squeue=ok(f"80 jobs wait\n{RUNNING_7}"))).job_states(["7"], ended=False).keys() == {"7"}


def test_a_refused_command_is_quoted_with_all_that_it_said() -> None:
    done = Finished(1, "Ask the help desk:\n  help@lab\n", "scontrol: error: no\n")
    error = refusal(ClusterError, slurm(Script(scontrol=done)).allow_requeue, "7")
    assert all(words in error.message for words in ("Ask the help desk:", "help@lab", "no"))


def test_the_fake_has_the_methods_of_the_real_thing() -> None:
    for name, method in inspect.getmembers(SlurmCommands, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(FakeSlurmCommands, name)) == inspect.signature(method), name


UNKNOWN = bad("srun: unrecognized option '--a=1'\nTry \"srun --help\" for more information\n", 255)


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([UNKNOWN, ok()], "srun: unrecognized option '--a=1'"),
        ([ok()], ""),
        # Whatever is typed: a wrapper of the site, or a machine where srun may not be used.
        ([bad("srun: error: use sbatch here\n"), bad("srun: error: use sbatch here\n")], ""),
        # Of a job of srun's own, and no verdict on a step of another job.
        ([bad("srun: error: Unable to allocate resources: Invalid account or account/partition combination\n")], ""),
        ([bad("allocation failure: Invalid node name specified\n")], ""),
        ([bad("srun: error: Unable to contact slurm controller (connect failure)\n")], ""),
    ],
)
def test_flags_are_read_by_srun_itself_and_nothing_is_run(answers: list[Finished], words: str) -> None:
    script = Script(srun=answers)
    assert slurm(script).refused_flags(["--a=1"]) == words
    assert script.calls[0] == ["srun", "--a=1", "--test-only", "true"]
    assert all("--test-only" in call for call in script.calls)


def test_an_srun_that_is_not_there_refuses_no_flags() -> None:
    commands = SlurmCommands({"PATH": "/nowhere"})
    assert commands.refused_flags(["--a=1"]) == "" and commands.options_of_srun() == []


def test_the_options_of_srun_are_those_of_its_help() -> None:
    text = "  -A, --account=name  charge it\n      --mpi=type\n      --container-image=[USER@]NAME (pyxis)\n"
    assert {"account", "mpi", "container-image"} <= set(slurm(Script(srun=ok(text))).options_of_srun())
