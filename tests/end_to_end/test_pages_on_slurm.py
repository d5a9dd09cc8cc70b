"""What the pages say to type works: commands are taken from their page and typed, in the page's order, on a real Slurm.

Typed is what plans and submits, and what needs no run. Jobs are accepted and wait, since a reservation keeps all nodes:
that jobs train, stop and come back is seen by the files beside this one. A new command of a page is typed by itself,
unless `NOT_TYPED` says why it is not.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_train.tools.devcluster.plan import ClusterPlan
from tests.support.command_line import REPOSITORY, Done, Person, new_project, write
from tests.support.page_commands import PageCommand, commands_of
from tests.support.slurm_runs import cancel_all, command

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(900)]

OURS = "python -m slurm_train "
ALL = {path: [*commands_of(path)] for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))}

# Patterns of what is not typed here, and why.
NOT_TYPED = {
    rf"{OURS}init (?!.*--yes)": "asks at a terminal: tests/cli/test_init.py",
    rf"{OURS}--on ": "needs a host that ssh reaches: test_on_a_host.py has one",
    r"apt-get |pip |make ": "changes the machine",
    r"python -m (tests\.|pytest tests/gpu)": "needs a GPU, or an hour",
    rf"{OURS}.*(cluster.spare_nodes|\+cluster=512x8)": "needs more than four nodes: test_lost_nodes_on_slurm.py",
    rf"{OURS}.* cluster.partition=train ": "names a partition of another site",
    r"torchrun |cd /shared/": "needs two machines: tests/worker/test_torchrun.py has two on one",
    r"python run_with_submitit": "is a program of others",
    r"ip netns|tc qdisc|srun |scontrol |salloc ": "is Slurm's or the system's",
    rf"{OURS}devcluster ": "builds what is there: tests/tools/devcluster",
    rf"{OURS}(doctor|generate) .*\+cluster|.*launch=interactive": "waits for its job: the verb's own tests",
    rf"{OURS}(scaling|rehearse) ": "runs for minutes: tests/tools",
    rf"{OURS}(status|logs|cancel|resume|report|evaluate|collate|diff|track|checkpoint) ": "needs a run: tests/cli",
    rf"{OURS}(status|logs|report)$": "needs a run: tests/cli",
    r"touch runs/": "needs a run: test_returns_on_slurm.py",
    rf"{OURS}.*after=": "needs a run: tests/cli",
    rf"(cd examples; )?{OURS}(?!(plan|write|prepare|completion|doctor)( |$))(?!.*(\+cluster|--cfg))": "trains here",
    rf"{OURS}.*model.path=(org/name|DIR|llama|my-llama)": "needs a model: test_pretrained_here.py, test_hub_here.py",
}

_SITE = "home/.config/slurm_train/site/mycluster.yaml"
_MY_PACKAGE = """
from tiny import Numbers as MyData, Tiny as MyModel

def main(context):
    print("rank", context.place.rank)
"""


def is_typed(one: PageCommand) -> bool:
    """Returns whether a command is typed here."""
    return not any(re.match(pattern, one.line) for pattern in NOT_TYPED)


@pytest.fixture(scope="module")
def nodes_kept(slurm_cluster: ClusterPlan) -> Iterator[None]:
    """Lets jobs wait: all nodes are reserved for somebody else."""
    reserved = "starttime=now duration=180 nodes=ALL users=nobody flags=maint"
    created = command("scontrol", "create", "reservation", *reserved.split())
    try:
        yield
    finally:
        command("scontrol", "delete", f"reservation={created.rpartition(' ')[2]}")


def reader_in(folder: Path) -> Person:
    """Returns somebody who has the files that the pages speak of."""
    person = Person(new_project(folder / "project"))
    shutil.copytree(REPOSITORY / "examples", person.folder, dirs_exist_ok=True)
    programs = dict.fromkeys(("train.py", "main.py", "main_dino.py"), "print(1)\n")
    files = {
        "my_package.py": _MY_PACKAGE,
        "config/base.py": "",
        "my_conf/README": "",
        "books/a.txt": "All happy families are alike. " * 400,
        "home/.notify_url": "http://127.0.0.1:9",
        "../mylib/mylib.py": "",
        **programs,
    }
    write(person.folder, files)
    (person.folder / "home/.notify_url").chmod(0o600)
    return person


def problems_with(one: PageCommand, done: Done, folder: Path) -> list[str]:
    """Returns what a command did otherwise than its page says."""
    printed = f"{done.out}\n{done.err}"
    if done.code != 0:
        return [f"exit code {done.code}: {one.line}\n{printed}"]
    is_submission = re.match(rf"{OURS}(-m )?\+cluster=", one.line) is not None
    if is_submission and not re.search(r"^\d+ /.+/runs/", done.out, re.MULTILINE):
        return [f"no job and folder: {one.line}\n{printed}"]
    said = [facts(line, folder) for line in printed.splitlines()]
    shown = [facts(line.removesuffix("..."), folder) for line in one.shown]
    return [
        f"does not print {fact!r}: {one.line}\n{printed}"
        for fact in shown
        if not any(line.startswith(fact) for line in said)
    ]


def facts(line: str, folder: Path) -> str:
    """Returns a printed line without what differs each time: words that hold a digit, places, and columns."""
    placed = line.replace(str(folder), "~/project")
    return " ".join(re.sub(r"[\w./:,~-]*\d[\w./:,-]*", "#", placed).split())


@pytest.mark.parametrize(
    "page", [page for page, commands in ALL.items() if any(map(is_typed, commands))], ids=lambda page: page.name
)
def test_the_commands_of_a_page_do_what_the_page_says(page: Path, nodes_kept: None, tmp_path: Path) -> None:
    person = reader_in(tmp_path)
    env = {
        "HOME": str(person.folder / "home"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "WANDB_API_KEY": "0" * 40,
    }
    problems = list[str]()
    for one in filter(is_typed, ALL[page]):
        if "site=mycluster" in one.line:
            assert person.types("init", "mycluster", "--yes", env=env).code == 0
        done = person.runs("bash", "-c", one.line.replace("/shared", str(tmp_path)), env=env)
        problems += problems_with(one, done, person.folder)
        # The only site file would be used by each command, and many are other ways to train the same run.
        (person.folder / _SITE).unlink(missing_ok=True)
        cancel_all(person)
        shutil.rmtree(person.folder / "runs", ignore_errors=True)
    assert problems == []


def test_no_reason_is_given_for_what_no_page_says() -> None:
    lines = [one.line for commands in ALL.values() for one in commands]
    assert [pattern for pattern in NOT_TYPED if not any(re.match(pattern, line) for line in lines)] == []
