"""A run's share of a node that several runs use at a time (`sweep.pack`): GPUs, CPUs and memory.

Slurm cuts the shares where each run has GPUs of its own. It gives no part of a GPU, so runs that share GPUs
(`sweep.runs_per_gpu`) have steps that overlap, each with all GPUs and CPUs of the job, and every run keeps to its part
by itself. Read without torch, which has to see the share when it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_train.slurm.allocation import fewest_cpus
from slurm_train.slurm.devices import VISIBLE

PACK = "SLURM_TRAIN_PACK"
"""Variable that the batch script of a pack sets: "2/8" for the third of eight runs, "2/8/4" if they share four GPUs."""


@dataclass(frozen=True, slots=True)
class PackSlot:
    """A run's share of a node that several runs use at a time."""

    slot: int
    num_runs: int
    num_gpus: int | None = None
    """GPUs of the job, each of which several runs use; None: each run has GPUs of its own."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> PackSlot | None:
        """Returns the share of the run that has this environment; None where it has the whole job."""
        slot, slash, numbers = env.get(PACK, "").partition("/")
        if not slash:
            return None
        num_runs, _, num_gpus = numbers.partition("/")
        return cls(int(slot), int(num_runs), int(num_gpus) if num_gpus else None)

    def step_words(self, words: Sequence[str], env: Mapping[str, str], gpus: Mapping[str, str]) -> list[str]:
        """Returns the words of srun for a step that gets this share, and holds none of the others' up.

        Args:
            words: srun and its words, as for a job of the run's own.
            env: the job's environment.
            gpus: the flag by which the run asks for its GPUs, empty without any.
        """
        gpu_flags = dict(gpus) if self.num_gpus is None else times_gpus(gpus, self.num_gpus)
        # Without a number a step takes all that the job has, and the next one waits for it.
        flags = ["--exact", *(f"--{name}={value}" for name, value in gpu_flags.items())]
        memory_mb = env.get("SLURM_MEM_PER_NODE", "")
        if memory_mb.isdigit():
            # 0: all of the node's, for each.
            flags.append(f"--mem={int(memory_mb) // self.num_runs}")
        num_cpus = fewest_cpus(env)
        if self.num_gpus is not None:
            # Slurm would give all overlapping steps the same part, so each gets everything and takes its part itself.
            flags.insert(0, "--overlap")
            if num_cpus is not None:
                words = [word for word in words if not word.startswith("--cpus-per-task=")]
                flags.append(f"--cpus-per-task={num_cpus}")
        elif num_cpus is not None and not any(word.startswith("--cpus-per-task=") for word in words):
            num_tasks = next((int(word[9:]) for word in words if word.startswith("--ntasks=")), 1)
            flags.append(f"--cpus-per-task={max(1, num_cpus // (self.num_runs * num_tasks))}")
        return [words[0], *flags, *words[1:]]

    @property
    def gpu(self) -> int:
        """Position of the run's GPU among the job's; few runs in the last job of a sweep are spread over all."""
        return self.slot % (self.num_gpus or 1)

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that a step was given for all runs of its job, for the only rank of this run.

        Args:
            env: environment of the step's task.
        """
        changed: dict[str, str] = {}
        for name in VISIBLE:
            devices = [device.strip() for device in env.get(name, "").split(",") if device.strip()]
            if len(devices) == self.num_gpus:
                changed[name] = devices[self.gpu]
        if "SLURM_GPUS_ON_NODE" in env:
            changed["SLURM_GPUS_ON_NODE"] = "1"
        num_cpus = env.get("SLURM_CPUS_ON_NODE", "")
        if num_cpus.isdigit():
            changed["SLURM_CPUS_PER_TASK"] = str(max(1, int(num_cpus) // self.num_runs))
        return changed

    def cpus(self, cores: Sequence[Collection[int]]) -> set[int]:
        """Returns this run's CPUs: whole cores, those of runs on the same GPU side by side.

        Args:
            cores: the CPUs of each core that the job has here.
        """
        num_gpus = self.num_gpus or 1
        runs_per_gpu = -(-self.num_runs // num_gpus)
        position = self.gpu * runs_per_gpu + self.slot // num_gpus
        # Every GPU has room for as many runs, also one that has fewer.
        num_parts = num_gpus * runs_per_gpu
        if len(cores) < num_parts:
            return set(cores[position % len(cores)])
        first = position * len(cores) // num_parts
        end = (position + 1) * len(cores) // num_parts
        return {cpu for core in cores[first:end] for cpu in core}


def times_gpus(gpus: Mapping[str, str], num_gpus: int) -> dict[str, str]:
    """Returns the flag that asks for one GPU as the flag that asks for this number of them on one node.

    Args:
        gpus: e.g. {"gres": "gpu:a100:1"}; empty where none is asked for.
        num_gpus: of the node.
    """
    gpu_flags: dict[str, str] = {}
    for name, value in gpus.items():
        kind, colon, _ = value.rpartition(":")
        # Several tasks, or one, cannot have a part of a GPU each.
        gpu_flags["gpus-per-node" if name == "gpus-per-task" else name] = f"{kind}{colon}{num_gpus}"
    return gpu_flags


def enter_slot(env: Mapping[str, str], *, sys: Path = Path("/sys")) -> dict[str, str]:
    """Keeps this process to its run's part of GPUs that runs share; returns the variables that say so, or none.

    What it starts later inherits both. To be called once, before threads exist and before torch is imported.

    Args:
        env: environment of the step's task.
        sys: where the kernel shows its CPUs.
    """
    slot = PackSlot.from_env(env)
    if slot is None or slot.num_gpus is None:
        return {}
    os.sched_setaffinity(0, slot.cpus(_cores(os.sched_getaffinity(0), sys)))
    return slot.variables(env)


def _cores(cpus: Collection[int], sys: Path) -> list[list[int]]:
    """Returns the CPUs by core; each is a core of its own where the kernel does not say which belong together."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        try:
            core = (sys / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            core = f"cpu{cpu}"
        cores.setdefault(core, []).append(cpu)
    return list(cores.values())
