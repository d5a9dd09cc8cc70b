"""Canaries wherever secrets are at home, real runs on the cluster, and a search of everything they leave.

The environment, a `.env` file, the URL of a git remote, a changed line of code, an error message with a URL: one run
fails with tracebacks, another gets its secret by name. Every file of the run directories, and all that Slurm shows of
the jobs, is searched. Then secrets are typed where they do not belong: each word must be refused, unsaid and unwritten.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from slurm_train.rundir.paths import RunDirectory
from slurm_train.tools.devcluster.plan import DEFAULT_STATE_DIR
from tests.campaigns.record import Tally
from tests.support.command_line import TINY, Person, new_project
from tests.support.slurm_runs import PATIENCE_S, command, wait_for_state, wait_until_ended

CANARY = "canary7f3a91c2"
"""In every secret that is planted; found anywhere else, it has leaked."""
_IN_SHELL = {
    "WANDB_API_KEY": f"{CANARY}wandb",
    "HF_TOKEN": f"hf_{CANARY}{'x' * 20}",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}aws",
    "MLFLOW_TRACKING_URI": f"https://ada:{CANARY}@tracking.example.org",
    "HARMLESS_NAME": f"{CANARY}harmless",
    "NETRC": f"/home/ada/{CANARY}/.netrc",
    "PIP_INDEX_URL": f"https://ada:{CANARY}@packages.example.org/simple",
}
_FAILING = f"""
import os, hashlib
from tiny import Numbers, Tiny

class Failing(Tiny):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 6 and os.environ["SLURM_PROCID"] == "1":
            raise RuntimeError("401 for https://ada:{CANARY[:6]}" + "{CANARY[6:]}" + "@models.example.org/x")
        return super().forward(x)

def main(context):
    value = os.environ.get("WANDB_API_KEY", "")
    others = sorted(name for name in os.environ if name in {sorted(set(_IN_SHELL) - {"WANDB_API_KEY"})})
    print("heard", hashlib.sha256(value.encode()).hexdigest()[:8], others, flush=True)
"""
_TYPED: tuple[tuple[str, ...], ...] = (
    (f"cluster.env.WANDB_API_KEY={CANARY}",),
    (f"cluster.env.HARMLESS=https://ada:{CANARY}@host/",),
    (f"cluster.sbatch.export=WANDB_API_KEY={CANARY}",),
    (f"cluster.export=[WANDB_API_KEY={CANARY}]",),
    ("cluster.env.X=${oc.env:WANDB_API_KEY}",),
    ("cluster.env.X=${ oc.env : HF_TOKEN }",),
    ("cluster.env.X=${oc.env:MLFLOW_TRACKING_URI}",),
    (f"model.api_key={CANARY}long",),
    (f"data.hf_token={CANARY}long",),
    (f"script=[train.py,--api-key,{CANARY}]",),
    (f"script=[train.py,--token={CANARY}]",),
    (f"script=[train.py,wandb.api_key={CANARY}]",),
    (f"script=[env,WANDB_API_KEY={CANARY},train.py]",),
    (f"cluster.setup=['export WANDB_API_KEY={CANARY}']",),
    (f"notify=['curl https://hooks.slack.com/services/{CANARY}/{CANARY}']",),
    (f"notify=['curl https://h.example.org/?sig={CANARY}{CANARY}']",),
    ("task._target_=failing.main", f"task.password={CANARY}"),
    (f"cluster.sbatch.comment=hf_{CANARY}{'x' * 20}",),
)


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Runs everything once; the trials are the searches and the refusals. The seed changes nothing."""
    person = Person(_project(folder))
    for name, found in (*_failing_run(person), *_run_with_a_secret(person), *_refused(person)):
        tally.add(name, [found] if found else [])
    kept = _kept_by_slurm()
    return {"searches and refusals": str(tally.trials), "where Slurm itself keeps what cluster.export names": kept}


def hits(root: Path, *, skip: Iterable[Path] = ()) -> list[str]:
    """Returns the files below a folder whose name or content holds the canary, in UTF-8 or as UTF-16."""
    forms = (CANARY.encode(), CANARY.encode("utf-16-le"))
    left_out = set(skip)
    found = []
    for path in sorted(root.rglob("*")):
        if any(place == path or place in path.parents for place in left_out):
            continue
        is_hit = CANARY in path.name or (path.is_file() and any(form in path.read_bytes() for form in forms))
        found += [str(path.relative_to(root))] if is_hit else []
    return found


def open_to_others(root: Path) -> list[str]:
    """Returns what lies below a folder, itself included, and gives others any right; Slurm's logs are among it."""
    # A link's own mode says nothing.
    places = [path for path in (root, *sorted(root.rglob("*"))) if not path.is_symlink()]
    return [str(path) for path in places if path.stat().st_mode & 0o077]


def _project(folder: Path) -> Path:
    project = new_project(folder / "project")
    (project / "failing.py").write_text(_FAILING)
    (project / "settings.py").write_text("API_KEY = ''\n")
    for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")):
        subprocess.run(["git", "-C", str(project), *words], check=True, capture_output=True)
    remote = f"https://ada:{CANARY}@git.example.org/x.git"
    subprocess.run(["git", "-C", str(project), "remote", "add", "origin", remote], check=True)
    (project / ".env").write_text(f"WANDB_API_KEY={CANARY}\n")
    (project / "settings.py").write_text(f"API_KEY = '{CANARY}'\n")
    return project


def _failing_run(person: Person) -> Iterator[tuple[str, str]]:
    words = ("model._target_=failing.Failing", "requeue.max_failures_without_progress=1", "run.name=fails")
    job, run = person.types("+cluster=1x2", *TINY, *words, env=_IN_SHELL).job_and_run
    wait_until_ended(run, within_s=PATIENCE_S)
    wait_for_state(job, "FAILED")
    log = "".join(path.read_text(errors="replace") for path in run.logs.rglob("rank_1.log"))
    yield "the failing rank left its traceback", "" if "RuntimeError: 401 for" in log else "no traceback in its log"
    yield from _searched("failed run", job, run)


def _run_with_a_secret(person: Person) -> Iterator[tuple[str, str]]:
    words = ("+cluster=1x2", "task._target_=failing.main", "cluster.export=[WANDB_API_KEY]", "run.name=by-name")
    job, run = person.types(*words, env=_IN_SHELL).job_and_run
    yield "Slurm keeps the named secret", "" if _kept_by_slurm(job) else "not found: the search itself may be blind"
    wait_for_state(job, "COMPLETED", "FAILED", within_s=PATIENCE_S)
    heard = f"heard {hashlib.sha256(_IN_SHELL['WANDB_API_KEY'].encode()).hexdigest()[:8]} []"
    log = "".join(path.read_text(errors="replace") for path in run.logs.rglob("rank_*.log"))
    yield "the named secret arrives, and no other", "" if log.count(heard) == 2 else f"the ranks say {log[-300:]!r}"
    yield from _searched("run with a secret by name", job, run)


def _searched(name: str, job: str, run: RunDirectory) -> Iterator[tuple[str, str]]:
    # A user's own source is copied as it is; what the toolkit writes about it is not.
    copied = [run.code / "settings.py"]
    yield f"{name}: files", ", ".join(hits(run.path, skip=copied))
    yield f"{name}: what others may read or write", ", ".join(open_to_others(run.path))
    yield f"{name}: copied .env", "there" if (run.code / ".env").exists() else ""
    provenance = json.loads(run.provenance.read_text())
    yield (
        f"{name}: the change of settings.py is recorded",
        "" if "settings.py" in provenance["git_diff"] else "it is not",
    )
    yield f"{name}: Slurm", ", ".join(what for what, text in _told_by_slurm(job).items() if CANARY in text)


def _told_by_slurm(job: str) -> dict[str, str]:
    """Returns all that other users are shown of a job, and what its owner is."""
    fields = ",".join(command("sacct", "--helpformat").split())
    questions = {
        "scontrol show job": ("scontrol", "show", "job", "-dd", job),
        "scontrol write batch_script": ("scontrol", "write", "batch_script", job, "-"),
        "squeue": ("squeue", "-t", "all", "-o", "%all", "-j", job),
        "sacct": ("sacct", "-P", "-o", fields, "-j", job),
    }
    return {what: command(*argv, must=False) for what, argv in questions.items()}


def _kept_by_slurm(job: str = "") -> str:
    """Returns the files of slurmctld's own state that hold the canary, e.g. a waiting job's environment."""
    state = DEFAULT_STATE_DIR / "spool" / "slurmctld"
    return ", ".join(name for name in hits(state) if f"job.{job}" in name) if state.is_dir() else ""


def _refused(person: Person) -> Iterator[tuple[str, str]]:
    before = hits(person.folder)
    for words in _TYPED:
        done = person.types("+cluster=1x1", *words, "run.name=refused", env=_IN_SHELL)
        said = CANARY in done.out + done.err
        wrong = [f"exit code {done.code}"] * (done.code != 2) + ["it is repeated"] * said
        wrong += ["it is written"] * (hits(person.folder) != before)
        yield f"typed {words[-1].replace(CANARY, '...')}", ", ".join(wrong)
