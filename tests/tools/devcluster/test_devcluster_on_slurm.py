"""What users get from a cluster that is up."""

from __future__ import annotations

import subprocess

import pytest

from slurm_train.tools.devcluster.cluster import cluster_status

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def output_of(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd="/")


def test_every_node_has_its_own_name_and_address_and_no_ipv6(slurm_cluster):
    ipv6 = "/proc/sys/net/ipv6/conf/all/disable_ipv6"
    show = f"echo $(hostname) $(ip -4 -brief address show eth0 | awk '{{print $3}}') $(cat {ipv6})"
    done = output_of("srun", "--nodes=4", "--ntasks-per-node=1", "sh", "-c", show)
    wanted = [f"{name} {slurm_cluster.addresses[name]}/24 1" for name in slurm_cluster.node_names[:4]]
    assert sorted(done.stdout.splitlines()) == wanted, done.stderr


def test_an_unprivileged_user_submits_and_sacct_remembers(slurm_cluster):
    words = ["sbatch", "--parsable", "--wait", "--output=/dev/null", "--wrap", "id -un"]
    done = output_of("runuser", "-u", "nobody", "--", *words)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    recorded = output_of("sacct", "--noheader", "--allocations", "--parsable2", "-j", job, "--format=user,state")
    assert recorded.stdout == "nobody|COMPLETED\n"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--qos=nonsense", "Invalid qos specification"),
        ("--partition=nonsense", "Invalid partition name specified"),
        ("--account=nonsense", "Invalid account or account/partition combination specified"),
        ("--gpus-per-node=17", "Requested node configuration is not available"),
    ],
)
def test_slurm_refuses_what_the_cluster_has_not(slurm_cluster, flag, message):
    done = output_of("sbatch", flag, "--wrap", "true")
    assert done.returncode == 1
    assert message in done.stderr


def test_no_mark_of_ours_reaches_a_job(slurm_cluster):
    done = output_of("srun", "env")
    assert "SLURM_TRAIN_DEVCLUSTER" not in done.stdout
    assert f"SLURM_CONF={slurm_cluster.slurm_conf}" in done.stdout.splitlines()


def test_status_is_readable_by_everybody(slurm_cluster):
    status = cluster_status(slurm_cluster.state_dir)
    assert status is not None
    assert status.is_healthy
    assert (slurm_cluster.conf_dir / "slurmdbd.conf").stat().st_mode & 0o777 == 0o600
    assert (slurm_cluster.conf_dir / "munge.key").stat().st_mode & 0o777 == 0o600
    assert slurm_cluster.slurm_conf.stat().st_mode & 0o777 == 0o644
