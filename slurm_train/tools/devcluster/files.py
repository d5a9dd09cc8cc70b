"""Writes what the daemons read: directories, configuration, the munge key, the GPU devices, the empty database."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from slurm_train.errors import ClusterError
from slurm_train.rundir.files import write_atomic
from slurm_train.tools.devcluster.commands import run_command
from slurm_train.tools.devcluster.plan import SYSTEM_SLURM_CONF, ClusterPlan
from slurm_train.tools.devcluster.processes import mark_environment
from slurm_train.tools.devcluster.render import (
    render_cgroup_conf,
    render_gres_conf,
    render_mariadb_conf,
    render_nsswitch_conf,
    render_slurm_conf,
    render_slurmdbd_conf,
)

_KEY_BYTES = 1024
# /dev/null's numbers: a device that exists everywhere and harms nothing when a job opens its "GPU".
_NULL_DEVICE = os.makedev(1, 3)
_SYSTEM_NSSWITCH = Path("/etc/nsswitch.conf")


def write_configuration(plan: ClusterPlan) -> None:
    """Writes every configuration file, the munge key and the GPU devices; makes the directories."""
    _make_directories(plan)
    texts = {
        "slurm.conf": render_slurm_conf(plan),
        "gres.conf": render_gres_conf(plan),
        "cgroup.conf": render_cgroup_conf(),
        "nsswitch.conf": render_nsswitch_conf(_SYSTEM_NSSWITCH.read_text() if _SYSTEM_NSSWITCH.exists() else ""),
        "mariadb.cnf": render_mariadb_conf(plan),
    }
    for name, text in texts.items():
        write_atomic(plan.conf_dir / name, text, durable=False, mode=0o644)
    secret = render_slurmdbd_conf(plan)
    write_atomic(plan.conf_dir / "slurmdbd.conf", secret, durable=False, mode=0o600)
    _write_key(plan.conf_dir / "munge.key")
    _make_devices(plan)


def require_own(directory: Path) -> None:
    """Refuses a directory that others prepared or may write: root's daemons would read what they put there.

    Raises:
        ClusterError: as said.
    """
    status = directory.lstat()
    is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or is_open:
        raise ClusterError(
            f"{directory} belongs to uid {status.st_uid} with mode {stat.filemode(status.st_mode)}: others could write "
            "what the daemons obey",
            hint="remove it, or name another place",
        )


def create_database(plan: ClusterPlan) -> None:
    """Creates mariadbd's data directory; root signs in by its uid, over the socket, without a password."""
    options = f"--defaults-file={plan.conf_dir}/mariadb.cnf"
    words = ["mariadb-install-db", options, "--auth-root-authentication-method=socket", "--skip-test-db"]
    run_command(words, extra=mark_environment(plan.state_dir), timeout_s=120)


def link_slurm_conf(plan: ClusterPlan) -> None:
    """Makes /etc/slurm/slurm.conf point to the cluster, so that every user's plain `sbatch` finds it."""
    SYSTEM_SLURM_CONF.parent.mkdir(parents=True, exist_ok=True)
    if not SYSTEM_SLURM_CONF.is_symlink():
        SYSTEM_SLURM_CONF.symlink_to(plan.slurm_conf)


def _make_directories(plan: ClusterPlan) -> None:
    public = (plan.conf_dir, plan.log_dir, plan.pid_dir, plan.run_dir, plan.spool_dir, plan.device_dir)
    for directory in public:
        directory.mkdir(exist_ok=True)
    plan.database_dir.mkdir(mode=0o700, exist_ok=True)


def _write_key(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(_KEY_BYTES))


def _make_devices(plan: ClusterPlan) -> None:
    for index in range(plan.gpus):
        path = plan.device_dir / f"gpu{index}"
        os.mknod(path, 0o666 | stat.S_IFCHR, _NULL_DEVICE)
        path.chmod(0o666)
