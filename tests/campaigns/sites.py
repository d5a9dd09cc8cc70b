"""What people type, at sites with other habits: each with a cluster of its own in a root of its own, one run each.

`live` has a run submitted, preempted, cancelled and resumed, with the site file that `init` has written there;
`listen` asks what `init`, `doctor` and `plan` say of the site. Both build and remove the clusters; the words are typed
inside, by this module as a program.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally, first_line
from tests.campaigns.versions import FAILURES, lines_of, own_cluster, say
from tests.support.command_line import TINY, Done, Person
from tests.support.ledgers import ledger_lines
from tests.support.slurm_runs import (
    all_logs,
    at_work,
    command,
    job_state,
    losses,
    wait_until_ended,
    wait_until_finished,
    wait_until_step,
)
from tests.support.waiting import wait_for

PATIENCE_S = 240.0
STAGES = ("submit", "preempt", "cancel", "resume")
VERBS = ("init", "doctor", "plan", "doctor +cluster=2x1")
_SUITE = "bookworm"
_STEPS = 100
_WORDS = (*TINY, "train.threads=1", f"train.max_steps={_STEPS}", "checkpoint.every_steps=20", "model.step_s=0.3")


class Site(NamedTuple):
    """A cluster, and how people work there."""

    habits: str = ""
    """For `tests.support.devcluster up --site`."""
    shell: str = ""
    """The shell that everything is typed in: "srun --pty", or "salloc" where that makes a shell on a node."""
    refusal: str = ""
    """Words of the error with which a submission is refused, as it should be; "" where it is not."""
    words: tuple[str, ...] = ()
    """What people add to their words there."""
    urgent: tuple[str, ...] = ()
    """What the job that preempts has to ask for there."""

    @property
    def name(self) -> str:
        """What its campaign is called by, e.g. "typed-gpus"."""
        return self.habits or "srun-pty"

    @property
    def label(self) -> str:
        """How the tables call it."""
        words = (self.habits, self.shell, *self.words)
        return " ".join(f"`{one}`" for one in words if one)


SITES = (
    Site("no-accounting"),
    Site("no-accounting,partition-requeue"),
    Site("slurmdbd-away"),
    Site("slurmdbd-hidden"),
    Site("min-job-age"),
    Site("federation", refusal="one of the federation fed"),
    Site("slurm-user"),
    Site("partition-requeue"),
    Site("partition-cancel"),
    Site("partition-suspend"),
    Site("no-requeue"),
    Site("requeue-refused"),
    Site("typed-gpus", urgent=("--gres=gpu:a100:1",)),
    Site("gpu-3090"),
    Site(
        "gpus-per-task",
        urgent=("--gpus-per-task=1",),
    ),
    Site("no-gres"),
    Site("no-scontrol"),
    Site("affinity"),
    Site("cgroup"),
    Site(shell="srun --pty"),
    Site("interactive-step", shell="salloc"),
    Site("other-names"),
    Site("no-dns"),
    Site("fqdn"),
    Site("ipv6"),
    Site("loopback-name"),
    Site("many-nodes,partition-requeue"),
)
_BROKEN = "broken: "


def live(name: str, tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Types the life of one run at a site; nothing is drawn from the seed, and there is one trial."""
    site = next(one for one in SITES if one.name == name)
    cells = dict.fromkeys(STAGES, f"{_BROKEN}not reached")
    for fact in _typed_at(site, "life", folder):
        cells |= {fact["stage"]: fact["cell"]} if "stage" in fact else {}
        cells |= {STAGES[0]: f"{_BROKEN}{fact['problem']}"} if "problem" in fact else {}
    tally.add(site.name, [f"{stage}: {cell}" for stage, cell in cells.items() if cell.startswith(_BROKEN)])
    tally.table[site.label] = cells
    print(f"   {cells}")
    return {}


def listen(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Types `init`, `doctor` and `plan` at the first so many sites, and keeps what they say there and not elsewhere."""
    usual = _said_at(Site(), folder)
    for site in SITES[:trials]:
        # What is said does not depend on the shell.
        said = _said_at(site, folder) if site.habits else usual
        cells = {verb: [line for line in said[verb] if line not in usual[verb]] for verb in VERBS}
        is_silent = not any(cells.values()) and bool(site.habits)
        tally.add(site.name, ["nothing is said of it"] if is_silent else [])
        tally.table[site.label] = {verb: "; ".join(lines) or "-" for verb, lines in cells.items()}
        print(f"   {cells}")
    return {}


def _said_at(site: Site, folder: Path) -> dict[str, list[str]]:
    said = {verb: list[str]() for verb in VERBS}
    for fact in _typed_at(site, "said", folder):
        said |= fact.get("said", {})
        said |= {VERBS[0]: [f"{_BROKEN}{fact['problem']}"]} if "problem" in fact else {}
    return said


def _typed_at(site: Site, what: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields what `type_here` prints in a cluster of such a site, or the "problem" that there is none."""
    slurm, habits = f"{_SUITE}/{what}", ("--site", site.habits) if site.habits else ()
    try:
        with own_cluster(slurm, "--nodes", "2", "--gpus", "2", *habits):
            words = ("tests.campaigns.sites", what, json.dumps(site))
            yield from lines_of(slurm, *words, log=folder / f"errors-{site.name}")
    except AssertionError as err:
        yield {"problem": str(err)}


# Inside


@dataclass(frozen=True, slots=True)
class _InAShell(Person):
    """Somebody who types in a shell on a node, which has a terminal."""

    shell: str = ""

    def runs(self, *argv: str, timeout_s: float = 120.0, env: dict[str, str] | None = None) -> Done:
        """Opens the shell for one command."""
        files = [self.folder / name for name in ("out", "err", "code")]
        line = "{} >{} 2>{}; echo $? >{}".format(shlex.join(argv), *files)
        script = self.folder / "line.sh"
        script.write_text(f"#!/bin/bash\n{line}\n")
        script.chmod(0o700)
        # The shell of an interactive step is $SHELL.
        is_srun = self.shell == "srun --pty"
        typed = f"srun --pty {script}" if is_srun else f"SHELL={script} salloc --quiet --nodes=1"
        subprocess.run(
            ["script", "--quiet", "--command", typed, "/dev/null"],
            input="",
            cwd=self.folder,
            env=self.environment() | (env or {}),
            stdout=subprocess.DEVNULL,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        out, err, code = (path.read_text() for path in files)
        for path in files:
            path.unlink()
        return Done(int(code), out, err)


def type_here(what: str, site: Site) -> None:
    """Types at the cluster of this machine; prints a line of JSON with what was said, or one per stage of a life."""
    with at_work(Path(tempfile.mkdtemp())) as plain:
        person = _InAShell(plain.folder, shell=site.shell) if site.shell else plain
        if what == "said":
            say(said=_said(plain))
            return
        # Writes the site file.
        person.types("init", "here", "--yes", "--force")
        life = _life(person, site)
        for stage in STAGES:
            try:
                say(stage=stage, cell=next(life, "-"))
            except FAILURES as err:
                print(f"{stage}: {err}", file=sys.stderr, flush=True)
                for path in plain.folder.glob("runs/*/*"):
                    print(all_logs(RunDirectory(path)), file=sys.stderr, flush=True)
                say(stage=stage, cell=f"{_BROKEN}{first_line(err)[:300]}")
                return


def _said(person: Person) -> dict[str, list[str]]:
    """Returns the lines of what each verb says, the site file that `init` writes among them."""
    done = person.types("init", "here", "--yes", "--force")
    file = Path.home() / ".config/slurm_train/site/here.yaml"
    texts = {"init": done.err + (file.read_text() if file.exists() else "")}
    found = json.loads(person.types("doctor", "--json").out)
    rows = [f"{name}: {value}" for name, value in found.get("site", {}).items()]
    findings = [_in_a_line(one) for one in found["findings"]]
    texts["doctor"] = "\n".join([*rows, *found.get("in_words", ()), *findings])
    chosen = ("site=here",) if file.exists() else ()
    texts["plan"] = person.types("plan", "+cluster=2x1", *chosen, *_WORDS).err
    looked = person.types("doctor", "--json", "+cluster=2x1", *chosen, *_WORDS, timeout_s=PATIENCE_S)
    # How fast this machine is now says nothing of the site.
    on_nodes = json.loads(looked.out)["findings"] if looked.out else []
    found_there = [_in_a_line(one) for one in on_nodes if not one["code"].startswith("SLOW_")]
    refused = [line for line in looked.err.splitlines() if line.startswith(("error: ", "hint: "))]
    texts[VERBS[-1]] = "\n".join([*found_there, *refused])
    # The estimated start, paths and numbers of jobs differ each time.
    changing = re.compile(r"\d{4}-\d\d-\d\dT[\d:]+|/tmp/\S+|job \d+")
    return {
        verb: [changing.sub("...", " ".join(line.split())) for line in text.splitlines() if line.strip()]
        for verb, text in texts.items()
    }


def _in_a_line(finding: Mapping[str, str]) -> str:
    return f"{finding['level']}: {finding['code']} {finding['node']}: {finding['seen']}".replace(" :", ":")


def _life(person: Person, site: Site) -> Iterator[str]:
    """Yields in words how each stage went."""
    # Where a submission is refused, `init` has been.
    chosen = () if site.refusal else ("site=here",)
    done = person.types("+cluster=2x1", *chosen, *_WORDS, "run.name=life", *site.words)
    if site.refusal:
        assert done.code == 2 and site.refusal in done.err, f"exit code {done.code}: {done.out}{done.err}"
        said = [line for line in done.err.splitlines() if line.startswith(("error: ", "hint: "))]
        yield "refused: " + "; ".join(line.partition(": ")[2] for line in said)
        return
    job, one = done.job_and_run
    wait_until_step(one, 4, within_s=PATIENCE_S)
    yield "trains"
    yield _preempt(person, one, job, site)
    done = person.types("cancel", one.name)
    assert done.code == 0, done.out + done.err
    entry = wait_until_ended(one)[-1]
    wait_for(lambda: job_state(str(entry["job_id"])) in ("CANCELLED", ""), within_s=60, what="the end of the job")
    assert "cancelled" in person.types("status", one.name).out, person.types("status", one.name).out
    yield f"{entry['reason']}, saved at step {entry['last_committed']} of {entry['last_step']}"
    assert person.types("resume", one.name).job_and_run[1].path == one.path
    wait_until_finished(one, within_s=PATIENCE_S)
    assert sorted(losses(one)) == list(range(1, _STEPS + 1)), "steps are missing"
    yield f"goes on from step {ledger_lines(one)[-1]['first_step']} to the end"


def _preempt(person: Person, one: RunDirectory, job: str, site: Site) -> str:
    by = command("scontrol", "show", "config").partition("PreemptType")[2].split()[1]
    if by in ("preempt/none", "(null)"):
        return "nobody preempts"
    how = "--qos=urgent" if by == "preempt/qos" else "--partition=urgent"
    # All CPUs: where jobs are suspended, partitions are shared by force, and --exclusive says nothing.
    size = ("--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={command('sinfo', '-h', '-o', '%c').split()[0]}")
    words = (how, *size, *site.urgent, "--job-name=urgent", "--output=/dev/null", "--wrap=sleep 5")
    urgent, seen = command("sbatch", "--parsable", *words), set[str]()

    def has_run() -> bool:
        seen.add(job_state(job))
        return job_state(urgent) in ("COMPLETED", "")

    wait_for(has_run, within_s=PATIENCE_S, what="the end of the job that preempts")
    stopped_at, is_over = max(losses(one)), ledger_lines(one)[0].get("action") == "stop"
    if is_over:
        assert person.types("resume", one.name).job_and_run[1].path == one.path
    wait_until_step(one, stopped_at + 4, within_s=PATIENCE_S)
    first, *later = ledger_lines(one)
    if not later:
        assert "SUSPENDED" in seen, f"no new attempt, and the job was {', '.join(sorted(seen))}"
        return "suspended; goes on in the same attempt"
    again = first["last_step"] - later[0]["first_committed"]
    same = "the same job" if str(first["job_id"]) == str(later[0]["job_id"]) else "another job"
    steps = "no step done again" if not again else f"{again} steps done again"
    same = f"waits for `resume`, then {same}" if is_over else same
    return f"{first['reason']}; {same} goes on, {steps}" + (f"; {len(later)} attempts" if len(later) > 1 else "")


if __name__ == "__main__":
    type_here(sys.argv[1], Site(*json.loads(sys.argv[2])))
