"""Habits of other sites: what their clusters do otherwise, as data for a one-machine cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from slurm_train.errors import ClusterError
from slurm_train.tools.devcluster.plan import Habit, Names

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
        about=about,
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
        about="nothing keeps accounts: no sacct, no sacctmgr, no QOS",
        settings={**_NO_STORAGE, "PreemptType": "preempt/none", "PreemptMode": "OFF"},
        ended=("mariadbd", "slurmdbd"),
    ),
    "slurmdbd-away": Habit(about="slurmdbd has died", ended=("slurmdbd",)),
    "slurmdbd-hidden": Habit(
        about="nodes do not reach slurmdbd",
        settings={"AccountingStorageHost": "127.0.0.1"},
        files={"slurmdbd.conf": "DbdAddr=127.0.0.1\n"},
    ),
    "no-scontrol": Habit(about="nodes have no scontrol", on_node=_WITHOUT_SCONTROL),
    "no-requeue": Habit(
        about="a filter takes --requeue away from every job, and refuses to give it back",
        settings=_LUA,
        files=_filter("   job_desc.requeue = 0\n", _REFUSE.format("job_desc.requeue == 1", "requeue is not allowed")),
    ),
    "requeue-refused": Habit(
        about="a filter refuses jobs that ask for --requeue",
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
        about="GPUs have a type, and a filter refuses jobs that do not name it in --gres",
        settings=_LUA,
        files=_filter(
            _REFUSE.format(
                'not string.find(job_desc.tres_per_node or "", "gres.gpu:a100")', "name the GPU: --gres=gpu:a100:N"
            )
        ),
        gpu_type="a100",
    ),
    "gpu-3090": Habit(about="the type of the GPUs is a number", gpu_type="3090"),
    "gpus-per-task": Habit(
        about="a filter refuses jobs without --gpus-per-task",
        settings=_LUA,
        files=_filter(_REFUSE.format("job_desc.tres_per_task == nil", "use --gpus-per-task")),
    ),
    "no-gres": Habit(
        about="Slurm knows of no GPUs", settings={"GresTypes": "", "AccountingStorageTRES": ""}, has_gres=False
    ),
    "affinity": Habit(
        about="tasks are bound to CPUs",
        settings={"TaskPlugin": "task/affinity", "SlurmdParameters": ""},
        is_real_size=True,
    ),
    "cgroup": Habit(
        about="cgroups (version 1) hold jobs, their CPUs and their GPUs",
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
        about="salloc gives a shell on the first node", settings={"LaunchParameters": "use_interactive_step"}
    ),
    "switches": Habit(
        about="Slurm knows the network: half of the nodes on each of two switches",
        settings={"TopologyPlugin": "topology/tree"},
        files={
            "topology.conf": "SwitchName=leaf1 Nodes={first_half}\nSwitchName=leaf2 Nodes={second_half}\n"
            "SwitchName=spine Switches=leaf[1-2]\n"
        },
    ),
    "blocks": Habit(
        about="Slurm (24.05 or newer) knows the network: half of the nodes in each of two blocks",
        settings={"TopologyPlugin": "topology/block"},
        files={
            "topology.conf": "BlockName=block1 Nodes={first_half}\nBlockName=block2 Nodes={second_half}\nBlockSizes=2\n"
        },
    ),
    "min-job-age": Habit(about="Slurm forgets a job 2 s after its end", settings={"MinJobAge": "2"}),
    "other-names": Habit(
        about="NodeName, host name and DNS name of a node differ",
        names=Names("n{:03}", "blade{}", "gpu{}.cluster.example"),
    ),
    "no-dns": Habit(about="nodes are known by NodeAddr alone", names=Names(dns="")),
    "fqdn": Habit(about="nodes are known by their full names", names=Names(*("gpu{}.cluster.example",) * 3)),
    "ipv6": Habit(
        about="the network has no IPv4",
        settings={"CommunicationParameters": "NoCtldInAddrAny,EnableIPv6,DisableIPv4"},
        files={"slurmdbd.conf": "CommunicationParameters=EnableIPv6,DisableIPv4\n"},
        is_ipv6=True,
    ),
    "loopback-name": Habit(
        about="a node resolves its own name to 127.0.1.1, as Debian writes it",
        on_node='sed "s/^[0-9.]*\\t$(hostname) /127.0.1.1\\t$(hostname) /" /etc/hosts >{state}/run/hosts.$(hostname)\n'
        "mount --bind {state}/run/hosts.$(hostname) /etc/hosts\n",
    ),
    "many-nodes": Habit(
        about="Slurm knows 200 nodes, and all but those of `--nodes` are down",
        names=Names(slurm="rack1-n{:03}"),
        num_known=200,
    ),
    "slurm-user": Habit(
        about="slurmctld and slurmdbd belong to the user slurm",
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
    "second-cluster": Habit(about="the cluster is called `Second`", settings={"ClusterName": "Second"}),
    "federation": Habit(
        about="the cluster is one of a federation",
        after="sacctmgr --immediate --quiet add federation fed clusters=devcluster\n",
    ),
}


def combined(names: Sequence[str]) -> Habit:
    """Returns several habits as one; settings and lines of the later ones come last.

    Raises:
        ClusterError: there is no habit of that name, or two of them want different names, devices or networks.
    """
    unknown = [name for name in names if name not in HABITS]
    if unknown:
        raise ClusterError(f"--site {','.join(unknown)}: no such habit", hint=f"one of {', '.join(HABITS)}")
    habits = [HABITS[name] for name in names]
    merged: dict[str, object] = {"about": ", ".join(names)}
    for item in fields(Habit):
        usual = getattr(Habit(), item.name)
        values = [getattr(habit, item.name) for habit in habits if getattr(habit, item.name) != usual]
        if item.name == "about" or not values:
            continue
        if item.name == "settings":
            merged[item.name] = _joined_settings(values)
        elif item.name == "files":
            merged[item.name] = _joined_files(values)
        elif item.name in ("partitions", "before", "on_node", "after"):
            merged[item.name] = "".join(values)
        elif item.name == "ended":
            merged[item.name] = tuple(daemon for value in values for daemon in value)
        elif len(values) > 1:
            raise ClusterError(f"--site {','.join(names)}: two of them change {item.name}", hint="take one of them")
        else:
            merged[item.name] = values[0]
    return Habit(**merged)  # type: ignore[arg-type]  # each of the type of its field


def _joined_settings(values: Sequence[Mapping[str, str]]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for value in values:
        settings |= value
    return settings


def _joined_files(values: Sequence[Mapping[str, str]]) -> dict[str, str]:
    files: dict[str, str] = {}
    for value in values:
        for name, lines in value.items():
            files[name] = files.get(name, "") + lines
    return files
