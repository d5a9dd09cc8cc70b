"""`init [NAME]`: asks Slurm what this cluster is like and writes a site file, to be chosen by `site=NAME`.

Reads sinfo, scontrol and sacctmgr, tries the result with `sbatch --test-only`, and asks only what Slurm cannot say.
Nothing is submitted, and an existing file is not replaced without --force.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm_train.cli.terminal import note
from slurm_train.config.site_profile import user_config_dir
from slurm_train.config.site_schema import GROUP, SiteFile
from slurm_train.errors import ClusterError, ConfigError
from slurm_train.request.acceptance import require_slurm
from slurm_train.rundir.files import write_atomic
from slurm_train.slurm.commands import SlurmCommands
from slurm_train.slurm.refusals import TestVerdict
from slurm_train.slurm.site import SiteFacts, site_of
from slurm_train.tools.site import Question, build_profile, open_questions, render_site, try_site
from slurm_train.verbs import parse


def main(words: Sequence[str]) -> int:
    """Writes the site file and returns 0."""
    arguments = parse("init", words)
    has_terminal = sys.stdin.isatty()
    asks = not arguments.yes and (has_terminal or not arguments.print)
    if asks and not has_terminal:
        raise ConfigError(
            "init asks questions, and there is no terminal to answer at", hint="add --yes to take the defaults"
        )
    commands = SlurmCommands(os.environ)
    require_slurm(commands, os.environ)
    facts = site_of(commands).facts()
    for problem in facts.problems:
        note(f"Slurm does not say: {problem}")
    name = _name_of(arguments.name, facts)
    answers = _ask_all(facts) if asks else {}
    site, problems = _try(build_profile(facts, answers), facts, commands)
    text = render_site(site, name=name, problems=[*facts.problems, *problems])
    if arguments.print:
        print(text, end="")
        return 0
    folder = Path(arguments.config_dir) if arguments.config_dir else user_config_dir()
    return _write(folder / GROUP / f"{name}.yaml", text, force=arguments.force, name=name)


def _name_of(given: str | None, facts: SiteFacts) -> str:
    name = given or re.sub(r"[^A-Za-z0-9_.-]", "-", facts.settings.get("ClusterName", "")) or "site"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ConfigError(f"{name!r} cannot be the name of a site", hint="use letters, digits, '.', '_' and '-'")
    return name


def _ask_all(facts: SiteFacts) -> dict[str, str]:
    answers: dict[str, str] = {}
    while True:
        # An answer may open more questions.
        unanswered = [question for question in open_questions(facts, answers) if question.key not in answers]
        if not unanswered:
            return answers
        answers[unanswered[0].key] = _ask(unanswered[0])


def _ask(question: Question) -> str:
    choices = f" ({', '.join(question.choices)})" if question.choices else ""
    prompt = f"{question.text}{choices} [{question.default}] "
    while True:
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise ConfigError("the answers ended early", hint="answer every question, or add --yes")
        try:
            return question.check(line)
        except ConfigError as err:
            note(f"  {err.message}; {err.hint}")


def _try(site: SiteFile, facts: SiteFacts, commands: SlurmCommands) -> tuple[SiteFile, list[str]]:
    """Returns the site file as Slurm accepts it, and what it does not accept; prints the latter."""
    from slurm_train.request.acceptance import slurm_verdict

    def ask(script: str) -> TestVerdict:
        return slurm_verdict(script, commands)

    try:
        site, problems = try_site(site, {partition.name: partition for partition in facts.partitions}, ask)
    except ClusterError as err:
        problems = [f"what Slurm would take: {err.message}"]
    for problem in problems:
        note(problem)
    return site, problems


def _write(path: Path, text: str, *, force: bool, name: str) -> int:
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    if before == text:
        note(f"{path} is up to date")
    elif before is None or force:
        if before is not None:
            note(_difference(before, text))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    else:
        note(_difference(before, text))
        raise ConfigError(f"{path} exists with other content, see above", hint="--force replaces it")
    note(f"next:\n  python -m slurm_train plan +cluster=1x1 site={name}")
    print(path)
    return 0


def _difference(before: str, text: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), text.splitlines(), "is", "would be", lineterm="")
    return "\n".join(lines)
