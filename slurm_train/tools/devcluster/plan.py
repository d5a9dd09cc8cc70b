"""What a one-machine cluster is: a value from which every name, path and configuration file follows.

A plan does nothing. It is written into the state directory before anything else happens, so that `down` can remove
whatever a later step made, also when `up` was killed half way.

A habit of a site is data, too: what other clusters do otherwise, as settings of slurm.conf, lines of other files, names
of the nodes, and shell lines for what no file of Slurm's can say. Every text may name {state}, {conf}, {controller},
{nodelist}, {first_half} and {second_half} of the nodes, and {gpus}; a brace of its own is doubled. Several habits are
applied in the order in which they are given.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
    site: tuple[str, ...] = ()
    """Habits of another site that it has, by their names in `HABITS`."""

    def __post_init__(self) -> None:
        """Checks counts, path and habits."""
        combined(self.site)
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
    def habit(self) -> Habit:
        """What is otherwise than usual."""
        return combined(self.site)

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
        return f"{shape}, {', '.join(self.site)}" if self.site else shape

    def json_text(self) -> str:
        """Returns the plan as it is stored; `load_plan` reads it back."""
        values = asdict(self)
        del values["state_dir"]
        return json.dumps(values, indent=2) + "\n"


def load_plan(state_dir: Path) -> ClusterPlan | None:
    """Returns the plan that a state directory holds, or None where there is none or only a part of one."""
    value = read_json(state_dir / "plan.json")
    try:
        return None if value is None else ClusterPlan(state_dir=state_dir, **{**value, "site": tuple(value["site"])})
    except (KeyError, TypeError, ClusterError):
        return None


def configuration(plan: ClusterPlan, *, nsswitch: str = "", slurm: tuple[int, ...] = (22, 5)) -> dict[str, str]:
    """Returns file name -> text of every configuration file; the same plan gives the same bytes.

    Args:
        plan: the cluster.
        nsswitch: the machine's nsswitch.conf; the nodes get it with host names from /etc/hosts alone.
        slurm: version of Slurm, e.g. (24, 11).
    """
    habit, cpus, memory_mb = plan.habit, plan.cpus, plan.memory_mb
    if habit.is_real_size:
        cpus, memory_mb = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 21
    sockets, gpus = 2 if cpus % 2 == 0 else 1, plan.gpus if plan.habit.has_gres else 0
    shape = f"CPUs={cpus} Sockets={sockets} CoresPerSocket={cpus // sockets} ThreadsPerCore=1"
    shape += f" RealMemory={memory_mb}"
    shape += f" Gres=gpu:{habit.gpu_type + ':' if habit.gpu_type else ''}{gpus}" if gpus else ""
    names, hosts = plan.called(habit.names.slurm), plan.called(habit.names.host)
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


NULL_DEVICE = (1, 3)


class Names(NamedTuple):
    """What a node is called, by whom; {} is its number."""

    slurm: str = "node{}"
    """NodeName."""
    host: str = "node{}"
    """What `hostname` says there."""
    dns: str = "node{}"
    """What /etc/hosts has; "" for nothing."""


class Habit(NamedTuple):
    """What a site does otherwise."""

    about: str
    """A few words for the list of habits."""
    settings: Mapping[str, str] = {}
    """Keys of slurm.conf and their values; "" leaves a key out."""
    partitions: str = ""
    """Lines of slurm.conf before the one of the partition `main`."""
    files: Mapping[str, str] = {}
    """Name of a file in `etc` -> lines to add to it."""
    before: str = ""
    """Shell lines run before the first daemon."""
    on_node: str = ""
    """Shell lines run on every node, in its own mounts and network, before its slurmd."""
    after: str = ""
    """Shell lines run when all nodes are idle."""
    ended: tuple[str, ...] = ()
    """Daemons that are away: ended when all nodes are idle, or never started where Slurm does not use them."""
    names: Names = Names()
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


_NO_STORAGE = {
    "AccountingStorageType": "accounting_storage/none",
    "AccountingStorageHost": "",
    "AccountingStoragePort": "",
    "AccountingStoragePass": "",
    "AccountingStorageEnforce": "",
    "AccountingStorageTRES": "",
}


def _by_partition(mode: str, *, about: str, more: str = "") -> Habit:
    """Returns the habit of preemption by partitions, which have no grace, as most; KillWait is Slurm's own."""
    return Habit(
        about,
        settings={"PreemptType": "preempt/partition_prio", "PreemptMode": mode, "KillWait": "30"},
        partitions=f"{more}PartitionName=urgent Nodes={{nodelist}} PriorityTier=10 MaxTime=1-00:00:00\n",
    )


def _filter(submit: str, modify: str = "") -> dict[str, str]:
    """Returns job_submit.lua with the bodies of its two functions."""
    return {
        "job_submit.lua": f"""\
function slurm_job_submit(job_desc, part_list, submit_uid)
{submit}   return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
{modify}   return slurm.SUCCESS
end
""".replace("{", "{{").replace("}", "}}")
    }


_LUA = {"JobSubmitPlugins": "lua"}
_REFUSE = """\
   if {} then
      slurm.log_user("{}")
      return slurm.ERROR
   end
"""
# A mask of /usr/bin without one program; overlayfs takes a device 0:0 for "not there".
_WITHOUT_SCONTROL = """\
mount -t tmpfs tmpfs /mnt
mknod /mnt/scontrol c 0 0
mount -t overlay overlay -o lowerdir=/mnt:/usr/bin /usr/bin
umount -l /mnt
"""
# As a machine of its own would have them; `ip netns exec` hides /sys/fs/cgroup.
_CGROUPS = """\
mkdir -p {state}/cgroup
mount -t tmpfs tmpfs {state}/cgroup
for one in freezer cpuset memory devices cpuacct; do
  mkdir {state}/cgroup/$one
  mount -t cgroup -o $one cgroup {state}/cgroup/$one
done
"""
HABITS = {
    "no-accounting": Habit(
        "nothing keeps accounts: no sacct, no sacctmgr, no QOS",
        settings={**_NO_STORAGE, "PreemptType": "preempt/none", "PreemptMode": "OFF"},
        ended=("mariadbd", "slurmdbd"),
    ),
    "slurmdbd-away": Habit("slurmdbd has died", ended=("slurmdbd",)),
    "slurmdbd-hidden": Habit(
        "nodes do not reach slurmdbd",
        settings={"AccountingStorageHost": "127.0.0.1"},
        files={"slurmdbd.conf": "DbdAddr=127.0.0.1\n"},
    ),
    "no-scontrol": Habit("nodes have no scontrol", on_node=_WITHOUT_SCONTROL),
    "no-requeue": Habit(
        "a filter takes --requeue away from every job, and refuses to give it back",
        settings=_LUA,
        files=_filter("   job_desc.requeue = 0\n", _REFUSE.format("job_desc.requeue == 1", "requeue is not allowed")),
    ),
    "requeue-refused": Habit(
        "a filter refuses jobs that ask for --requeue",
        settings=_LUA,
        files=_filter(
            _REFUSE.format("job_desc.requeue == 1", "do not use --requeue here"),
            _REFUSE.format("job_desc.requeue == 1", "requeue is not allowed"),
        ),
    ),
    "partition-requeue": _by_partition("REQUEUE", about="a partition preempts another one and requeues its jobs"),
    "partition-cancel": _by_partition("CANCEL", about="a partition preempts another one and cancels its jobs"),
    "partition-suspend": _by_partition(
        "SUSPEND,GANG",
        about="a partition preempts another one and suspends its jobs",
        more="PartitionName=DEFAULT OverSubscribe=FORCE:1\n",
    ),
    "typed-gpus": Habit(
        "GPUs have a type, and a filter refuses jobs that do not name it in --gres",
        settings=_LUA,
        files=_filter(
            _REFUSE.format(
                'not string.find(job_desc.tres_per_node or "", "gres.gpu:a100")', "name the GPU: --gres=gpu:a100:N"
            )
        ),
        gpu_type="a100",
    ),
    "gpu-3090": Habit("the type of the GPUs is a number", gpu_type="3090"),
    "gpus-per-task": Habit(
        "a filter refuses jobs without --gpus-per-task",
        settings=_LUA,
        files=_filter(_REFUSE.format("job_desc.tres_per_task == nil", "use --gpus-per-task")),
    ),
    "no-gres": Habit("Slurm knows of no GPUs", settings={"GresTypes": "", "AccountingStorageTRES": ""}, has_gres=False),
    "affinity": Habit(
        "tasks are bound to CPUs",
        settings={"TaskPlugin": "task/affinity", "SlurmdParameters": ""},
        is_real_size=True,
    ),
    "cgroup": Habit(
        "cgroups (version 1) hold jobs, their CPUs and their GPUs",
        settings={
            "ProctrackType": "proctrack/cgroup",
            "TaskPlugin": "task/affinity,task/cgroup",
            "SlurmdParameters": "",
        },
        files={
            "cgroup.conf": "CgroupMountpoint={state}/cgroup\nConstrainDevices=yes\nConstrainCores=yes\n",
        },
        on_node=_CGROUPS,
        # Numbers that no driver has: to open one says whether the cgroup would let a job.
        gpu_numbers=(120, 0),
        is_real_size=True,
    ),
    "interactive-step": Habit(
        "salloc gives a shell on the first node", settings={"LaunchParameters": "use_interactive_step"}
    ),
    "switches": Habit(
        "Slurm knows the network: half of the nodes on each of two switches",
        settings={"TopologyPlugin": "topology/tree"},
        files={
            "topology.conf": "SwitchName=leaf1 Nodes={first_half}\nSwitchName=leaf2 Nodes={second_half}\n"
            "SwitchName=spine Switches=leaf[1-2]\n"
        },
    ),
    "blocks": Habit(
        "Slurm (24.05 or newer) knows the network: half of the nodes in each of two blocks",
        settings={"TopologyPlugin": "topology/block"},
        files={
            "topology.conf": "BlockName=block1 Nodes={first_half}\nBlockName=block2 Nodes={second_half}\nBlockSizes=2\n"
        },
    ),
    "min-job-age": Habit("Slurm forgets a job 2 s after its end", settings={"MinJobAge": "2"}),
    "other-names": Habit(
        "NodeName, host name and DNS name of a node differ", names=Names("n{:03}", "blade{}", "gpu{}.cluster.example")
    ),
    "no-dns": Habit("nodes are known by NodeAddr alone", names=Names(dns="")),
    "fqdn": Habit("nodes are known by their full names", names=Names(*("gpu{}.cluster.example",) * 3)),
    "ipv6": Habit(
        "the network has no IPv4",
        settings={"CommunicationParameters": "NoCtldInAddrAny,EnableIPv6,DisableIPv4"},
        files={"slurmdbd.conf": "CommunicationParameters=EnableIPv6,DisableIPv4\n"},
        is_ipv6=True,
    ),
    "loopback-name": Habit(
        "a node resolves its own name to 127.0.1.1, as Debian writes it",
        on_node='sed "s/^[0-9.]*\\t$(hostname) /127.0.1.1\\t$(hostname) /" /etc/hosts >{state}/run/hosts.$(hostname)\n'
        "mount --bind {state}/run/hosts.$(hostname) /etc/hosts\n",
    ),
    "many-nodes": Habit(
        "Slurm knows 200 nodes, and all but those of `--nodes` are down",
        names=Names(slurm="rack1-n{:03}"),
        num_known=200,
    ),
    "slurm-user": Habit(
        "slurmctld and slurmdbd belong to the user slurm",
        settings={"SlurmUser": "slurm"},
        files={
            "slurmdbd.conf": "SlurmUser=slurm\nStorageUser=slurm\n",
            "mariadb.cnf": "init_file={conf}/users.sql\n",
            "users.sql": "CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED VIA unix_socket;\n"
            "GRANT ALL ON slurm_acct_db.* TO slurm@localhost;\n",
        },
        # munged wants the folders to be root's.
        before="mkdir {state}/spool/slurmctld\n"
        "touch {state}/log/slurmctld.log {state}/log/slurmdbd.log {state}/run/slurmctld.pid {state}/run/slurmdbd.pid\n"
        "chown slurm {state}/spool/slurmctld {state}/log/* {state}/run/* {conf}/slurmdbd.conf\n",
    ),
    "federation": Habit(
        "the cluster is one of a federation",
        after="sacctmgr --immediate --quiet add federation fed clusters=devcluster\n",
    ),
}


def combined(names: Sequence[str]) -> Habit:
    """Returns several habits as one.

    Raises:
        ClusterError: there is no habit of that name, or two of them want different names, devices or networks.
    """
    if unknown := [name for name in names if name not in HABITS]:
        raise ClusterError(f"--site {','.join(unknown)}: no such habit", hint=f"one of {', '.join(HABITS)}")
    found = [HABITS[name] for name in names]
    merged: dict[str, object] = {"about": "; ".join(habit.about for habit in found)}
    for field, plain in Habit._field_defaults.items():
        values = [getattr(habit, field) for habit in found if getattr(habit, field) != plain]
        if field == "settings":
            merged[field] = {key: text for value in values for key, text in value.items()}
        elif field == "files":
            files = dict.fromkeys(name for value in values for name in value)
            merged[field] = {name: "".join(value.get(name, "") for value in values) for name in files}
        elif field in ("partitions", "before", "on_node", "after", "ended"):
            merged[field] = type(plain)().join(values) if isinstance(plain, str) else sum(values, ())
        elif len(values) > 1:
            raise ClusterError(f"--site {','.join(names)}: two of them change {field}", hint="take one of them")
        else:
            merged[field] = values[0] if values else plain
    return Habit(**merged)  # type: ignore[arg-type]  # each of the type of its field
