"""What the doctor says of five sites: one recorded from Slurm 22.05.8, four in the formats of other releases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slurm_train.slurm.site import SiteFacts, default_account, default_qos
from slurm_train.tools.doctor.finding import SITE_CODES
from slurm_train.tools.doctor.site import SiteView, duration_text, examine, requeue_delay_s
from slurm_train.tools.doctor.site_words import in_words, site_table
from tests.tools.site.sites import SITES, facts_of


def view_of(site: str, **settings: str) -> SiteView:
    facts = facts_of(site)
    facts = replace(facts, settings={**facts.settings, **settings})
    return SiteView(facts=facts, qos=default_qos(facts.associations, default_account(facts.associations)))


def codes(view: SiteView) -> dict[str, str]:
    return {found.code: found.level for found in examine(view)}


@pytest.mark.parametrize("site", SITES)
def test_every_site_is_told_apart_in_plain_sentences(site: str) -> None:
    view = view_of(site)
    assert codes(view) and len(in_words(view)) == 3
    assert all(found.code in SITE_CODES and "\n" not in found.line for found in examine(view))
    assert dict(site_table(view))["Slurm"].startswith(view.settings["SLURM_VERSION"])


def test_the_devcluster_in_words() -> None:
    assert in_words(view_of("devcluster", AuthInfo="cred_expire=5")) == [
        "A run of partition main and QOS normal can be preempted by jobs of QOS urgent. Its ranks get TERM, TERM again "
        "after 15 s, and KILL 5 s later; they save at the next step boundary.",
        "The supervisor of the run calls `scontrol requeue incomplete`, before a time limit as well: it keeps its id "
        "and may start again after 5 s.",
        "Nothing by preemption where the step under way, one more and a save take less than 20 s; else the steps "
        "since the newest checkpoint (checkpoint.every_steps says how many, auto chooses). Nothing at a time limit: "
        "the ranks are asked to save before it. A lost node costs as much.",
    ]


def test_the_findings_of_the_devcluster() -> None:
    assert codes(view_of("devcluster", JobFileAppend="0")) == {
        "SHORT_GRACE": "note",
        "REQUEUE_DELAY": "note",
        "LOG_TRUNCATED": "note",
        "ARRAY_SIZE": "note",
        "TIME_LIMITS": "note",
    }


@pytest.mark.parametrize(
    ("settings", "code", "level"),
    [
        ({"SLURM_VERSION": "20.11.9"}, "OLD_SLURM", "warning"),
        ({"JobRequeue": "0"}, "NO_REQUEUE", "note"),
        ({"ProctrackType": "proctrack/cgroup"}, "JOB_ENDS", "note"),
        ({"PreemptParameters": "send_user_signal"}, "USER_SIGNAL", "note"),
        ({"AccountingStorageType": "accounting_storage/none"}, "NO_ACCOUNTING", "warning"),
        ({"MaxArraySize": "1"}, "ARRAY_SIZE", "warning"),
        ({"SelectType": "select/cons_res"}, "GPU_FLAG", "warning"),
    ],
)
def test_a_setting_is_told(settings: dict[str, str], code: str, level: str) -> None:
    assert codes(view_of("devcluster", **settings))[code] == level


@pytest.mark.parametrize(
    ("grace", "mode", "code", "said"),
    [
        ("00:00:00", "requeue", "NO_GRACE", "leaves 5 s from TERM to KILL"),
        ("00:00:15", "cancel", "SHORT_GRACE", "Slurm cancels what it preempts here"),
        ("00:05:00", "requeue", "", "take less than 5.1 min"),
        ("00:00:15", "suspend", "SUSPENDS", "goes on in the same attempt"),
    ],
)
def test_kinds_of_preemption_are_told_apart(grace: str, mode: str, code: str, said: str) -> None:
    view = view_of("devcluster")
    seconds = sum(60**power * int(part) for power, part in enumerate(reversed(grace.split(":"))))
    qos = [
        replace(one, grace_s=float(seconds), preempt_mode=mode) if one.name == "normal" else one
        for one in view.facts.qos
    ]
    view = replace(view, facts=replace(view.facts, qos=qos))
    found = codes(view)
    assert {"NO_GRACE", "SHORT_GRACE", "SUSPENDS"} & set(found) == ({code} if code else set())
    assert said in " ".join(in_words(view))


def test_where_nobody_preempts_nothing_is_lost_by_it() -> None:
    view = view_of("devcluster", PreemptType="preempt/none")
    assert in_words(view)[0].endswith("is not preempted: nobody's job may take its nodes.")
    assert in_words(view)[2].startswith("Nothing is lost by preemption.")


def test_a_site_that_says_nothing_is_no_site_to_speak_of() -> None:
    assert examine(SiteView(has_slurm=False))[0].line.startswith("NO_SLURM: there is no sbatch or squeue on the PATH; ")
    (found,) = examine(SiteView(away="`sinfo` did not answer in 20 s"))
    assert (found.code, found.level) == ("CONTROLLER_AWAY", "error")
    assert in_words(SiteView(facts=SiteFacts())) == [] and examine(SiteView(facts=SiteFacts())) == ()


def test_partitions_that_start_nothing_are_named() -> None:
    view = view_of("devcluster")
    down = [replace(part, state="down") for part in view.facts.partitions]
    assert codes(replace(view, facts=replace(view.facts, partitions=down)))["PARTITION_DOWN"] == "warning"
    drained = [
        replace(part, groups=tuple(replace(group, state="drain") for group in part.groups))
        for part in view.facts.partitions
    ]
    assert codes(replace(view, facts=replace(view.facts, partitions=drained)))["PARTITION_DOWN"] == "warning"


def test_container_runtimes_are_named() -> None:
    found = examine(replace(view_of("devcluster"), runtimes=("apptainer", "enroot")))
    (line,) = [one.seen for one in found if one.code == "CONTAINERS"]
    assert line == "container runtimes here: apptainer, enroot"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("cred_expire=5,socket=/x", 5.0), ("socket=/x,cred_expire=30", 30.0), ("(null)", 120.0), ("", 120.0)],
)
def test_the_delay_of_a_requeue_is_the_life_of_a_credential(text: str, seconds: float) -> None:
    assert requeue_delay_s({"AuthInfo": text}) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5, "5 s"),
        (60, "1 min"),
        (90, "90 s"),
        (1800, "30 min"),
        (3600, "1 h"),
        (5400, "90 min"),
        (86400, "1 day"),
        (172800, "2 days"),
    ],
)
def test_times_are_written_for_people(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
