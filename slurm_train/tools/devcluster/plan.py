"""What a one-machine cluster is: a value from which every name, path and configuration line follows.

A plan does nothing. It is written into the state directory before anything else happens, so that `down` can take away
whatever a later step made, also when `up` was killed half way.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.rundir.files import read_json

DEFAULT_STATE_DIR = Path("/var/lib/slurm-train-devcluster")
SYSTEM_SLURM_CONF = Path("/etc/slurm/slurm.conf")
CONTROLLER = "devcluster-controller"
MAX_NODES = 64
MAX_GPUS = 16
_SAFE_PATH = re.compile(r"/[A-Za-z0-9._/+-]{1,70}")


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Shape and place of a one-machine Slurm cluster.

    Raises:
        ClusterError: a count out of range, or a state directory that Slurm's configuration could not name.
    """

    nodes: int
    """Nodes, each with its own network namespace, address and host name (node1, node2, ...)."""
    gpus: int
    """GPU devices per node; they count and schedule as GPUs but compute nothing."""
    state_dir: Path = DEFAULT_STATE_DIR
    """The one directory that holds configuration, logs, pids, spool and database."""
    cpus: int = 64
    """CPUs that each node claims, more than the machine has, so that several jobs fit on a node."""
    memory_mb: int = 512_000
    """Memory that each node claims, in MiB; nothing enforces it."""
    subnet: str = "10.98.76"
    """First three numbers of the bridge's /24 network; the controller is .1, node1 is .11."""

    def __post_init__(self) -> None:
        """Refuses what could not be built."""
        _check_count("--nodes", self.nodes, lowest=1, highest=MAX_NODES)
        _check_count("--gpus", self.gpus, lowest=0, highest=MAX_GPUS)
        if not _SAFE_PATH.fullmatch(str(self.state_dir)) or ".." in self.state_dir.parts:
            raise ClusterError(
                f"--state {str(self.state_dir)!r} cannot be named in Slurm's configuration",
                hint="give an absolute path of at most 70 letters, digits and . _ + - / (socket paths are short)",
            )

    @property
    def node_names(self) -> tuple[str, ...]:
        """Host names in order: ("node1", "node2")."""
        return tuple(f"node{index}" for index in range(1, self.nodes + 1))

    @property
    def nodelist(self) -> str:
        """The nodes as Slurm writes them: "node[1-4]", or "node1"."""
        return "node1" if self.nodes == 1 else f"node[1-{self.nodes}]"

    @property
    def controller_address(self) -> str:
        """IPv4 address of the bridge, where slurmctld and slurmdbd are reached."""
        return f"{self.subnet}.1"

    def node_address(self, name: str) -> str:
        """Returns the IPv4 address of a node, e.g. "10.98.76.11" for node1."""
        return f"{self.subnet}.{10 + int(name.removeprefix('node'))}"

    @property
    def plan_file(self) -> Path:
        """The plan itself; the first file written and the mark that the directory is ours."""
        return self.state_dir / "plan.json"

    @property
    def ready_file(self) -> Path:
        """Written last, when all nodes have reported: the cluster was built completely."""
        return self.state_dir / "READY"

    @property
    def conf_dir(self) -> Path:
        """slurm.conf, gres.conf, cgroup.conf, slurmdbd.conf, mariadb.cnf and the munge key."""
        return self.state_dir / "etc"

    @property
    def slurm_conf(self) -> Path:
        """The slurm.conf that `/etc/slurm/slurm.conf` points to."""
        return self.conf_dir / "slurm.conf"

    @property
    def log_dir(self) -> Path:
        """One log per daemon."""
        return self.state_dir / "log"

    @property
    def pid_dir(self) -> Path:
        """One record of process id and start time per daemon."""
        return self.state_dir / "pid"

    @property
    def run_dir(self) -> Path:
        """Sockets of munged and mariadbd."""
        return self.state_dir / "run"

    @property
    def spool_dir(self) -> Path:
        """State of slurmctld and the spool of each slurmd."""
        return self.state_dir / "spool"

    @property
    def database_dir(self) -> Path:
        """Data of mariadbd."""
        return self.state_dir / "database"

    @property
    def device_dir(self) -> Path:
        """The character devices that stand for GPUs."""
        return self.state_dir / "devices"

    @property
    def munge_socket(self) -> Path:
        """Socket of our own munged; a munged of the system is left alone."""
        return self.run_dir / "munge.socket"

    @property
    def database_socket(self) -> Path:
        """Socket of our own mariadbd, which listens on nothing else."""
        return self.run_dir / "mariadb.socket"

    def describe(self) -> str:
        """Returns the shape in words: "4 nodes x 8 GPUs"."""
        return f"{self.nodes} node{'s' * (self.nodes != 1)} x {self.gpus} GPU{'s' * (self.gpus != 1)}"

    def json_text(self) -> str:
        """Returns the plan as it is stored; `load_plan` reads it back."""
        names = ("nodes", "gpus", "cpus", "memory_mb", "subnet")
        return json.dumps({name: getattr(self, name) for name in names}, indent=2) + "\n"


def load_plan(state_dir: Path) -> ClusterPlan | None:
    """Returns the plan that a state directory holds, or None where there is no whole one."""
    value = read_json(state_dir / "plan.json")
    if value is None:
        return None
    try:
        return ClusterPlan(state_dir=state_dir, **value)
    except (TypeError, ClusterError):
        return None


def _check_count(flag: str, value: int, *, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise ClusterError(f"{flag} {value} cannot be built", hint=f"give a number from {lowest} to {highest}")
