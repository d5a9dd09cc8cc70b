"""The campaigns by name: what each promises, and the function that puts it to the test; the page of their results."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaigns import reports, sites
from tests.campaigns.preflight_faults import FAULTS
from tests.campaigns.record import Tally
from tests.support.cluster_roots import SUITES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
_BEGIN = "<!-- written by `python -m tests.campaigns {} --keep` -->\n\n"
Records = Mapping[str, Mapping[str, Any]]
_END = "\n<!-- end of what is written -->\n"

_HEAD = """# What was promised, and how often it was tried

Each promise below is tested by a campaign with a seed. A campaign causes the fault, records what happened and checks
the result. `make campaign` runs all of them on a real Slurm on this machine (hours on two cores) and rewrites this
page; `python -m tests.campaigns NAME --trials 5` runs one of them briefly. Campaigns without a cluster are "local". The
last column ends with the commit that was tested.
"""


class Campaign(NamedTuple):
    """One promise and how it is put to the test.

    Args:
        promise: in one sentence, for the page.
        trial: "<module here>:<function>", a function `(tally, *, seed, trials, folder)` that counts trials and returns
            what was measured, by name, in words for the page, e.g. {"latency, median": "0.4 s"}. A word after it is
            its first argument.
        trials: of the full campaign.
        needs_cluster: whether it runs on the one-machine Slurm cluster.
    """

    promise: str
    trial: str
    trials: int
    needs_cluster: bool = True

    @property
    def function(self) -> Callable[..., Mapping[str, str]]:
        """What puts it to the test."""
        module, name, *words = re.split("[: ]", self.trial)
        function: Callable[..., Mapping[str, str]] = getattr(importlib.import_module(f"tests.campaigns.{module}"), name)
        return partial(function, *words) if words else function

    def run(self, *, seed: int, trials: int, folder: Path) -> Tally:
        """Makes so many trials and returns what was found."""
        tally = Tally()
        tally.figures = self.function(tally, seed=seed, trials=trials, folder=folder)
        return tally


LOCAL = False

CAMPAIGNS: dict[str, Campaign] = {
    "kills-local": Campaign(
        "any rank killed at any moment: the run resumes, and no committed step is lost",
        "kills_local:run",
        1000,
        LOCAL,
    ),
    "kills": Campaign(
        "any rank killed at any moment on a real Slurm: the run resumes, and no committed step is lost",
        "strikes:kills",
        100,
    ),
    "crash-points": Campaign(
        "killed, full, failing or powered off before and after every file-system call of save, commit and "
        "prune, also where a damaged checkpoint was passed over and its step is reached again: some verified "
        "checkpoint resumes",
        "checkpoint_faults:crash_points",
        1,
        LOCAL,
    ),
    "not-understood": Campaign(
        "a checkpoint that a newer version wrote, or that a node cannot read just now, among whole and damaged ones: "
        "an attempt that would go on from it stops and changes nothing; none is ever passed over, changed or pruned",
        "not_understood:run",
        500,
        LOCAL,
    ),
    "early-ends": Campaign(
        "programs that end with 0 in many ways (in a handler, by `break`, with `leave` caught, refusing at their "
        "second start, by `os._exit`), each stopped twice (STOP, TERM, USR2, preemption): none is finished before its "
        "end, no good end is called early",
        "early_ends:run",
        600,
        LOCAL,
    ),
    "same-outside": Campaign(
        "texts, tokenizers, installed packages and data sets of a person that are exchanged for others with the same "
        "names, sizes and times: none is taken for what was there before",
        "same_outside:run",
        400,
        LOCAL,
    ),
    "unshared-state": Campaign(
        "callback state, buffers, optimizer state and streams that some ranks hold and others do not, or otherwise: "
        "each save has all of it once, or names what no checkpoint can keep",
        "unshared:run",
        1000,
        LOCAL,
    ),
    "unasked-jobs": Campaign(
        "jobs that nobody can ask about, because Slurm's commands are not on this machine or give no answer: what the "
        "files do not call over keeps its checkpoints, pins and leases in `checkpoint gc`, no follower, wait or "
        "`status -w` ends, and `cancel` refuses and changes nothing",
        "unasked_jobs:run",
        300,
        LOCAL,
    ),
    "same-step": Campaign(
        "one step saved up to a hundred times in each attempt of a run, by files and by `training`, with empty "
        "folders, files that are still open, and links: a save is refused by name or whole, and the newest is found "
        "again",
        "same_step:run",
        60,
        LOCAL,
    ),
    "equal-or-named": Campaign(
        "optimizers that keep another part of their state on each rank by hand, and loaders that begin again, in "
        "another order or nearly where they were, in programs of two ranks that are stopped once or twice: the losses "
        "are equal bit for bit, or a start is refused by name, or the log names it",
        "unequal:run",
        80,
        LOCAL,
    ),
    "combinations": Campaign(
        "models, data, layouts, optimizers, batches, precisions, callbacks and saves in combinations: what is typed "
        "is refused with a sentence, or trains; stopped at any step and typed again it ends with the same bits, in "
        "another layout with the same samples and losses, and its weights are evaluated as in the run",
        "combinations:run",
        60,
        LOCAL,
    ),
    "following": Campaign(
        "a run and an evaluator that follows it (`evaluate --follow`), either killed at any moment, with "
        "`checkpoint.keep=1`: every checkpoint is scored exactly once, none is removed before, and each loss of the "
        "training has the bits that it has without an evaluator",
        "following:run",
        120,
        LOCAL,
    ),
    "nfs-kills": Campaign(
        "on NFS (a FUSE client) with lost replies and a server that is slow, away, and away for a minute: any rank "
        "killed at any moment, and no committed step is lost",
        "nfs:kills",
        100,
        LOCAL,
    ),
    "nfs": Campaign(
        "on NFS (a FUSE client per node) with lost replies, a server that is slow or away for a minute, no "
        "close-to-open and a clock 30 s ahead: of six trials five preemptions and a lost node, nothing is lost",
        "nfs:run",
        24,
    ),
    "thawed-writer": Campaign(
        "a writer stopped at every file-system call of a commit, prune, rollback, claim, passing over, local save or "
        "result, "
        "and released when its successor has begun, claimed or committed the same step: no verified checkpoint and no "
        "result of the successor is lost",
        "checkpoint_faults:thawed_writer",
        1,
        LOCAL,
    ),
    "abandoned-past": Campaign(
        "a run with `checkpoint.local_dir` goes back, because its newest checkpoint is damaged, unreadable or taken "
        "away, a node is not there, a step went wrong or a change was accepted: it goes on from the newest step that "
        "it came from, and never from what it has left behind",
        "abandoned_past:run",
        300,
        LOCAL,
    ),
    "two-users": Campaign(
        "two uids save and resume in one sticky `checkpoint.local_dir` at the same time, while a stranger has "
        "made their names first, with folders, files and links: neither is kept out, none reads the other's",
        "two_users:run",
        70,
        LOCAL,
    ),
    "strangers": Campaign(
        "in a root that everybody may write to, a stranger makes first whatever name a command reads there, as a file "
        "that names the user's run and the stranger's program, a folder, link, named pipe, locked, closed or endless "
        "file: status, logs, report, checkpoint, plan, evaluate, resume, cancel, a run and a sweep answer as without "
        "it, in time, and leave nothing in the stranger's folders",
        "strangers:run",
        600,
        LOCAL,
    ),
    "beside-file": Campaign(
        "an unmodified program writes its checkpoint, a log, a copy of its sources and a link beside its own file, and "
        "is stopped again and again: however it is continued, also with other code and in a sweep, no step is done "
        "twice, and each run has its own files, whole",
        "beside_file:run",
        40,
        LOCAL,
    ),
    "shared-caches": Campaign(
        "what lies where others reach it (packages and their archive, checkpoints and tokens, the copy of the code, "
        "kernels) is a stranger's, a link to a stranger's, thinned, emptied or cleared: its use gives what it gave "
        "before or is refused by name, and nothing of a stranger's is used; kernels are tried with strangers alone",
        "shared_caches:run",
        62,
        LOCAL,
    ),
    "corruption": Campaign(
        "every truncation, every flipped bit, every 512-byte hole of a small checkpoint is detected",
        "checkpoint_faults:corruption",
        1,
        LOCAL,
    ),
    "exactness": Campaign(
        "2 nodes x 2 ranks, 20 mixed interruptions: every loss and the weights have the bits of the "
        "undisturbed run, and each sample is used exactly once per epoch",
        "strikes:exactness",
        20,
    ),
    "world-sizes": Campaign(
        "32 ranks, then 16, 6 and 1, by `resume RUN cluster=NxG`: the same global batches in the same order, "
        "losses equal to the order of additions",
        "world_sizes:run",
        1,
    ),
    "lost-nodes": Campaign(
        "runs that lose nodes and get them back, 4, 3 or 2 ranks in any order, replicas and shards: the samples of "
        "every step are those of the undisturbed run, losses equal to 1e-9 in double precision",
        "world_sizes:lost_nodes",
        20,
        LOCAL,
    ),
    "growing": Campaign(
        "two runs of 1 to 3 nodes side by side on four, of which one after the other is lost and comes back: it is "
        "used again, each return brings two requeues at most, and samples and losses are those of an undisturbed run",
        "growing:run",
        20,
    ),
    "lost-work": Campaign(
        "a preemption with grace loses no step, a hard kill at most those since the last checkpoint",
        "strikes:lost_work",
        20,
    ),
    "latency": Campaign(
        "signal to durable checkpoint within the step under way, one more and the save; job start to first new "
        "step within 1.2x of a bare torch script",
        "latency:run",
        10,
    ),
    "cancel": Campaign(
        "a run cancelled at any moment ends cancelled and never comes back",
        "cancel:run",
        200,
    ),
    "two-starters": Campaign(
        "a run that is started twice at once and cancelled in between: one job trains at a time, nothing is "
        "written under live ranks, cancel finds every job, resume finishes the run",
        "two_starters:run",
        50,
    ),
    "continuation": Campaign(
        "cancelled at any moment around the submission of the job that takes over, with requeue forbidden and "
        "no accounting: the run never comes back",
        "continuation:run",
        100,
    ),
    "split-brain": Campaign(
        "ranks that outlive their job commit nothing that anybody sees and are gone within 10 s",
        "split_brain:run",
        50,
    ),
    "storm": Campaign(
        "50 preemptions cost no budget; 3 ends without progress stop the run with a reason",
        "budgets:storm",
        51,
    ),
    "full-disk": Campaign(
        "a full disk, a used-up quota, EIO or ESTALE at every write of the supervisor around a preemption: "
        "the run comes back and is finished once there is room",
        "full_disk:run",
        400,
    ),
    "no-progress": Campaign(
        "a limit shorter than the start, and a job that loses its node each time: both stop with a reason",
        "budgets:no_progress",
        2,
    ),
    "arrays": Campaign(
        "16 elements, some preempted: the others' Restarts stay 0 and all end",
        "arrays:run",
        16,
    ),
    "cut-off": Campaign(
        "the command of a sweep killed, interrupted or without its terminal at any moment: typed again, each "
        "run is in the queue exactly once",
        "cut_off:run",
        41,
    ),
    "goodput": Campaign(
        "one failure a minute, ranks in waiting: at least 0.95 of the allocated time are productive steps",
        "strikes:goodput",
        10,
    ),
    "hang": Campaign(
        "a stopped rank is named in one sentence with its stacks, and the step ends within time-out + 10 s",
        "hang:run",
        20,
    ),
    "script-hang": Campaign(
        "a rank of a user's own script that is stopped, asleep, in a read without an answer, in a lock or in a data "
        "loader is named with stacks within time-out + 10 s, and the script is started again",
        "silence:hang",
        20,
    ),
    "script-healthy": Campaign(
        "a user's own script, one rank of which reads slowly, evaluates, compiles or saves for 3.5 time-outs while the "
        "other waits, is left alone",
        "silence:healthy",
        20,
    ),
    "preflight": Campaign(
        "every fault of nodes and network that has a code is caused on a real Slurm, and named in one line "
        "within 30 s of the job's start",
        "preflight:faulty",
        len(FAULTS),
    ),
    "preflight-healthy": Campaign(
        "runs on healthy nodes get no finding",
        "preflight:healthy",
        20,
    ),
    "stragglers": Campaign(
        "a rank, a node or its reading that is slow is named with its node and the cause; a healthy run is not",
        "stragglers:run",
        12,
    ),
    "controller": Campaign(
        "slurmctld killed while runs train, save and requeue: no run is lost",
        "strikes:controller",
        20,
    ),
    "hostile-words": Campaign(
        "10,000 hostile strings in every field: refused, or byte for byte what Slurm shows; no shell runs them",
        "hostile_words:run",
        10_000,
    ),
    "hostile-neighbours": Campaign(
        "strangers who drip, are silent by the thousand, talk rubbish or hold all ports: the ranks meet "
        "within 10 s more than undisturbed or name the cause, and nobody is taken for somebody else",
        "hostile_neighbours:run",
        180,
    ),
    "port-pairs": Campaign(
        "two jobs that start on the same two nodes at the same time: neither meets the other's ranks",
        "hostile_neighbours:pairs",
        20,
    ),
    **{
        f"versions-{version}": Campaign(
            f"the main flows on Slurm {version}, of Debian {suite} ([table](slurm-tested.md#versions-of-slurm))",
            f"versions:run {suite}",
            15,
            LOCAL,
        )
        for suite, (version, _) in SUITES.items()
    },
    **{
        f"faults-{version}": Campaign(
            f"campaigns from above on Slurm {version}, of Debian {suite} ([table](slurm-tested.md#versions-of-slurm))",
            f"versions:faults {suite}",
            12,
            LOCAL,
        )
        for suite, (version, _) in SUITES.items()
        if version != "22.05"
    },
    **{
        f"sites-{site.name}": Campaign(
            "a run is submitted, preempted, cancelled and resumed at a site with another habit",
            f"sites:live {site.name}",
            1,
            LOCAL,
        )
        for site in sites.SITES
    },
    "sites": Campaign(
        "`init`, `doctor` and `plan` say what a site does otherwise ([table](slurm-tested.md#what-is-said-of-a-habit))",
        "sites:listen",
        len(sites.SITES),
        LOCAL,
    ),
    "reports": Campaign(
        "what people have reported of other launchers on Slurm (wrappers, filters, lists, links, inherited options) is "
        "typed here: it works, or what is said is true and names the setting",
        "reports:run",
        len(reports.SITUATIONS),
    ),
    "secrets": Campaign(
        "a canary in environment, words and configuration is nowhere in run directory, script, logs, manifests",
        "secrets:run",
        1,
    ),
}


def pages(records: Records) -> dict[Path, str]:
    """Returns the text of every page that has results of campaigns."""
    tested = PAGE.with_name("slurm-tested.md")
    text = tested.read_text(encoding="utf-8")
    tables = {
        "versions-VERSION": _versions(records, "versions-"),
        "faults-VERSION": _versions(records, "faults-"),
        "sites-HABIT": _sites(records),
        "sites": _said(records),
    }
    for names, table in tables.items():
        begin = _BEGIN.format(names)
        before, _, rest = text.partition(begin)
        text = before + begin + table + _END + rest.partition(_END)[2]
    return {PAGE: render(records), tested: text}


def _versions(records: Records, prefix: str) -> str:
    """Returns the table of versions of Slurm and what was tried on them, of the campaigns that begin so."""
    found = _of(records, prefix)
    tables = [table for one in found for table in one["result"]["table"].items()]
    return _table(
        ("", *(version for version, _ in tables)),
        *((flow, *(cells.get(flow, "") for _, cells in tables)) for flow in (tables[0][1] if tables else ())),
        ("date, commit", *map(_when, found)),
    )


def _sites(records: Records) -> str:
    """Returns the table of habits of sites, and what became of a run there."""
    rows = [
        (site, *(cells[stage] for stage in sites.STAGES), _when(one))
        for one in _of(records, "sites-")
        for site, cells in one["result"]["table"].items()
    ]
    return _table(("site", *sites.STAGES, "date, commit"), *rows)


def _of(records: Records, prefix: str) -> list[Mapping[str, Any]]:
    return [records[name] for name in CAMPAIGNS if name.startswith(prefix) and name in records]


def _when(record: Mapping[str, Any]) -> str:
    return f"{record['date']}, `{record['revision']}`"


def _said(records: Records) -> str:
    """Returns the table of what the verbs say of each habit: how it begins, the records have all of it."""
    cells = records["sites"]["result"]["table"] if "sites" in records else {}
    rows = [
        (site, *(textwrap.shorten(said[verb], 80, placeholder=" ...").replace("|", "\\|") for verb in sites.VERBS))
        for site, said in cells.items()
    ]
    return _table(("site", *(f"`{verb}`" for verb in sites.VERBS)), *rows)


def _table(head: Sequence[str], *rows: Sequence[str]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def render(records: Records) -> str:
    """Returns the text of docs/reliability.md; of long figures it has the beginning, the records have all."""
    lines = [_HEAD, "| campaign | promise | held | figures | date, seed, time |", "|---|---|---|---|---|"]
    ends = []
    for name, campaign in CAMPAIGNS.items():
        if name.startswith("sites-"):
            continue  # in a table of their own
        what = f"| `{name}`{'' if campaign.needs_cluster else ' (local)'} | {campaign.promise} |"
        if (record := records.get(name)) is None:
            lines.append(f"{what} not run | | |")
            continue
        found = record["result"]
        measured = "; ".join(f"{figure}: {value}" for figure, value in found["figures"].items())
        figures = textwrap.shorten(measured, 150, placeholder=" ...")
        when = f"{record['date']}, seed {record['seed']}, {record['wall_s'] / 60:.1f} min, `{record['revision']}`"
        lines.append(f"{what} {found['held']} of {found['trials']} | {figures} | {when} |")
        if found["problems"]:
            shown = [textwrap.fill(f"- {one}", 120, subsequent_indent="  ") for one in found["problems"]]
            ends.append("\n".join([f"\n## `{name}`: what did not hold\n", *shown]))
    return "\n".join([*lines, *ends]) + "\n"
