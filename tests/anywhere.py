"""Tries a short set of tests in other places, as another user and on other machines: `make test-anywhere`.

    python -m tests.anywhere            # all rows, ten minutes
    python -m tests.anywhere home ci    # these

Each row is a fresh clone of the last commit, whose Python has the packages of this one. It ends with a table: the
verdict and the last line of each row. Most rows need root; they are made in namespaces, so this machine stays as it is.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.command_line import REPOSITORY
from tests.support.session_namespaces import NAMESPACES, PREPARE

TESTS = (
    "tests/test_session.py",
    "tests/checkpoint/test_checkpoint_save_load.py",
    "tests/cli/test_init.py",
    "tests/cli/test_plan_verb.py::test_json_holds_all_of_it_and_nothing_else_is_printed",
    "tests/config/test_site_profile.py",
    "tests/end_to_end/test_run_on_slurm.py::test_a_node_that_does_not_see_the_run_is_named",
    "tests/request/test_batch_script.py",
    "tests/code/test_snapshot.py",
    "tests/request/test_submission.py",
    "tests/slurm/test_slurm_commands_real.py",
)
_USER = "nobody"
_SLURM_TRAIN = ".venv/bin/python -m slurm_train"
# A machine without Slurm and without a package manager: what is no program is not found.
_WITHOUT_PROGRAMS = """
for program in apt-get apt-cache munged mariadbd slurmctld slurmd slurmdbd sbatch srun salloc scontrol sinfo squeue \\
    scancel sacct sacctmgr
do
    for file in "/usr/sbin/$program" "/usr/bin/$program"; do
        [ ! -e "$file" ] || mount --bind /dev/null "$file"
    done
done
"""
_OF_A_JOB = {"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_JOB_ID": "4711", "SBATCH_PARTITION": "gpu", "RANK": "3"}


@dataclass(frozen=True, slots=True)
class Row:
    """A place, a person and a machine.

    Args:
        place: the folder of the clone, made for the row; it may begin with "~".
        machine: shell lines that make the machine of the row, typed by root in the clone; "": this machine.
        variables: what is set beside PATH and HOME.
        user: who runs the tests; "": whoever runs this.
        times: how often the tests are run.
    """

    place: str = "/tmp/{}"
    machine: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    user: str = ""
    times: int = 1


ROWS = {
    "tmp": Row(times=2),
    "home": Row(place="~/{}"),
    "umlaut": Row(place="/var/tmp/{} mit Lücke und ü"),
    "ci": Row(variables={"CI": "true", "GITHUB_ACTIONS": "true", "TERM": "dumb"}),
    "closed-home": Row(machine="mount --bind -o ro $HOME $HOME; ! touch $HOME/new"),
    "user": Row(machine=_WITHOUT_PROGRAMS, user=_USER),
    "container": Row(machine="set -- setpriv --bounding-set=-sys_admin"),
    "used": Row(
        # What README says: a site file of the person's, and a run of theirs.
        machine=f"""
{_SLURM_TRAIN} devcluster up --nodes 2 --gpus 2
{_SLURM_TRAIN} init here --yes
[ -e $HOME/.config/slurm_train/site/here.yaml ]
cd $HOME
$OLDPWD/{_SLURM_TRAIN} train.max_steps=2 train.evaluate=false train.sample_tokens=0
cd $OLDPWD
{_SLURM_TRAIN} devcluster down
"""
    ),
    "devcluster": Row(machine=f"{_SLURM_TRAIN} devcluster up --nodes 2 --gpus 2"),
    "login-node": Row(
        machine="echo ClusterName=another >/etc/slurm/slurm.conf; echo '10.9.8.7 node1' >>/etc/hosts",
        variables=_OF_A_JOB,
    ),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a row ended: exit code, last line and seconds."""

    code: int
    last_line: str
    duration_s: float


def main(words: Sequence[str]) -> int:
    """Tries the rows that are named, or all; returns 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    names = parser.parse_args(words).rows or list(ROWS)
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    verdicts = {}
    for name in names:
        print(f"== {name}", flush=True)
        verdicts[name] = try_row(ROWS[name])
    print()
    for name, verdict in verdicts.items():
        said = "passed" if verdict.code == 0 else "FAILED"
        print(f"{said} {name:<12} {verdict.duration_s:4.0f} s  {verdict.last_line}")
    return int(any(verdict.code for verdict in verdicts.values()))


def try_row(row: Row) -> Verdict:
    """Makes a clone and runs the tests in it, and removes it again."""
    is_root = os.geteuid() == 0
    if (row.machine or row.user) and not is_root:
        return Verdict(0, "not tried: it needs root", 0.0)
    name = Path(tempfile.mktemp(prefix="slurm-train-anywhere-")).name
    place = Path(row.place.format(name)).expanduser()
    home = Path(tempfile.mkdtemp(prefix="slurm-train-anywhere-home-"))
    begin_s = time.monotonic()
    try:
        make_clone(place, user=row.user)
        done = run_tests(row, place, home=home)
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)
    sys.stdout.write(done.stdout)
    lines = [line.strip("= ") for line in done.stdout.splitlines() if line.strip("= ")]
    return Verdict(done.returncode, lines[-1] if lines else "no output", time.monotonic() - begin_s)


def make_clone(place: Path, *, user: str) -> None:
    """Clones the last commit, with a virtual environment that has the packages of this one."""
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(place)], check=True)
    python = python_for(user)
    subprocess.run([python, "-m", "venv", "--without-pip", str(place / ".venv")], check=True)
    (packages,) = place.glob(".venv/lib/python*/site-packages")
    # The clone's package comes first. The .pth files of the other folder, which name this checkout, are not read.
    (packages / "lent.pth").write_text(f"{place}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    if user:
        subprocess.run(["chown", "--recursive", user, str(place)], check=True)


def python_for(user: str) -> str:
    """Returns a Python of this version that a user may run.

    Raises:
        FileNotFoundError: there is none.
    """
    version = str(sys.version_info[:2])
    for python in (sys.executable, "/usr/bin/python3"):
        words = [python, "-c", "import sys; print(sys.version_info[:2])"]
        done = subprocess.run([*as_user(user), *words], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return python
    raise FileNotFoundError(f"no Python {version} that {user} may run")


def as_user(user: str) -> list[str]:
    """Returns the words that run a command as a user, none for this one."""
    # setpriv itself still has root's rights when it starts a program.
    return ["setpriv", f"--reuid={user}", "--regid=nogroup", "--clear-groups", "env"] if user else []


def run_tests(row: Row, place: Path, *, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs the tests of a clone; what they print is in the result."""
    if row.user:
        shutil.chown(home, row.user)
    pytest = [*as_user(row.user), ".venv/bin/python", "-m", "pytest", "--quiet", "-p", "no:cacheprovider"]
    lines = [row.machine, *[f'"$@" {shlex.join([*pytest, *TESTS])}'] * row.times]
    words = ["bash", "-c", "set -e\n" + "\n".join(lines), "bash"]
    if row.machine:
        scratch = home / "machine"
        scratch.mkdir()
        words = ["unshare", *NAMESPACES, "bash", "-c", f'{PREPARE}shift; exec "$@"', "bash", str(scratch), *words]
    # The programs of this environment, shellcheck for example, come last.
    search_path = f"{os.environ['PATH']}:{sysconfig.get_path('scripts')}"
    variables = {"PATH": search_path, "HOME": str(home), **row.variables}
    return subprocess.run(
        words, cwd=place, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
