"""What the doctor says of five sites: one recorded from Slurm 22.05.8, four in the formats of other releases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

import pytest

from slurm_train.slurm.site import SiteFacts
from slurm_train.tools.doctor.site_rules import (
    HINTS,
    Mount,
    SiteView,
    find_site_facts,
    in_words,
    mount_of,
    requeue_delay_s,
    site_table,
)
from tests.tools.site.sites import SITES, facts_of


def view_of(site: str, **settings: str) -> SiteView:
    facts = facts_of(site)
    facts = replace(facts, settings={**facts.settings, **settings})
    return SiteView(facts=facts)


def codes(view: SiteView) -> dict[str, str]:
    return {found.code: found.level for found in find_site_facts(view)}


@pytest.mark.parametrize("site", SITES)
def test_every_site_is_described(site: str) -> None:
    view = view_of(site)
    assert codes(view) and len(in_words(view)) == 3
    assert all(found.code in HINTS and "\n" not in found.line and found.todo for found in find_site_facts(view))
    assert site_table(view)["Slurm"].startswith(view.settings["SLURM_VERSION"])


def test_the_table_has_the_gpus_by_their_types() -> None:
    rows = site_table(view_of("typed"))["GPUs of a node"]
    assert rows.startswith("a100 8 x a100, h100 4 x h100, scavenge 8 x a100, scavenge 4 x h100, ")
    assert site_table(view_of("devcluster"))["GPUs of a node"] == "main 8 x any type"


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


@pytest.mark.parametrize(
    ("settings", "code", "level"),
    [
        ({}, "TIME_LIMITS", "note"),
        ({}, "REQUEUE_DELAY", "note"),
        ({}, "ARRAY_SIZE", "note"),
        ({"SLURM_VERSION": "20.02.7"}, "OLD_SLURM", "warning"),
        ({"JobRequeue": "0"}, "NO_REQUEUE", "note"),
        ({"JobSubmitPlugins": "lua"}, "SUBMIT_FILTER", "note"),
        ({"AccountingStorageType": "(null)"}, "NO_ACCOUNTING", "warning"),
        ({"JobFileAppend": "0"}, "LOG_TRUNCATED", "note"),
        ({"ProctrackType": "proctrack/cgroup"}, "JOB_ENDS", "note"),
        ({"PreemptParameters": "send_user_signal"}, "USER_SIGNAL", "note"),
        ({"AccountingStorageType": "accounting_storage/none"}, "NO_ACCOUNTING", "warning"),
        ({"AccountingStorageHost": "127.0.0.1"}, "HIDDEN_ACCOUNTING", "note"),
        ({"MinJobAge": "2 sec"}, "MIN_JOB_AGE", "note"),
        ({"LaunchParameters": "use_interactive_step"}, "INTERACTIVE_STEP", "note"),
        ({"TaskPlugin": "task/affinity,task/cgroup"}, "CPU_BINDING", "note"),
        ({"MaxArraySize": "1"}, "ARRAY_SIZE", "warning"),
        ({"SelectType": "select/cons_res"}, "GPU_FLAG", "warning"),
    ],
)
def test_a_setting_is_reported(settings: dict[str, str], code: str, level: str) -> None:
    assert codes(view_of("devcluster", **settings))[code] == level


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


def test_without_preemption_nothing_is_lost_by_it() -> None:
    begins, _, lost = in_words(view_of("devcluster", PreemptType="preempt/none"))
    assert begins.endswith("is not preempted: no other job may take its nodes.")
    assert lost.startswith("Nothing is lost by preemption.")


def test_a_site_that_does_not_answer() -> None:
    (found,) = find_site_facts(SiteView(has_slurm=False))
    assert found.line.startswith("NO_SLURM: there is no sbatch or squeue on the PATH; ")
    assert codes(SiteView(away="`sinfo` did not answer in 20 s")) == {"CONTROLLER_AWAY": "error"}
    assert in_words(SiteView(facts=SiteFacts())) == [] and codes(SiteView(facts=SiteFacts())) == {}


@pytest.mark.parametrize("nodes", ["up", "drain"])
def test_partitions_that_start_no_jobs_are_named(nodes: str) -> None:
    view = view_of("devcluster")
    parts = [
        replace(part, groups=tuple(replace(group, state=nodes) for group in part.groups))
        if nodes == "drain"
        else replace(part, state="down")
        for part in view.facts.partitions
    ]
    assert codes(replace(view, facts=replace(view.facts, partitions=parts)))["PARTITION_DOWN"] == "warning"


def test_a_grace_that_nobody_tells_is_not_called_none() -> None:
    view = view_of("devcluster", AuthInfo="cred_expire=5")
    view = replace(view, facts=replace(view.facts, qos=(), associations=(), problems=["QOS: refused"]))
    assert "NO_GRACE" not in codes(view) and codes(view)["SHORT_GRACE"] == "note"
    assert "TERM again after a grace that is not known, and KILL 5 s later" in in_words(view)[0]
    assert "a save take less than that; else" in in_words(view)[2]


def test_names_that_differ_are_told_of_the_first_node_that_has_them() -> None:
    view = replace(view_of("devcluster"), nodes=[("n1", "n1", "n1"), ("n2", "10.0.0.2", "blade2"), ("n3", "x", "y")])
    seen = [one.seen for one in find_site_facts(view) if one.code == "NODE_NAMES"]
    assert seen == ["what Slurm calls n2 calls itself blade2 and is reached at 10.0.0.2"]
    assert "NODE_NAMES" not in codes(replace(view, nodes=[("n1", "n1", "n1")]))


def test_federations_and_filters_are_told() -> None:
    view = replace(view_of("devcluster"), federation="fed", filtered="do not use --requeue here")
    assert (codes(view)["FEDERATION"], codes(view)["FILTER_REFUSES"]) == ("error", "warning")


def test_container_runtimes_are_named() -> None:
    found = find_site_facts(replace(view_of("devcluster"), runtimes=("apptainer", "enroot")))
    assert "container runtimes here: apptainer, enroot" in [one.seen for one in found]


@pytest.mark.parametrize(
    ("text", "seconds"), [("cred_expire=5,socket=/x", 5.0), ("socket=/x,cred_expire=30", 30.0), ("(null)", 120.0)]
)
def test_the_delay_of_a_requeue_is_the_life_of_a_credential(text: str, seconds: float) -> None:
    assert requeue_delay_s({"AuthInfo": text}) == seconds


_MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:35 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2,hard,local_lock=none
41 22 0:36 / /work\\040two rw shared:3 - nfs server:/w rw,vers=3,soft,nolock,nocto,acdirmax=300,acregmax=60
"""


@pytest.mark.parametrize(
    ("path", "kind", "expected"),
    [
        ("/home/me/project", "nfs4", {}),
        ("/homes", "ext4", {}),
        (
            "/work two/me",
            "nfs",
            {
                "NFS_SOFT": "warning",
                "NFS_NOCTO": "warning",
                "NFS_CACHE": "warning",
                "NFS_NOLOCK": "note",
                "NFS_OLD": "note",
            },
        ),
    ],
)
def test_risky_options_of_nfs_are_named(path: str, kind: str, expected: dict[str, str]) -> None:
    mount = mount_of(PurePath(path), _MOUNTS)
    assert mount is not None and mount.kind == kind
    assert codes(SiteView(mount=mount)) == expected


def test_the_later_mount_on_a_folder_counts() -> None:
    lines = _MOUNTS + "42 40 0:37 / /home rw - tmpfs none rw\n"
    assert mount_of(PurePath("/home/me"), lines) == Mount(folder="/home", kind="tmpfs", options=("rw", "rw"))
    assert mount_of(PurePath("/home"), "nonsense\n") is None
