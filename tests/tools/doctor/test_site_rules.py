"""What the doctor says of five sites: one recorded from Slurm 22.05.8, four in the formats of other releases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

import pytest

from slurm_train.mounts import mount_of
from slurm_train.slurm.site import SiteFacts
from slurm_train.tools.doctor.site_rules import (
    HINTS,
    SiteView,
    find_site_facts,
    in_words,
    site_table,
)
from tests.tools.site.sites import SITES, facts_of


def view_of(site: str, **settings: str) -> SiteView:
    facts = facts_of(site)
    return SiteView(facts=replace(facts, settings={**facts.settings, **settings}))


def codes(view: SiteView) -> dict[str, str]:
    return {found.code: found.level for found in find_site_facts(view)}


@pytest.mark.parametrize("site", SITES)
def test_every_site_is_described(site: str) -> None:
    view = view_of(site)
    assert codes(view) and len(in_words(view)) == 3
    assert all(found.code in HINTS and "\n" not in found.line and found.todo for found in find_site_facts(view))
    assert site_table(view)["Slurm"].startswith(view.settings["SLURM_VERSION"])


@pytest.mark.parametrize(
    ("name", "value", "code", "level"),
    [
        ("SLURM_VERSION", "20.02.7", "OLD_SLURM", "warning"),
        ("AccountingStorageType", "(null)", "NO_ACCOUNTING", "warning"),
        ("AccountingStorageType", "accounting_storage/none", "NO_ACCOUNTING", "warning"),
        ("AccountingStorageHost", "127.0.0.1", "HIDDEN_ACCOUNTING", "note"),
        ("MinJobAge", "2 sec", "MIN_JOB_AGE", "note"),
        ("MaxArraySize", "1", "ARRAY_SIZE", "warning"),
        ("MaxArraySize", "1001", "ARRAY_SIZE", "note"),
        ("SelectType", "select/cons_res", "GPU_FLAG", "warning"),
        ("JobRequeue", "0", "NO_REQUEUE", "note"),
        ("PreemptParameters", "send_user_signal", "USER_SIGNAL", "note"),
        ("RequeueExit", "1,3-5", "REQUEUE_EXIT", "note"),
        ("RequeueExitHold", "7", "REQUEUE_EXIT", "note"),
    ],
)
def test_a_setting_is_reported(name: str, value: str, code: str, level: str) -> None:
    assert codes(view_of("devcluster", **{name: value}))[code] == level


@pytest.mark.parametrize(
    ("grace_s", "mode", "code", "said"),
    [
        (0.0, "requeue", "NO_GRACE", "leaves 5 s from TERM to KILL"),
        (15.0, "cancel", "SHORT_GRACE", "Slurm cancels what it preempts here"),
        (300.0, "requeue", "", "take less than 5 min 5 s"),
        (15.0, "suspend", "SUSPENDS", "goes on in the same attempt"),
    ],
)
def test_kinds_of_preemption_are_told_apart(grace_s: float, mode: str, code: str, said: str) -> None:
    view = view_of("devcluster")
    qos = [replace(one, grace_s=grace_s, preempt_mode=mode) if one.name == "normal" else one for one in view.facts.qos]
    view = replace(view, facts=replace(view.facts, qos=qos))
    assert {"NO_GRACE", "SHORT_GRACE", "SUSPENDS"} & set(codes(view)) == ({code} if code else set())
    assert said in " ".join(in_words(view))


def test_a_grace_that_nobody_tells_is_not_called_none_and_without_preemption_nothing_is_lost() -> None:
    view = view_of("devcluster")
    unknown = replace(view, facts=replace(view.facts, qos=(), associations=(), unanswered={"QOS": "refused"}))
    assert codes(unknown)["SHORT_GRACE"] == "note"
    assert "TERM again after a grace that is not known, and KILL 5 s later" in in_words(unknown)[0]
    *_, lost = in_words(view_of("devcluster", PreemptType="preempt/none"))
    assert lost.startswith("Nothing is lost by preemption.")


def test_a_site_that_expedites_requeues_is_said_to() -> None:
    old = view_of("devcluster", SlurmctldParameters="enable_expedited_requeue")
    new = view_of("devcluster", SlurmctldParameters="enable_expedited_requeue", SLURM_VERSION="26.05.5")
    assert "expedited" not in " ".join(in_words(old))
    assert "after a lost node at once, before all other jobs (expedited requeue)" in in_words(new)[1]


def test_limits_are_told_with_their_owner_and_a_plain_site_has_no_such_note() -> None:
    view = view_of("devcluster", RequeueExit="(null)")
    assert not {"REQUEUE_EXIT", "LONE_JOB", "PARTITION_BARRED"} & set(codes(view))
    normal, *others = view.facts.qos
    limited = replace(normal, max_time_min=30, most={"user": {"submit": 1}})
    (record,) = view.facts.records
    facts = replace(view.facts, qos=[limited, *others], records=[{**record, "AllowQos": "urgent"}])
    found = {finding.code: finding.line for finding in find_site_facts(replace(view, facts=facts))}
    assert "main 30 min at most (QOS normal)" in found["TIME_LIMITS"]
    assert "QOS normal lets one job of a user into the queue" in found["LONE_JOB"]
    assert "partition main is for QOS urgent alone" in found["PARTITION_BARRED"]


def test_a_site_that_does_not_answer() -> None:
    assert codes(SiteView(has_slurm=False)) == {"NO_SLURM": "error"}
    assert codes(SiteView(away="`sinfo` did not answer in 20 s")) == {"CONTROLLER_AWAY": "error"}
    assert in_words(SiteView(facts=SiteFacts())) == [] and codes(SiteView(facts=SiteFacts())) == {}


def test_partitions_that_start_no_jobs_are_named() -> None:
    view = view_of("devcluster")
    (part, *_) = view.facts.partitions
    drained = replace(part, groups=tuple(replace(group, state="drain") for group in part.groups))
    for idle in (drained, replace(part, state="down")):
        found = codes(replace(view, facts=replace(view.facts, partitions=[idle])))
        assert found["PARTITION_DOWN"] == "warning"


def test_what_else_was_seen_of_a_site_is_told() -> None:
    nodes = [("n1", "n1", "n1"), ("n2", "10.0.0.2", "blade2"), ("n3", "x", "y")]
    more = {"federation": "fed", "filtered": "no --requeue here", "runtimes": ("apptainer", "enroot"), "nodes": nodes}
    found = {one.code: (one.level, one.seen) for one in find_site_facts(replace(view_of("devcluster"), **more))}
    assert (found["FEDERATION"][0], found["FILTER_REFUSES"][0]) == ("error", "warning")
    assert found["CONTAINERS"] == ("note", "container runtimes here: apptainer, enroot")
    assert found["NODE_NAMES"] == ("note", "what Slurm calls n2 calls itself blade2 and is reached at 10.0.0.2")
    assert "NODE_NAMES" not in codes(replace(view_of("devcluster"), nodes=nodes[:1]))


_MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2,hard,local_lock=none
41 22 0:36 / /work\\040two rw shared:3 - nfs server:/w rw,vers=3,soft,nolock,nocto,acdirmax=300,acregmax=60
42 40 0:37 / /again rw - nfs4 none rw
43 40 0:37 / /again rw - tmpfs none rw
nonsense
"""
_RISKY = {"NFS_SOFT": "warning", "NFS_NOCTO": "warning", "NFS_CACHE": "warning", "NFS_NOLOCK": "note"}


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("/home/me/project", "nfs4", {}),
        ("/homes", "ext4", {}),
        ("/again/me", "tmpfs", {}),
        ("/work two/me", "nfs", _RISKY | {"NFS_OLD": "note"}),
    ],
)
def test_risky_options_of_nfs_are_named(path: str, kind: str, expected: dict[str, str]) -> None:
    mount = mount_of(PurePath(path), _MOUNTS)
    assert mount is not None and mount.kind == kind
    assert codes(SiteView(mount=mount)) == expected


def test_a_call_that_the_file_system_lacks_is_named() -> None:
    sentence = "/work cannot hold runs: its file system makes no hard links, and a lock is one: Operation not permitted"
    found = [finding for finding in find_site_facts(SiteView(lacks=sentence)) if finding.code == "FS_CALLS"]
    assert [(finding.level, finding.seen) for finding in found] == [("warning", sentence)]
    assert "FS_CALLS" not in {finding.code for finding in find_site_facts(SiteView())}
