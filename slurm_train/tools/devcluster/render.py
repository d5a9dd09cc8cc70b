"""Configuration files of a plan as text. Pure: the same plan on the same controller gives the same bytes."""

from __future__ import annotations

from slurm_train.tools.devcluster.plan import CONTROLLER, ClusterPlan

_HEAD = "# Written by `slurm_train devcluster up`; gone after `down`.\n"
_CONTROLLER_PORT = 26817
_DATABASE_PORT = 26819


def render_slurm_conf(plan: ClusterPlan) -> str:
    """Returns slurm.conf."""
    sections = (_identity(plan), _scheduling(), _failure(), _accounting(plan), _logging(plan), _nodes(plan))
    return _HEAD + "\n".join("".join(f"{line}\n" for line in section) for section in sections)


def render_nsswitch_conf(text: str) -> str:
    """Returns the machine's nsswitch.conf with host names from /etc/hosts alone, for the nodes."""
    kept = [line for line in text.splitlines() if not line.startswith("hosts:")]
    return "\n".join([*kept, "hosts: files"]) + "\n"


def _identity(plan: ClusterPlan) -> list[str]:
    return [
        "ClusterName=devcluster",
        f"SlurmctldHost={CONTROLLER}({plan.controller_address})",
        # On the bridge alone (the name below resolves to it) and off the usual ports: others are not disturbed.
        "CommunicationParameters=NoCtldInAddrAny",
        f"SlurmctldPort={_CONTROLLER_PORT}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        "CryptoType=crypto/munge",
        # A requeued job waits for this window; Slurm's default would be 120 s.
        f"AuthInfo=cred_expire=5,socket={plan.munge_socket}",
        "MpiDefault=none",
        "MailProg=/bin/true",
        f"StateSaveLocation={plan.spool_dir}/slurmctld",
        f"SlurmdSpoolDir={plan.spool_dir}/%n",
        f"SlurmctldPidFile={plan.run_dir}/slurmctld.pid",
        f"SlurmdPidFile={plan.run_dir}/slurmd-%n.pid",
    ]


def _scheduling() -> list[str]:
    return [
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "GresTypes=gpu",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "PreemptType=preempt/qos",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
        "MinJobAge=300",
    ]


def _failure() -> list[str]:
    return [
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "SlurmdTimeout=20",
        "SlurmctldTimeout=20",
        "KillWait=5",
        # Many ranks that import at once on few cores make every answer late.
        "MessageTimeout=20",
        "BatchStartTimeout=60",
    ]


def _accounting(plan: ClusterPlan) -> list[str]:
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        f"AccountingStorageHost={plan.controller_address}",
        f"AccountingStoragePort={_DATABASE_PORT}",
        f"AccountingStoragePass={plan.munge_socket}",
        "AccountingStorageEnforce=associations,limits,qos",
        "AccountingStorageTRES=gres/gpu",
        "JobAcctGatherType=jobacct_gather/linux",
        "JobAcctGatherFrequency=10",
    ]


def _logging(plan: ClusterPlan) -> list[str]:
    return [
        f"SlurmctldLogFile={plan.log_dir}/slurmctld.log",
        f"SlurmdLogFile={plan.log_dir}/slurmd-%n.log",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
    ]


def _nodes(plan: ClusterPlan) -> list[str]:
    gres = f" Gres=gpu:{plan.gpus}" if plan.gpus else ""
    sockets = 2 if plan.cpus % 2 == 0 else 1
    shape = f"CPUs={plan.cpus} Sockets={sockets} CoresPerSocket={plan.cpus // sockets} ThreadsPerCore=1"
    lines = [
        f"NodeName={name} NodeAddr={plan.node_address(name)} {shape} RealMemory={plan.memory_mb}{gres}"
        for name in plan.node_names
    ]
    return [*lines, f"PartitionName=main Nodes={plan.nodelist} Default=YES DefaultTime=01:00:00 MaxTime=1-00:00:00"]


def render_gres_conf(plan: ClusterPlan) -> str:
    """Returns gres.conf; the GPUs are device files, since Slurm drains a node whose count has no files."""
    if plan.gpus == 0:
        return _HEAD
    last = "0" if plan.gpus == 1 else f"[0-{plan.gpus - 1}]"
    return f"{_HEAD}AutoDetect=off\nNodeName={plan.nodelist} Name=gpu File={plan.device_dir}/gpu{last}\n"


def render_cgroup_conf() -> str:
    """Returns cgroup.conf; nothing here uses cgroups, the line keeps slurmd from looking for version 2."""
    return f"{_HEAD}CgroupPlugin=cgroup/v1\n"


def render_slurmdbd_conf(plan: ClusterPlan) -> str:
    """Returns slurmdbd.conf, which must be readable by its user alone (mode 600)."""
    lines = [
        f"DbdHost={CONTROLLER}",
        f"DbdAddr={plan.controller_address}",
        f"DbdPort={_DATABASE_PORT}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={plan.munge_socket}",
        f"LogFile={plan.log_dir}/slurmdbd.log",
        f"PidFile={plan.run_dir}/slurmdbd.pid",
        "StorageType=accounting_storage/mysql",
        # libmariadb takes the socket from MYSQL_UNIX_PORT, and the server knows root by its uid.
        "StorageHost=localhost",
        "StorageUser=root",
        "StorageLoc=slurm_acct_db",
    ]
    return _HEAD + "".join(f"{line}\n" for line in lines)


def render_mariadb_conf(plan: ClusterPlan) -> str:
    """Returns the option file of mariadbd: a socket, no network, and little care for power loss."""
    lines = [
        "[server]",
        "user=root",
        f"datadir={plan.database_dir}",
        f"socket={plan.database_socket}",
        f"pid-file={plan.run_dir}/mariadb.pid",
        "skip-networking",
        "innodb_buffer_pool_size=64M",
        "innodb_log_file_size=16M",
        "innodb_lock_wait_timeout=900",
        "innodb_flush_log_at_trx_commit=0",
        "innodb_doublewrite=0",
        "performance_schema=0",
    ]
    return _HEAD + "".join(f"{line}\n" for line in lines)


def render_hosts(plan: ClusterPlan) -> dict[str, str]:
    """Returns host name -> address for the controller's bridge and every node."""
    nodes = {name: plan.node_address(name) for name in plan.node_names}
    return {CONTROLLER: plan.controller_address, **nodes}
