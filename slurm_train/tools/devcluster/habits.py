"""Habits of sites: what other clusters do otherwise than this one, each under a name, as changes of its configuration.

A habit is data: settings of slurm.conf, lines of other files, names of the nodes, and shell lines for what no file of
Slurm's can say. Every text may name {state}, {conf}, {controller}, {nodelist} and {gpus}; a brace of its own is
doubled. Several habits together are applied in the order in which they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slurm_train.errors import ClusterError

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
    merged: dict[str, object] = {"about": "; ".join(one.about for one in found)}
    for field, plain in Habit._field_defaults.items():
        values = [getattr(one, field) for one in found if getattr(one, field) != plain]
        if field == "settings":
            merged[field] = {key: text for one in values for key, text in one.items()}
        elif field == "files":
            files = dict.fromkeys(name for one in values for name in one)
            merged[field] = {name: "".join(one.get(name, "") for one in values) for name in files}
        elif field in ("partitions", "before", "on_node", "after", "ended"):
            merged[field] = type(plain)().join(values) if isinstance(plain, str) else sum(values, ())
        elif len(values) > 1:
            raise ClusterError(f"--site {','.join(names)}: two of them change {field}", hint="take one of them")
        else:
            merged[field] = values[0] if values else plain
    return Habit(**merged)  # type: ignore[arg-type]  # each of the type of its field
