"""`doctor`: what this site does to a run; `doctor +cluster=NxG`: are the nodes of such a job fit to train on?

The first asks Slurm's commands and submits nothing. The second submits a job that looks at nodes and network as every
run does before it trains, measures them as well, and ends; inside an salloc it runs there. Exit code 1 where something
is wrong that would keep a run from working.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from slurm_train.cli.arguments import login_name
from slurm_train.cli.display import note
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ClusterError
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.site import default_account, default_qos, gather_facts
from slurm_train.tools.doctor.finding import Finding, errors_in
from slurm_train.tools.doctor.site import SiteView, examine
from slurm_train.tools.doctor.site_words import in_words, site_table

_EXAMPLES = """\
examples:
  python -m slurm_train doctor                       what happens to a run here on preemption, what can be lost
  python -m slurm_train doctor --json
  python -m slurm_train doctor +cluster=4x8          a job that looks at 4 nodes and their network, and ends
  python -m slurm_train doctor +cluster=4x8 cluster.partition=gpu cluster.network_interface=ib0
"""
_RUNTIMES = ("apptainer", "singularity", "enroot", "podman", "docker", "shifter", "sarus")


def main(words: Sequence[str]) -> int:
    """Prints what was found and returns 0, or 1 where there is an error among it."""
    arguments = _parser().parse_args(list(words))
    if arguments.settings:
        from slurm_train.cli.doctor_job import look_at_nodes

        return look_at_nodes(arguments.settings, dict(os.environ), as_json=arguments.json)
    view = look_at_site(os.environ)
    findings = examine(view)
    if arguments.json:
        facts = {"site": dict(site_table(view)), "in_words": in_words(view)} if view.settings else {}
        print(json.dumps({**facts, "findings": [finding.as_json() for finding in findings]}, indent=2))
    else:
        _print_site(view)
        print_findings(findings)
        note("the nodes themselves: python -m slurm_train doctor +cluster=NxG")
    return EXIT_FAILURE if errors_in(findings) else EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m slurm_train doctor",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="+cluster=NxG and other settings of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def look_at_site(env: Mapping[str, str]) -> SiteView:
    """Returns what Slurm's commands say on this machine."""
    commands = SlurmCommands(env, timeout_s=20.0)
    if not commands.is_available():
        return SiteView(has_slurm=False)
    try:
        facts = gather_facts(commands, user=login_name())
    except ClusterError as err:
        return SiteView(away=err.message)
    path = env.get("PATH")
    return SiteView(
        facts=facts,
        qos=default_qos(facts.associations, default_account(facts.associations)),
        runtimes=[name for name in _RUNTIMES if shutil.which(name, path=path)],
    )


def _print_site(view: SiteView) -> None:
    if not view.settings:
        return
    for name, value in site_table(view):
        print(f"  {name:<14} {value}")
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    for sentence in in_words(view):
        print(textwrap.fill(sentence, width, initial_indent="  ", subsequent_indent="  "))


def print_findings(findings: Iterable[Finding]) -> None:
    """Prints one line for each finding, errors first."""
    for finding in findings:
        print(f"{finding.level}: {finding.line}")
    sys.stdout.flush()
