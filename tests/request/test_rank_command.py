from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.plan.plan import RunPlan
from slurm_train.request.rank_command import RankCommand
from tests.support.plans import make_plan, render_script
from tests.support.refusals import refusal

GOLDEN = Path(__file__).parent / "golden"
HOST_PACKAGE = Path("/opt/venv/lib/python3.11/site-packages/slurm_train")
IMAGE: dict[str, Any] = {"kind": "apptainer", "image": "images/torch.sif"}
PYXIS: dict[str, Any] = {"kind": "pyxis", "image": "nvcr.io#nvidia/pytorch:24.12-py3"}


def planned(container: dict[str, Any], **sections: Any) -> RunPlan:
    data = {"_target_": "slurm_train.data.text.build", "path": "/shared/books", "context": 256}
    cluster = {"nodes": 2, "gpus_per_node": 4, "network_interface": "ib0", "export": ["WANDB_API_KEY", "MY_*"]}
    own = {"container": container, "cluster": cluster, "data": data, "run": {"root": "/scratch/me/runs"}}
    return make_plan("/home/me/project", **{**own, **sections})


def command(plan: RunPlan) -> list[str]:
    return RankCommand(plan.config, plan.run, plan.directory, HOST_PACKAGE).words(python="/usr/bin/python3")


def render(plan: RunPlan) -> str:
    return render_script(plan, default_python="/opt/venv/bin/python", package=HOST_PACKAGE)


GOLDENS = {
    "2x4_apptainer": {**IMAGE, "mounts": ["/datasets:/data:ro", "/local scratch"], "flags": ["--writable-tmpfs"]},
    "2x4_pyxis": {**PYXIS, "mounts": ["/datasets:/data:ro", "/scratch2"], "python": "/usr/bin/python"},
}


@pytest.mark.parametrize("name", GOLDENS)
def test_the_script_is_the_golden_file(name: str) -> None:
    # After a wanted change: print the new text, read the difference, and put it there.
    text = render(planned(GOLDENS[name]))
    assert text == (GOLDEN / f"{name}.sh").read_text(encoding="utf-8")
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_value_of_a_variable_is_on_a_command_line() -> None:
    plan = planned(PYXIS, cluster={"env": {"NCCL_DEBUG": "verbose-value"}, "export": ["WANDB_API_KEY", "MY_*"]})
    words = render(plan).partition("srun ")[2]
    assert "verbose-value" not in words
    names = words.partition("--container-env=")[2].split()[0].split(",")
    assert {"SLURM_TRAIN_ATTEMPT", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG", "WANDB_API_KEY"} <= set(names)
    assert "MY_*" not in names, "pyxis takes names alone"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mounts": ["data"]}, "container.mounts has 'data'"),
        ({"mounts": ["/a:/b:ro:x"]}, "container.mounts has '/a:/b:ro:x'"),
        ({"mounts": ["/a,/b"]}, "which a container cannot be given"),
        ({"mounts": ["/a\\b"]}, "which a container cannot be given"),
        ({"image": ""}, "container.image='' names no image"),
        ({"image": "a\nb"}, "container.image='a\\nb' names no image"),
    ],
)
def test_what_a_container_cannot_be_told_is_refused(change: dict[str, Any], message: str) -> None:
    assert message in refusal(ConfigError, render, planned({**IMAGE, **change})).message
    with pytest.raises(ConfigError, match="the run uses the path '/home/me/a:b', which a container cannot be given"):
        render(make_plan("/home/me/a:b", container=IMAGE, cluster={}, run={"root": "/scratch"}))


def test_flags_of_pyxis_are_not_given_twice() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.srun\.container_mounts and container"):
        render(planned(PYXIS, cluster={"srun": {"container_mounts": "/a:/a"}}))
    assert "--container-mount-home" in render(planned(PYXIS, cluster={"srun": {"container_mount_home": True}}))
