"""`doctor`: what this site does to a run; `doctor +cluster=NxG`: are the nodes of such a job fit to train on?

The first asks Slurm's commands and submits nothing. The second submits a job that checks nodes and network as every
run does before it trains, measures them as well, and ends; inside an salloc it runs there. Exit code 1 where something
is wrong that would keep a run from working.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from slurm_train.cli.terminal import note, working_folder
from slurm_train.errors import EXIT_DONE, EXIT_FAILURE, ClusterError, ConfigError, RunError
from slurm_train.formatting import count
from slurm_train.mounts import Mount, mount_of
from slurm_train.rundir.events import errors_of, findings_of, read_preflight
from slurm_train.rundir.paths import RunDirectory, existing_attempts
from slurm_train.rundir.removal import remove_tree
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.site import SiteFacts, site_of
from slurm_train.tools.doctor.site_rules import (
    SiteView,
    find_site_facts,
    in_words,
    site_table,
)
from slurm_train.verbs import parse

_RUNTIMES = ("apptainer", "singularity", "enroot", "podman", "docker", "shifter", "sarus")
_DEFAULT_SETTINGS = ("preflight.bandwidth=true",)
"""In front of what is typed, which may change them."""
_FIXED_SETTINGS = ("preflight.enabled=true", "preflight.only=true", "requeue.enabled=false")
_ASK_EVERY_S = 1.0


def main(words: Sequence[str]) -> int:
    """Prints the findings and returns 0, or 1 if one of them is an error."""
    arguments = parse("doctor", words)
    if arguments.settings:
        return _check_nodes(arguments.settings, dict(os.environ), as_json=arguments.json)
    return _check_site(as_json=arguments.json)


def _check_site(*, as_json: bool) -> int:
    """Prints what this site does to a run; returns 1 where something would keep a run from working."""
    view = _view_site(SlurmCommands(os.environ, timeout_s=20.0))
    findings = find_site_facts(replace(view, mount=_mount_here(), lacks=_lacking_here()))
    table: dict[str, str] = {}
    sentences: list[str] = []
    if view.settings:
        table = site_table(view)
        sentences = in_words(view)
    if as_json:
        document: dict[str, object] = {"site": table, "in_words": sentences} if table else {}
        print(json.dumps({**document, "findings": [finding.as_json() for finding in findings]}, indent=2))
    else:
        for name, value in table.items():
            print(f"  {name:<14} {value}")
        width = min(shutil.get_terminal_size((100, 24)).columns, 110)
        for sentence in sentences:
            print(textwrap.fill(sentence, width, initial_indent="  ", subsequent_indent="  "))
        for finding in findings:
            print(f"{finding.level}: {finding.line}")
        sys.stdout.flush()
        note("the nodes themselves: python -m slurm_train doctor +cluster=NxG")
    return EXIT_FAILURE if any(finding.level == "error" for finding in findings) else EXIT_DONE


def _view_site(commands: SlurmCommands) -> SiteView:
    """Returns what Slurm says about the site, or that there is no Slurm, or none that answers."""
    if not commands.is_available():
        return SiteView(has_slurm=False)
    try:
        facts = site_of(commands).facts()
        return SiteView(
            facts=facts,
            runtimes=[name for name in _RUNTIMES if shutil.which(name)],
            nodes=commands.node_names(),
            federation=commands.federation(),
            filtered=_refusal_of_filter(facts, commands),
        )
    except ClusterError as err:
        return SiteView(away=err.message)


def _refusal_of_filter(facts: SiteFacts, commands: SlurmCommands) -> str:
    """Returns the message with which a submit filter refuses a plain job; "" where it does not or there is none."""
    from slurm_train.request.acceptance import slurm_verdict
    from slurm_train.slurm.job_request import directives

    if facts.settings.get("JobSubmitPlugins", "(null)") == "(null)":
        return ""
    verdict = slurm_verdict(f"#!/bin/sh\n{directives([{'requeue': True}])}\ntrue\n", commands)
    if verdict.is_accepted:
        return ""
    return "; ".join(line.strip() for line in verdict.message.splitlines() if line.strip())


def _mount_here() -> Mount | None:
    # Runs lie below the folder that they are submitted from, unless run.root names another.
    with contextlib.suppress(OSError):
        mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        return mount_of(Path.cwd().resolve(), mountinfo)
    return None


def _lacking_here() -> str:
    """Returns which call the file system of this folder lacks that a run needs; "" where it may not be written to."""
    from slurm_train.rundir.trial import require_calls

    with contextlib.suppress(OSError):
        folder = Path.cwd()
        if os.access(folder, os.W_OK | os.X_OK):
            try:
                require_calls(folder, symlinks=True)
            except RunError as err:
                return err.message
    return ""


def _check_nodes(settings: Sequence[str], env: Mapping[str, str], *, as_json: bool) -> int:
    """Runs a job that does what every run does before it trains, prints what it found, and returns the exit code.

    It works in a folder of its own, `<root>/.doctor/<random name>`: whatever `run.name` is, no folder of a run is
    touched, and no verb lists it. The folder is removed where no error was found; else it stays, with its logs.

    Raises:
        ClusterError: no Slurm here, or it refuses the job.
        ConfigError: the settings ask for no cluster.
    """
    from slurm_train.code.snapshot import read_source
    from slurm_train.config.compose import compose
    from slurm_train.config.words import Words
    from slurm_train.plan.plan import plan_run
    from slurm_train.start.start import Starter

    cwd = working_folder(env)
    plan = plan_run(compose(Words(overrides=[*_DEFAULT_SETTINGS, *settings, *_FIXED_SETTINGS])), cwd=cwd, env=env)
    run = plan.run
    if not plan.config.uses_cluster:
        raise ConfigError(
            f"doctor {' '.join(settings)} asks for no nodes",
            hint="`doctor +cluster=NxG` checks nodes; `doctor` alone checks the site",
        )
    if plan.config.slurm.launcher == "torchrun":
        raise ConfigError(
            f"doctor {' '.join(settings)} starts its ranks by torchrun, and there is no preflight under torchrun",
            hint="add cluster.launcher=srun, and give one number of nodes: they are the same nodes",
        )
    start = Starter(words=["doctor", *settings], env=env, say=note)
    commands = start.commands
    # Nodes that earlier runs found bad are not left out: this job is to check them as well.
    source = read_source(run, plan.config, cwd, env=env)
    with start.fresh(plan, source, leaves_out_bad_nodes=False) as batch:
        batch.write_provenance()
        is_here = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env
        job_id = "" if is_here else next(batch.submit())
    if is_here:
        note(f"checking the nodes of this allocation, job {env['SLURM_JOB_ID']}")
        subprocess.run(["bash", str(run.submit_script)], env=dict(env), stdout=sys.stderr, check=False)
    else:
        note(f"submitted job {job_id}; logs in {run.logs}; Ctrl-C cancels it")
        try:
            _wait(job_id, commands)
        except KeyboardInterrupt:
            commands.cancel([job_id])
            raise
    code = _print_record(run, as_json=as_json)
    if code == EXIT_DONE:
        # This command made the folder, under a random name.
        with contextlib.suppress(OSError):
            remove_tree(run.path)
            run.path.parent.rmdir()
    return code


def _wait(job_id: str, commands: SlurmCommands) -> None:
    """Waits for the end of a job; prints its state, or that Slurm does not answer, whenever that changes."""
    printed = ""
    while True:
        try:
            state = commands.job_states([job_id]).get(job_id)
            if state is None or not state.is_active:
                return
            text = f"job {job_id} is " + f"{state.phase.value} {state.reason or state.nodelist}".strip()
        except ClusterError as err:
            text = f"Slurm does not answer and is asked again: {err.message}"
        if text != printed:
            printed = text
            note(text)
        time.sleep(_ASK_EVERY_S)


def _print_record(run: RunDirectory, *, as_json: bool) -> int:
    attempts = existing_attempts(run)
    record = read_preflight(run, attempts[-1]) if attempts else {}
    if not record:
        log = run.logs / "batch.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        raise RunError(
            f"the job ended without a report on its nodes: {lines[-1] if lines else 'its log is empty'}",
            hint=f"look at {run.logs}",
        )
    findings = findings_of(record)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        for line in record.get("table", []):
            print(line)
        for finding in findings:
            print(f"{finding.level}: {finding.line}")
        note(f"{count(len(findings), 'finding')} in {record.get('seconds', 0):g} s")
    return EXIT_FAILURE if errors_of(findings) else EXIT_DONE
