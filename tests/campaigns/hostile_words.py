"""Hostile strings in every field: refused with a clear error before anything is written, or they arrive byte for byte.

A trial puts one string into one field and asks four readers. The package itself: the configuration that a job reads
back. bash: what the script exports, enters and runs, with a trap in the string that would leave a file behind.
sbatch's own parser, and `scontrol show job`: for 300 accepted strings, as held jobs that are cancelled. The ranks: what
argv a script gets, for 60 of them. 10,000 trials take about 10 minutes of one core.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slurm_train.config.compose import compose
from slurm_train.config.frozen import dump_config, load_config
from slurm_train.config.schema import RunConfig
from slurm_train.config.words import SLURM_LISTS, read_words
from slurm_train.errors import SlurmTrainError
from slurm_train.plan.plan import RunPlan, plan_run
from slurm_train.slurm.commands import SlurmCommands
from tests.campaigns.record import Tally
from tests.support.plans import make_plan, render_script

_PIECES = (
    *("\n", "\r", "\0", "\t", "\x1b", "\x7f", "\x85", "\u2028", "\u00a0", "\u200b", "\ufeff", "\udc80", " ", "  "),
    *("'", '"', "`", "\\", "\\\\", "$", "${IFS}", "$(touch {trap})", "`touch {trap}`", "; touch {trap};"),
    *("&& touch {trap}", "| touch {trap}", "\ntouch {trap}\n", "'; touch {trap}; '", '"; touch {trap}; "'),
    *("$((touch {trap}))", "<(touch {trap})", "\n#SBATCH --output={trap}\n", "#SBATCH --hold", "--wrap=touch {trap}"),
    *("#", "%j", "%t", "%%", "%", "{attempt}", "{run}", "{", "}", "[", "]", "=", ",", ":", "..", "../../x", "/", "//"),
    *("-", "--", "~", "*", "?", "!", "!!", "&", ">", "<", "|", "${HOME}", "${oc.env:HOME}", "???", "null", "true"),
    *("1e3", "0x10", "\u00e9", "\u65e5\u672c", "\U0001f600", "a", "B7", "x.y", "_", "EOF"),
)
_LONG = "x" * 1100
_TEXT_KEYS = ("partition", "account", "qos", "nodelist", "exclude", "constraint", "network_interface", "python")


class Case(NamedTuple):
    """A string in a field."""

    where: str
    text: str


@dataclass(slots=True)
class Found:
    """What became of the trials so far."""

    refused: int = 0
    exact: int = 0
    problems: list[str] = field(default_factory=list)
    fields: Counter[str] = field(default_factory=Counter)


class Bench(NamedTuple):
    """Where trials are made.

    Args:
        project: folder that is typed in; its own name is made of hostile pieces for some trials.
        trap: the file that must never appear.
    """

    project: Path
    trap: Path


def hostile(rng: random.Random, trap: Path) -> str:
    """Returns a string of a few pieces, each of which some reader takes for more than text."""
    pieces = rng.choices(_PIECES, k=rng.randint(1, 5))
    if rng.random() < 0.01:
        pieces.append(_LONG)
    return "".join(pieces).replace("{trap}", str(trap))


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Tries so many strings and returns what became of them."""
    rng, bench, found = random.Random(seed), _bench(folder), Found()
    accepted: list[tuple[Case, RunPlan]] = []
    fields = list(FIELDS)
    for number in range(trials):
        case = Case(fields[number % len(fields)], hostile(rng, bench.trap))
        plan = _try(case, bench, found, rng)
        if plan is not None:
            accepted.append((case, plan))
        if bench.trap.exists():
            found.problems.append(f"{number}: {case!r} was run by a shell")
            bench.trap.unlink()
        if (number + 1) % 1000 == 0:
            print(f"{number + 1}: {found.refused} refused, {found.exact} exact, {len(found.problems)} bad")
    held, argvs = _ask_slurm(accepted, bench, found), _ask_ranks(accepted, bench, found)
    figures = {
        "refused with a clear error": str(found.refused),
        "byte for byte through configuration, script and bash": str(found.exact),
        "fields": ", ".join(f"{name} {count}" for name, count in sorted(found.fields.items())),
        "shown by scontrol for held jobs": f"{held} values",
        "argv of a process": f"{argvs} lists",
    }
    tally.add("strings", trials=trials)
    tally.spoil(found.problems[:50], trials=len(found.problems))
    return figures


def _bench(folder: Path) -> Bench:
    project = folder / "project"
    project.mkdir()
    (project / "train.py").write_text("import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    return Bench(project, folder / "trap")


def _try(case: Case, bench: Bench, found: Found, rng: random.Random) -> RunPlan | None:
    """Composes, plans and renders with the string, and has bash read the script; None where it was refused."""
    found.fields[case.where.split(" ")[0]] += 1
    before = sorted(bench.project.iterdir())
    try:
        plan, expected = FIELDS[case.where](case.text, bench)
        script = render_script(plan, default_python=sys.executable)
    except SlurmTrainError as err:
        found.refused += 1
        if not err.message or any(char in err.message for char in "\0\x1b"):
            found.problems.append(f"{case!r}: refused without a clear word: {err.message!r}")
    except Exception as err:  # a crash is a finding, not the end
        found.problems.append(f"{case!r}: {type(err).__name__}: {err}")
    else:
        problem = _what_is_wrong(plan, script, expected, bench, deep=rng.random() < 0.2)
        if problem:
            found.problems.append(f"{case!r}: {problem}")
        found.exact += not problem
        return plan if not problem else None
    finally:
        if sorted(bench.project.iterdir()) != before:
            found.problems.append(f"{case!r}: something was written")
    return None


# What must arrive: keyed by reader, e.g. {"env X": "value", "flag comment": "value", "script": [...]}.
Expected = dict[str, Any]
Maker = Callable[[str, Bench], tuple[RunPlan, Expected]]


def _planned(bench: Bench, *words: str, cwd: Path | None = None) -> RunPlan:
    return plan_run(compose(read_words(["+cluster=1x1", *words])), cwd=cwd or bench.project, env={})


def _typed(word: str, reader: str) -> Maker:
    """Puts the string behind a word of the command line; it must arrive at the reader."""
    return lambda text, bench: (_planned(bench, word + text), {reader: text})


def _of_key(key: str) -> Maker:
    def make(text: str, bench: Bench) -> tuple[RunPlan, Expected]:
        if key in SLURM_LISTS and text.startswith("["):
            # Brackets around all of it are a list, as in a file.
            text = f"node{text}"
        plan = _planned(bench, f"cluster.{key}={text}")
        assert plan.config.cluster is not None
        return plan, {f"cluster {key}": (getattr(plan.config.cluster, key), text)}

    return make


def _of_name(section: str, reader: str) -> Maker:
    return lambda text, bench: (_configured(bench, cluster={section: {text: "1"}}), {f"{reader} {text}": "1"})


def _script_typed(text: str, bench: Bench) -> tuple[RunPlan, Expected]:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'") if text.endswith("\\") else text.replace("'", "\\'")
    plan = _planned(bench, f"script=[train.py,'{quoted}']")
    return plan, {"script": plan.config.script}


def _configured(bench: Bench, **sections: Any) -> RunPlan:
    """Plans from a mapping, as a YAML file of the user's would give it."""
    return make_plan(bench.project, **{"cluster": {}, **sections})


FIELDS: dict[str, Maker] = {
    **{f"cluster.{key}": _of_key(key) for key in _TEXT_KEYS},
    "cluster.sbatch value": _typed("cluster.sbatch.comment=", "flag comment"),
    "cluster.sbatch name": _of_name("sbatch", "flag"),
    "cluster.srun value": _typed("cluster.srun.comment=", "srun comment"),
    "cluster.srun name": _of_name("srun", "srun"),
    "cluster.env value": _typed("cluster.env.CANARY=", "env CANARY"),
    "cluster.env name": _of_name("env", "env"),
    "run.name": _typed("run.name=", "name"),
    "run.root": lambda text, bench: (_planned(bench, f"run.root={bench.project.parent}/r/{text}/runs"), {}),
    "script word": lambda text, bench: (
        _configured(bench, script=["train.py", text]),
        {"script": ["train.py", text]},
    ),
    "script typed": _script_typed,
    "override": lambda text, bench: (_planned(bench, text if "=" in text else f"{text}=1"), {}),
    "data value": lambda text, bench: (
        _configured(bench, data={"_target_": "my.Data", "path": text}),
        {"data": text},
    ),
    # The folder itself need not be there to be planned in; names with a NUL or a slash do not exist.
    "folder": lambda text, bench: (
        _planned(bench, cwd=bench.project / (text.replace("/", "").replace("\0", "") or "x")),
        {},
    ),
}


def _what_is_wrong(plan: RunPlan, script: str, expected: Expected, bench: Bench, *, deep: bool) -> str:
    """Returns what did not arrive as it was given, "" if all did."""
    frozen = bench.project.parent / "config.yaml"
    frozen.write_text(dump_config(plan.config), encoding="utf-8")
    config = load_config(frozen)
    if config != plan.config:
        return "the frozen configuration reads back as another one"
    for reader, value in expected.items():
        if problem := _compare(reader, value, config, plan, script):
            return problem
    lines = script.splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    if any(line.startswith("#SBATCH") for line in lines[first:]):
        return "a directive after the first command"
    return _ask_bash(plan, script, expected) if deep else ""


def _compare(reader: str, value: Any, config: RunConfig, plan: RunPlan, script: str) -> str:
    kind, _, name = reader.partition(" ")
    planned, value = value if kind == "cluster" else ("", value)
    if isinstance(value, str) and kind != "data" and _has_meaning(value):
        # Quoted as a whole or a reference, the grammar of the settings itself gives it another meaning.
        return ""
    readers: dict[str, Callable[[], Any]] = {
        "cluster": lambda: planned,
        "name": lambda: plan.run.name,
        "script": lambda: config.script,
        "data": lambda: (config.data or {}).get("path"),
        "flag": lambda: _directives(script).get(name),
        "srun": lambda: value if f"--{name}={value}" in _last_command(script) else _last_command(script),
        "env": lambda: value,  # bash is asked
    }
    found = readers[kind]()
    return "" if found == value else f"{reader} is {found!r}"


def _has_meaning(text: str) -> bool:
    """Says whether a setting's value is more than text to the one who typed it: null, quoted, a reference."""
    return text in ("null", "true", "false", "True", "False") or text[:1] in ("'", '"') or "${" in text or text == "???"


def _directives(script: str) -> dict[str, str]:
    """Reads `#SBATCH` lines as sbatch does: quotes group, a # ends the line (checked against sbatch itself below)."""
    words = [shlex.split(line[8:], comments=True) for line in script.splitlines() if line.startswith("#SBATCH ")]
    pairs = (word.removeprefix("--").partition("=") for line in words for word in line)
    return {name: value for name, _, value in pairs}


def _last_command(script: str) -> list[str]:
    return shlex.split(script[script.rindex("\nexec ") :].replace("\\\n", " "))


def _ask_bash(plan: RunPlan, script: str, expected: Expected) -> str:
    """Has bash run the script, with `cd` and the last command replaced by printing what they are given."""
    show = (
        'show() { printf "%s\\0" "$@"; }; cd() { show "$@"; }; module() { :; }\n'
        'exec() { show "$@"; printf "%s\\0" "${CANARY-}" "${NCCL_SOCKET_IFNAME-}"; builtin exit 0; }\n'
    )
    body = script.partition("set -e\n")
    done = subprocess.run(
        ["bash", "--norc", "-c", show + body[2]], capture_output=True, timeout=20, check=False, env={}
    )
    words = done.stdout.decode(errors="surrogateescape").split("\0")
    if done.returncode or done.stderr:
        return f"bash says {done.stderr.decode(errors='replace')[:200]!r}"
    # Nothing is imported from the run directory before its files were looked at.
    if words[0] != "/":
        return f"bash would enter {words[0]!r}"
    if words[1:-3] != _last_command(script)[1:]:
        return f"bash would run {words[1:-3]!r}"
    if "env CANARY" in expected and not _has_meaning(expected["env CANARY"]) and words[-3] != expected["env CANARY"]:
        return f"bash exports {words[-3]!r}"
    return ""


def _ask_slurm(accepted: list[tuple[Case, RunPlan]], bench: Bench, found: Found) -> int:
    """Submits held jobs with accepted values and reads back what Slurm shows; they are cancelled."""
    commands = SlurmCommands(os.environ)
    if not commands.is_available():
        return 0
    sample = [pair for pair in accepted if pair[0].where.startswith(("cluster.sbatch value", "run."))][:300]
    ids: dict[str, tuple[Case, RunPlan]] = {}
    try:
        for case, plan in sample:
            if (job_id := _submit_held(plan, bench, found, case)) is not None:
                ids[job_id] = (case, plan)
        for job_id, (case, plan) in ids.items():
            if problem := _shown_otherwise(commands.show_job(job_id), plan):
                found.problems.append(f"{case!r}: scontrol shows {problem}")
        if bench.trap.exists():
            found.problems.append("a held job ran a trap")
    finally:
        commands.cancel(ids)
    return len(ids)


def _submit_held(plan: RunPlan, bench: Bench, found: Found, case: Case) -> str | None:
    path = bench.project.parent / "held.sh"
    path.write_text(render_script(plan).replace("#SBATCH --gpus-per-node=1\n", "", 1), encoding="utf-8")
    argv = ["sbatch", "--parsable", "--hold", "--begin=now+1days", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=bench.project)
    if done.returncode:
        found.problems.append(f"{case!r}: sbatch says {done.stderr.strip()[:200]!r}")
        return None
    return done.stdout.strip().partition(";")[0]


def _shown_otherwise(fields: dict[str, str], plan: RunPlan) -> str:
    cluster = plan.config.cluster
    assert cluster is not None
    comment = cluster.sbatch.get("comment")
    wanted = {"JobName": f"{plan.run.name}-{plan.run.run_id}", "StdOut": str(plan.run.logs / "batch.log")}
    wanted |= {} if comment in (None, False) else {"Comment": str(comment)}
    # Slurm adds a blank to some values, so those at the end cannot be told.
    wrong = {
        name: fields.get(name) for name, value in wanted.items() if (fields.get(name) or "").rstrip() != value.rstrip()
    }
    return f"{wrong}, wanted {wanted}" if wrong else ""


def _ask_ranks(accepted: list[tuple[Case, RunPlan]], bench: Bench, found: Found) -> int:
    """Starts accepted scripts as a rank does and compares the argv that they see."""
    plans = [pair for pair in accepted if pair[0].where.startswith("script")][::10][:60]
    for case, plan in plans:
        if (argv := _argv_seen(plan, bench)) != (plan.config.script or [])[1:]:
            found.problems.append(f"{case!r}: the process gets {argv!r}")
    return len(plans)


def _argv_seen(plan: RunPlan, bench: Bench) -> object:
    code = """
import os, sys
from pathlib import Path
from slurm_train.config.frozen import load_config
from slurm_train.distributed.place import RankPlace
from slurm_train.rundir.paths import RunDirectory
from slurm_train.session.signals import StopFlag
from slurm_train.worker.script import run_script
config = load_config(Path(sys.argv[1]))
env = {**os.environ, "MASTER_ADDR": "a", "MASTER_PORT": "1"}
run = RunDirectory(Path.cwd())
run_script(config, place=RankPlace.from_env({}), env=env, code_dir=Path.cwd(), run=run, attempt=0, stop=StopFlag())
"""
    frozen = bench.project.parent / "frozen.yaml"
    frozen.write_text(dump_config(plan.config), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(frozen)],
        capture_output=True,
        check=False,
        cwd=bench.project,
        env=env,
        timeout=60,
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        return done.stderr.decode(errors="replace")[-300:]
