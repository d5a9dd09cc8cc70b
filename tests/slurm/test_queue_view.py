from __future__ import annotations

from collections.abc import Iterable

from slurm_train.errors import ClusterError
from slurm_train.slurm.queue_view import QueueView, Wanted
from slurm_train.slurm.records import JobState
from tests.fakes.slurm_commands import FakeSlurmCommands, job_state

ENDED = job_state("8", "COMPLETED", source="sacct")


class NotedCommands(FakeSlurmCommands):
    """Notes what it is asked, and how long that takes on a clock of the test's own."""

    def __init__(self, *jobs: JobState, accounts: Iterable[JobState] = (), takes_s: float = 0.0) -> None:
        super().__init__(jobs)
        self.now_s, self.takes_s = 0.0, takes_s
        self.calls: list[tuple[str, list[str]]] = []
        self.accounts: list[JobState] | None = list(accounts)

    def queue(self, job_ids: Iterable[str], *, whole: bool = False) -> tuple[dict[str, JobState], dict[str, int]]:
        self.calls.append(("whole" if whole else "squeue", sorted(job_ids)))
        self.now_s += self.takes_s
        return super().queue(job_ids, whole=whole)

    def accounted(self, job_ids: Iterable[str]) -> dict[str, JobState]:
        ids = sorted(job_ids)
        self.calls.append(("sacct", ids))
        if self.accounts is None:
            raise ClusterError("no accounts")
        return {job.job_id: job for job in self.accounts if job.job_id in ids}

    def told(self) -> list[tuple[str, list[str]]]:
        calls, self.calls = self.calls, []
        return calls


def view_of(slurm: NotedCommands) -> QueueView:
    return QueueView(slurm, clock=lambda: slurm.now_s)


def test_one_squeue_for_all_jobs_and_none_before_it_is_time() -> None:
    slurm = NotedCommands(job_state("7", "RUNNING"), job_state("9", "PENDING"))
    view = view_of(slurm)
    look = view.look(Wanted(job_ids=["7", "9"]))
    assert set(look.jobs) == {"7", "9"} and look.age_s == 0 and look.problem == ""
    assert slurm.told() == [("squeue", ["7", "9"])]
    slurm.now_s = 4.9
    assert view.look(Wanted(job_ids=["7", "9"])).age_s == 4.9
    assert slurm.told() == []
    slurm.now_s = 5.0
    view.look(Wanted(job_ids=["7", "9"]))
    assert slurm.told() == [("squeue", ["7", "9"])]


def test_a_job_that_was_not_asked_about_is_not_put_off_while_slurm_answers() -> None:
    slurm = NotedCommands(job_state("7"), job_state("9"))
    view = view_of(slurm)
    view.look(Wanted(job_ids=["7"]))
    slurm.now_s = 1.0
    assert set(view.look(Wanted(job_ids=["7", "9"])).jobs) == {"7", "9"}
    slurm.error = ClusterError("away")
    slurm.accounts = None
    slurm.now_s = 6.0
    assert view.look(Wanted(job_ids=["7", "9"])).problem == "away"
    slurm.told()
    view.look(Wanted(job_ids=["7", "9", "11"]))
    assert slurm.told() == []


def test_scripts_are_asked_for_as_seldom_as_the_queue() -> None:
    slurm = NotedCommands()
    view = view_of(slurm)

    def search() -> dict[str, str] | None:
        return view.search(lambda _, scripts: dict(scripts), nothing={})

    slurm.scripts = {"7": "/a/submit.sh"}
    assert search() == slurm.scripts
    slurm.scripts = {}
    slurm.now_s = 4.0
    assert search() == {"7": "/a/submit.sh"}
    slurm.now_s = 5.0
    assert search() == {}
    slurm.error = ClusterError("away")
    slurm.now_s = 10.0
    assert search() is None
    slurm.error, slurm.scripts = None, {"8": "/b/submit.sh"}
    assert search() is None, "it was silent just now"
    slurm.now_s = 30.0
    assert search() == slurm.scripts


def test_accounting_is_asked_once_about_an_end_and_not_about_what_is_settled() -> None:
    slurm = NotedCommands(accounts=[ENDED])
    view, wanted = view_of(slurm), Wanted(job_ids=["6", "8"], settled=["6"])
    for seconds in range(0, 1000, 100):
        slurm.now_s = float(seconds)
        assert view.look(wanted).jobs == {"8": ENDED}
    assert [call for call in slurm.told() if call[0] == "sacct"] == [("sacct", ["8"])]


def test_a_job_that_comes_back_is_asked_about_again_when_it_has_ended() -> None:
    slurm = NotedCommands(accounts=[job_state("8", "PREEMPTED", source="sacct")])
    view, wanted = view_of(slurm), Wanted(job_ids=["8"])
    assert view.look(wanted).jobs["8"].word == "PREEMPTED"
    slurm.now_s, slurm.jobs = 100.0, {"8": job_state("8", "RUNNING")}
    assert view.look(wanted).jobs["8"].word == "RUNNING"
    slurm.now_s, slurm.jobs, slurm.accounts = 200.0, {}, [ENDED]
    assert view.look(wanted).jobs["8"] == ENDED


def test_a_controller_that_is_silent_is_asked_ever_less_and_the_last_answer_counts() -> None:
    slurm = NotedCommands(job_state("7", "RUNNING"))
    slurm.accounts = None
    view, wanted = view_of(slurm), Wanted(job_ids=["7"])
    view.look(wanted)
    slurm.error = ClusterError("nobody there")
    slurm.told()
    asked_at = []
    for second in range(5, 200):
        slurm.now_s = float(second)
        look = view.look(wanted)
        asked_at += [second for name, _ in slurm.told() if name == "squeue"]
        assert look.problem == "nobody there" and look.jobs["7"].word == "RUNNING" and look.age_s == second
    assert asked_at == [5, 15, 35, 75, 155]
    # Accounting answers where the controller does not.
    slurm.accounts, slurm.now_s = [job_state("7", "COMPLETED", source="sacct")], 400.0
    look = view.look(wanted)
    assert look.problem == "" and look.jobs["7"].word == "COMPLETED"
    # A slow controller has twenty times as long for others.
    slurm.error, slurm.now_s, slurm.takes_s = None, 1000.0, 3.0
    look = view.look(wanted)
    assert (look.problem, look.is_due_in_s) == ("", 60.0)
