"""What a one-machine cluster is: a value from which every name, path and configuration file follows.

A plan does nothing. It is written into the state directory before anything else happens, so that `down` can remove
whatever a later step made, also when `up` was killed half way.

What a cluster does otherwise is data, too (`Habit`): settings of slurm.conf, lines of other files, names of the nodes,
and shell lines for what no file of Slurm's can say. Tests build such clusters.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from slurm_train.errors import ClusterError
from slurm_train.rundir.files import read_json
from slurm_train.slurm.allocation import compact_nodelist
from slurm_train.verbs import DEVCLUSTER_STATE_DIR

DEFAULT_STATE_DIR = Path(DEVCLUSTER_STATE_DIR)
SYSTEM_SLURM_CONF = Path("/etc/slurm/slurm.conf")
CONTROLLER = "devcluster-controller"
MARK = "SLURM_TRAIN_DEVCLUSTER"
"""Variable in the environment of every daemon of a cluster, by which its processes are found."""
_SAFE_PATH = re.compile(r"/[A-Za-z0-9._/+-]{1,70}")


NULL_DEVICE = (1, 3)


class Names(NamedTuple):
    """What a node is called, by whom; {} is its number."""

    slurm: str = "node{}"
    """NodeName."""
    host: str = "node{}"
    """What `hostname` says there."""
    dns: str = "node{}"
    """What /etc/hosts has; "" for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """What a cluster does otherwise, to stand for one of another site; without arguments nothing.

    Wide because each field is one thing that sites do otherwise. Every text may name {state}, {conf}, {controller},
    {nodelist}, {first_half} and {second_half} of the nodes, and {gpus}; a brace of its own is doubled.
    """

    about: str = ""
    """In a few words."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Keys of slurm.conf and their values; "" leaves a key out."""
    partitions: str = ""
    """Lines of slurm.conf before the one of the partition `main`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name of a file in `etc` -> lines to add to it."""
    before: str = ""
    """Shell lines run before the first daemon."""
    on_node: str = ""
    """Shell lines run on every node, in its own mounts and network, before its slurmd."""
    after: str = ""
    """Shell lines run when all nodes are idle."""
    ended: tuple[str, ...] = ()
    """Daemons that are away: ended when all nodes are idle, or never started where Slurm does not use them."""
    names: Names = field(default_factory=Names)
    num_known: int = 0
    """Nodes that Slurm knows of; those that the cluster does not have are down."""
    gpu_type: str = ""
    """What the GPUs are called, e.g. "a100"."""
    has_gres: bool = True
    """Whether Slurm knows of GPUs."""
    gpu_numbers: tuple[int, int] = NULL_DEVICE
    """Numbers of the first GPU's device file, counted on from one to the next; NULL_DEVICE: that of all of them."""
    is_real_size: bool = False
    """Whether a node has the CPUs and the memory of this machine, and not more."""
    is_ipv6: bool = False
    """Whether the network has no IPv4."""


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Shape and place of a one-machine Slurm cluster.

    In `state_dir`: `etc` has the configuration and the munge key, `log` one log for each daemon, `pid` one record of
    process id and start time for each daemon, `run` the sockets of munged and mariadbd, `spool` the state of slurmctld
    and slurmd, `database` the data of mariadbd, `devices` the character devices that stand for GPUs.

    Raises:
        ClusterError: a count is out of range, or Slurm's configuration could not name the state directory.
    """

    nodes: int
    """Nodes, each with its own network namespace, address and host name (node1, node2, ...)."""
    gpus: int
    """GPU devices of each node; they count and schedule as GPUs but compute nothing."""
    state_dir: Path = DEFAULT_STATE_DIR
    """The one directory that holds configuration, logs, pids, spool and database."""
    cpus: int = 64
    """CPUs that each node claims, more than the machine has, so that several jobs fit on a node."""
    memory_mb: int = 512_000
    """Memory that each node claims, in MiB; nothing enforces it."""
    subnet: str = "10.98.76"
    """First three numbers of the bridge's /24 network; the controller is .1, node1 is .11."""
    habit: Habit = field(default_factory=Habit)
    """What is otherwise than usual."""

    def __post_init__(self) -> None:
        """Checks counts and path."""
        for flag, value, lowest, highest in (("--nodes", self.nodes, 1, 64), ("--gpus", self.gpus, 0, 16)):
            if not lowest <= value <= highest:
                raise ClusterError(
                    f"{flag} must be from {lowest} to {highest}, got {value}", hint=f"for example {flag} 4"
                )
        if not _SAFE_PATH.fullmatch(str(self.state_dir)) or ".." in self.state_dir.parts:
            raise ClusterError(
                f"--state {str(self.state_dir)!r} cannot be named in Slurm's configuration",
                hint="give an absolute path of at most 70 letters, digits and . _ + - / (socket paths are short)",
            )

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of the nodes' namespaces in order, ("node1", "node2"); usually also what everybody calls the nodes."""
        return tuple(f"node{index}" for index in range(1, self.nodes + 1))

    def called(self, template: str) -> dict[str, str]:
        """Returns node -> its name by a template of `Names`, e.g. {"node1": "gpu1.cluster.example"}."""
        return {name: template.format(index) for index, name in enumerate(self.node_names, start=1)}

    @property
    def addresses(self) -> dict[str, str]:
        """Node -> address, the controller's bridge first: {"node1": "10.98.76.11", ...}."""
        ends = {CONTROLLER: 1, **{name: 10 + index for index, name in enumerate(self.node_names, start=1)}}
        if self.habit.is_ipv6:
            return {name: f"fd98:76::{end}" for name, end in ends.items()}
        return {name: f"{self.subnet}.{end}" for name, end in ends.items()}

    @property
    def hosts(self) -> dict[str, str]:
        """Name -> address, as /etc/hosts has them."""
        names = {CONTROLLER: CONTROLLER, **self.called(self.habit.names.dns)}
        return {names[name]: address for name, address in self.addresses.items() if names[name]}

    @property
    def uses_accounting(self) -> bool:
        """Whether Slurm keeps accounts."""
        return "AccountingStorageType" not in self.habit.settings

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
    def environment(self) -> dict[str, str]:
        """Variables that point commands and daemons to this cluster, and mark them as its processes."""
        # slurmdbd knows its database's socket from MYSQL_UNIX_PORT alone.
        socket = f"{self.state_dir}/run/mariadb.socket"
        return {MARK: str(self.state_dir), "SLURM_CONF": str(self.slurm_conf), "MYSQL_UNIX_PORT": socket}

    def describe(self) -> str:
        """Returns the shape in words: "4 nodes x 8 GPUs"."""
        shape = f"{self.nodes} node{'s' * (self.nodes != 1)} x {self.gpus} GPU{'s' * (self.gpus != 1)}"
        return f"{shape}, {self.habit.about}" if self.habit.about else shape

    def json_text(self) -> str:
        """Returns the plan as it is stored; `load_plan` reads it back."""
        values = asdict(self)
        del values["state_dir"]
        return json.dumps(values, indent=2) + "\n"


def load_plan(state_dir: Path) -> ClusterPlan | None:
    """Returns the plan that a state directory holds, or None where there is none or only a part of one."""
    value = read_json(state_dir / "plan.json")
    if value is None:
        return None
    try:
        habit = value.pop("habit")
        habit["names"] = Names(*habit["names"])
        for name in ("ended", "gpu_numbers"):
            habit[name] = tuple(habit[name])
        return ClusterPlan(state_dir=state_dir, habit=Habit(**habit), **value)
    except (KeyError, TypeError, ClusterError):
        return None


def configuration(plan: ClusterPlan, *, nsswitch: str = "", slurm: tuple[int, ...] = (22, 5)) -> dict[str, str]:
    """Returns file name -> text of every configuration file; the same plan gives the same bytes.

    Args:
        plan: the cluster.
        nsswitch: the machine's nsswitch.conf; the nodes get it with host names from /etc/hosts alone.
        slurm: version of Slurm, e.g. (24, 11).
    """
    habit = plan.habit
    cpus = plan.cpus
    memory_mb = plan.memory_mb
    if habit.is_real_size:
        cpus = os.cpu_count() or 1
        memory_mb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 21
    sockets = 2 if cpus % 2 == 0 else 1
    gpus = plan.gpus if plan.habit.has_gres else 0
    shape = f"CPUs={cpus} Sockets={sockets} CoresPerSocket={cpus // sockets} ThreadsPerCore=1"
    shape += f" RealMemory={memory_mb}"
    shape += f" Gres=gpu:{habit.gpu_type + ':' if habit.gpu_type else ''}{gpus}" if gpus else ""
    names = plan.called(habit.names.slurm)
    hosts = plan.called(habit.names.host)
    nodes = ""
    for name in plan.node_names:
        host = f" NodeHostname={hosts[name]}" if hosts[name] != names[name] else ""
        nodes += f"NodeName={names[name]}{host} NodeAddr={plan.addresses[name]} {shape}\n"
    gpu_nodes = compact_nodelist(list(names.values()))
    absent = [habit.names.slurm.format(index) for index in range(plan.nodes + 1, habit.num_known + 1)]
    nodelist = compact_nodelist([*names.values(), *absent])
    if absent:
        # Addresses of documentation: Slurm needs each to resolve, and no machine has them.
        ends = f"NodeAddr=192.0.2.[{plan.nodes + 1}-{habit.num_known}]"
        nodes += f"NodeName={compact_nodelist(absent)} {ends} {shape} State=DOWN\n"
    values = {
        "state": plan.state_dir,
        "conf": plan.conf_dir,
        "controller": CONTROLLER,
        "address": plan.addresses[CONTROLLER],
        "nodes": nodes,
        "nodelist": nodelist,
        "first_half": compact_nodelist(list(names.values())[: (plan.nodes + 1) // 2]),
        "second_half": compact_nodelist(list(names.values())[(plan.nodes + 1) // 2 :]),
        "gpu_nodes": gpu_nodes,
        "gpu_type": f" Type={habit.gpu_type}" if habit.gpu_type else "",
        "gpu_files": compact_nodelist([f"gpu{index}" for index in range(plan.gpus)]),
        "partitions": habit.partitions.format(nodelist=nodelist),
    }
    # Slurm before 21.08 stops at a key that it does not know.
    left_out = {name for name, is_read in (("gres.conf", gpus), ("cgroup.conf", slurm >= (21, 8))) if not is_read}
    added = {**habit.files, "before.sh": habit.before, "node.sh": habit.on_node, "after.sh": habit.after}
    templates = {name: _TEMPLATES.get(name, "") + added.get(name, "") for name in {**_TEMPLATES, **added}}
    texts = {name: text.format(**values) for name, text in templates.items() if text and name not in left_out}
    texts["slurm.conf"] = _with_settings(texts["slurm.conf"], habit.settings)
    kept = [line for line in nsswitch.splitlines() if not line.startswith("hosts:")]
    return {"gres.conf": _HEAD, **texts, "nsswitch.conf": "\n".join([*kept, "hosts: files"]) + "\n"}


def _with_settings(text: str, settings: Mapping[str, str]) -> str:
    """Returns slurm.conf with other values of some keys; "" leaves one out."""
    kept = [line for line in text.splitlines() if line.partition("=")[0] not in settings]
    first = next(number for number, line in enumerate(kept) if line.startswith("NodeName="))
    new = [f"{key}={value}" for key, value in settings.items() if value]
    return "\n".join([*kept[:first], *new, *kept[first:]]) + "\n"


_HEAD = "# Written by `slurm_train devcluster up`; gone after `down`.\n"
_TEMPLATES = {
    "slurm.conf": _HEAD
    + """\
ClusterName=devcluster
SlurmctldHost={controller}({address})
# On the bridge alone (the controller's name resolves to it) and off the usual ports: others are not disturbed.
CommunicationParameters=NoCtldInAddrAny
SlurmctldPort=26817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A requeued job waits for this window; Slurm's default would be 120 s.
AuthInfo=cred_expire=5,socket={state}/run/munge.socket
MpiDefault=none
MailProg=/bin/true
StateSaveLocation={state}/spool/slurmctld
SlurmdSpoolDir={state}/spool/%n
SlurmctldPidFile={state}/run/slurmctld.pid
SlurmdPidFile={state}/run/slurmd-%n.pid

SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
PreemptType=preempt/qos
PreemptMode=REQUEUE
JobRequeue=1
MinJobAge=300

SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
SlurmctldTimeout=20
KillWait=5
# Many ranks that import at once on few cores delay every answer.
MessageTimeout=20
BatchStartTimeout=60

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort=26819
AccountingStoragePass={state}/run/munge.socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=10

SlurmctldLogFile={state}/log/slurmctld.log
SlurmdLogFile={state}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info

{nodes}{partitions}PartitionName=main Nodes={nodelist} Default=YES DefaultTime=01:00:00 MaxTime=1-00:00:00
""",
    # Device files, since Slurm drains a node whose count of GPUs has no files.
    "gres.conf": _HEAD
    + """\
AutoDetect=off
NodeName={gpu_nodes} Name=gpu{gpu_type} File={state}/devices/{gpu_files}
""",
    # Nothing here uses cgroups; the line keeps slurmd from looking for version 2.
    "cgroup.conf": _HEAD + "CgroupPlugin=cgroup/v1\n",
    # Only its user may be able to read it (mode 600). libmariadb takes the socket from MYSQL_UNIX_PORT, and the
    # server knows root by its uid.
    "slurmdbd.conf": _HEAD
    + """\
DbdHost={controller}
DbdAddr={address}
DbdPort=26819
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/run/munge.socket
LogFile={state}/log/slurmdbd.log
PidFile={state}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
""",
    # A socket, no network, and no protection against power loss.
    "mariadb.cnf": _HEAD
    + """\
[server]
user=root
datadir={state}/database
socket={state}/run/mariadb.socket
pid-file={state}/run/mariadb.pid
skip-networking
innodb_buffer_pool_size=64M
innodb_log_file_size=16M
innodb_lock_wait_timeout=900
innodb_flush_log_at_trx_commit=0
innodb_doublewrite=0
performance_schema=0
""",
}
