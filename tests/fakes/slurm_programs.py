"""Slurm's commands as small shell programs in a folder, for tests of whole command lines.

They print what the files beside them hold and note what they were told; nothing is parsed, nothing is decided.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

# `squeue -o` and `sacct -o` as slurm_train asks for them.
_SQUEUE = "{job_id}|{word}|{reason}|{nodes}|2026-01-31T09:41:24|N/A|main"
_SACCT = "{job_id}|{word}|None|{nodes}|Unknown|Unknown|main|0:0"
_SINFO = "main|main*|up|4|1-infinite|1-00:00:00|1:00:00|gpu:8(S:0-1)|64|1|512000|idle"

_PROGRAMS = {
    "sbatch": """
if [ "$1" = --test-only ]; then
  cp "$2" {here}/tested.sh; cat {here}/verdict >&2; exit "$(cat {here}/verdict_code)"
fi
for script; do :; done
echo "$@" >> {here}/sbatch_words
[ -e {here}/sbatch_fails ] && {{ echo 'sbatch: error: no' >&2; exit 1; }}
cp "$script" {here}/submitted.sh; echo "$@" > {here}/submitted_words; env > {here}/submitted_env; cat {here}/job_id
""",
    "squeue": """
echo "$@" >> {here}/squeue_words
[ -e {here}/squeue_fails ] && {{ echo 'slurm_load_jobs error' >&2; exit 1; }}
case "$*" in *"%i|%o") cat {here}/scripts.out; exit;; esac
case "$*" in *%Q*) sed 's/^/100|/' {here}/squeue.out; cat {here}/others.out;; *) cat {here}/squeue.out;; esac
""",
    "sacct": """
echo "$@" >> {here}/sacct_words
[ -e {here}/sacct_fails ] && {{ echo 'accounting is disabled' >&2; exit 1; }}
cat {here}/sacct.out
""",
    "scancel": 'echo "$@" >> {here}/cancelled\n',
    "sinfo": """
case "$*" in *NodeAddr*) echo "$4";; *) cat {here}/sinfo.out;; esac
""",
    "srun": "exit 1\n",
    "salloc": 'echo "$@" > {here}/salloc_words; exit 7\n',
    "scontrol": """
case "$*" in
  "show config") cat {here}/config.out;;
  "--all show partition") cat {here}/partitions.out;;
  "show topology") cat {here}/topology.out;;
  "show job "*) cat {here}/job.out;;
  "update "*) echo "$@" >> {here}/updated;;
  *) exit 1;;
esac
""",
    "sacctmgr": 'case "$4" in user) cat {here}/associations.out;; qos) cat {here}/qos.out;; *) exit 1;; esac\n',
}


class SlurmPrograms:
    """A folder to put first on the PATH.

    Args:
        folder: an empty folder of the test's own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        for name, body in _PROGRAMS.items():
            program = folder / name
            program.write_text(f"#!/bin/sh\n{body.format(here=folder)}")
            program.chmod(0o755)
        for name in ("squeue.out", "scripts.out", "others.out", "sacct.out", "verdict"):
            (folder / name).write_text("")
        (folder / "verdict_code").write_text("0")
        (folder / "job_id").write_text("4711\n")
        (folder / "config.out").write_text("ClusterName             = cluster\nMaxArraySize            = 1001\n")
        (folder / "sinfo.out").write_text(f"{_SINFO}\n")

    @property
    def path(self) -> str:
        """A PATH with these programs in front."""
        return f"{self.folder}:{os.environ['PATH']}"

    def wrap(self, program: str, body: str) -> None:
        """Puts a site's wrapper in place of a program.

        Args:
            program: e.g. "sbatch".
            body: shell lines, with {real} for the program itself.
        """
        num_before = len(list(self.folder.glob(f"{program}.real*")))
        real = self.folder / f"{program}.real{num_before}"
        (self.folder / program).rename(real)
        (self.folder / program).write_text(f"#!/bin/sh\n{body.format(real=real)}\n")
        (self.folder / program).chmod(0o755)

    def talk(self, line: str) -> None:
        """Has every program print a line of the site's own before and after what it prints itself."""
        for program in _PROGRAMS:
            self.wrap(program, f"echo '{line}'; {{real}} \"$@\"; code=$?; echo '{line}'; exit $code")

    def queue_scripts(self) -> None:
        """Has squeue show the script of what is submitted from now on."""
        note = f'for script; do :; done; echo "$(cat {self.folder}/job_id)|$script" >> {self.folder}/scripts.out'
        self.wrap("sbatch", f'case $1 in --test-only) ;; *) {note};; esac; exec {{real}} "$@"')

    def queue(self, job_id: str, word: str, *, reason: str = "None", nodes: str = "") -> None:
        """Adds a job to what squeue prints; the newest word about a job counts."""
        line = _SQUEUE.format(job_id=job_id, word=word, reason=reason, nodes=nodes)
        with (self.folder / "squeue.out").open("a") as file:
            file.write(f"{line}\n")

    def has_script(self, job_id: str, path: Path) -> None:
        """Tells squeue which batch script a job of this user has."""
        with (self.folder / "scripts.out").open("a") as file:
            file.write(f"{job_id}|{path}\n")

    def queue_many(self, job_ids: Iterable[str], word: str) -> None:
        """Makes several jobs what squeue prints."""
        lines = (_SQUEUE.format(job_id=job_id, word=word, reason="None", nodes="") for job_id in job_ids)
        (self.folder / "squeue.out").write_text("".join(f"{line}\n" for line in lines))

    def others_wait(self, number: int, *, priority: int) -> None:
        """Puts jobs of other people into the queue, which are seen only where all of it is asked for."""
        line = _SQUEUE.format(job_id="{}", word="PENDING", reason="Priority", nodes="")
        lines = (f"{priority}|{line.format(number)}\n" for number in range(9000, 9000 + number))
        (self.folder / "others.out").write_text("".join(lines))

    def times_asked(self, program: str) -> int:
        """Returns how often squeue or sacct was called, or sbatch to submit."""
        return len((self.said(f"{program}_words") or "").splitlines())

    def account(self, job_id: str, word: str, *, nodes: str = "") -> None:
        """Puts a job into what sacct prints."""
        (self.folder / "sacct.out").write_text(f"{_SACCT.format(job_id=job_id, word=word, nodes=nodes)}\n")

    def next_job(self, job_id: int) -> None:
        """Gives this id to the next job that is submitted."""
        (self.folder / "job_id").write_text(f"{job_id}\n")

    def forget(self, name: str) -> None:
        """Forgets what a program noted, see `said`."""
        (self.folder / name).unlink()

    def be_site(self, recorded: Path) -> None:
        """Answers questions about the cluster from a folder of recorded answers; what is not there is refused."""
        for name in ("config", "sinfo", "partitions", "associations", "qos"):
            (self.folder / f"{name}.out").unlink(missing_ok=True)
            if (recorded / f"{name}.txt").is_file():
                (self.folder / f"{name}.out").write_text((recorded / f"{name}.txt").read_text())

    def break_down(self, *names: str) -> None:
        """Makes squeue or sacct fail."""
        for name in names:
            (self.folder / f"{name}_fails").touch()

    def refuse(self, message: str) -> None:
        """Makes `sbatch --test-only` refuse with this line."""
        (self.folder / "verdict").write_text(f"{message}\n")
        (self.folder / "verdict_code").write_text("1")

    def said(self, name: str) -> str | None:
        """Returns what a program noted: "cancelled", "tested.sh", "submitted.sh", "..._words", "..._env"."""
        file = self.folder / name
        return file.read_text() if file.exists() else None
