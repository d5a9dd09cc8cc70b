"""The GPUs that an environment names, and those that the files of the drivers show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_train.slurm.devices import Gpu, installed_gpus, visible_gpus
from tests.support.devices import make_devices


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "2,-1,3"}, ["2"]),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, ["0", "1"]),
        ({"HIP_VISIBLE_DEVICES": "GPU-ab"}, ["GPU-ab"]),
        ({"ZE_AFFINITY_MASK": "0.0,0.1"}, ["0.0", "0.1"]),
        ({"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": "0"}, []),
        ({"ROCR_VISIBLE_DEVICES": "NoDevFiles"}, []),
    ],
)
def test_the_variables_of_all_vendors_name_gpus(env: Mapping[str, str], names: list[str] | None) -> None:
    assert visible_gpus(env) == names


@pytest.mark.parametrize(
    ("files", "gpus"),
    [
        ({"nvidia0": "", "nvidiactl": ""}, [Gpu("NVIDIA", "nvidia0")]),
        ({"kfd": "", "dri/renderD128": "0x1002 0x120000"}, [Gpu("AMD", "renderD128")]),
        ({"dri/renderD128": "0x1002 0x120000"}, []),
        ({"kfd": "", "dri/renderD128": "0x1002 0x030000"}, []),
        ({"dri/renderD129": "0x8086 0x038000"}, [Gpu("Intel", "renderD129")]),
        ({"dri/renderD128": "0x8086 0x030000"}, []),
        ({"dri/renderD128": "0x1af4 0x038000", "dri/card0": "0x8086 0x038000"}, []),
        ({"dri/renderD128": ""}, []),
    ],
    ids=["NVIDIA", "Instinct", "without ROCm's driver", "Radeon", "Max", "a laptop's", "a virtual card", "hidden"],
)
def test_gpus_for_training_are_seen_by_their_drivers_files(
    files: Mapping[str, str], gpus: list[Gpu], tmp_path: Path
) -> None:
    devices, sys = make_devices(tmp_path, files)
    assert installed_gpus(devices=devices, sys=sys) == gpus
