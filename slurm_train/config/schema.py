"""The typed configuration of a run: every key a person may set, with its meaning, unit, range and default.

`build_config` makes these frozen values of plain mappings, strictly: no unknown key, no value out of its range, no
silent conversion. An int is accepted where a float is asked (YAML writes `lr: 1`), and "3e-4" as well, which YAML 1.1
reads as a string. Everything else that does not fit is a ConfigError that names the key, the value found and what is
asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from slurm_train.config.synonyms import advise
from slurm_train.errors import ConfigError

T = TypeVar("T")

LrRetune = Literal["none", "linear", "sqrt"]
Launch = Literal["slurm", "interactive", "local"]


class Bound(NamedTuple):
    """Which numbers a field takes."""

    least: float
    is_open: bool = False
    """Whether `least` itself is refused."""
    other: int | None = None
    """One number below that is taken as well."""

    def __str__(self) -> str:
        text = f"{'above' if self.is_open else 'at least'} {self.least:g}"
        return text if self.other is None else f"{text} (or {self.other})"

    def holds(self, value: float) -> bool:
        """Returns whether a field may have this value; NaN never."""
        return value == self.other or (value > self.least if self.is_open else value >= self.least)


Count = Annotated[int, Bound(1)]
Degree = Annotated[int, Bound(1, other=-1)]
Positive = Annotated[float, Bound(0, is_open=True)]

# Resolving annotations takes a millisecond for each class, and every word is checked against all of them.
_hints: Callable[[Any], dict[str, Any]] = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """Where a run lives and how it is called."""

    root: str = "runs"
    """Directory that holds all runs; on a cluster it must lie on a path that every node sees."""
    name: str | None = None
    """Folder below `root`; default "<model>-<data>" after the chosen config groups."""
    processes: Count | None = None
    """Local ranks when there is no cluster; default: one per GPU, else 2."""
    snapshot_limit_mb: Count = 100
    """Largest code snapshot (of each folder); more is refused, since it is data rather than code."""
    snapshot_folders: list[str] = field(default_factory=list)
    """Further folders that the run gets a copy of, e.g. ["../mylib"]: packages imported from outside this directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection:
    """Batch arithmetic: global = local x ranks x accumulation. Give any, the rest is solved."""

    local_size: Count | None = None
    """Samples per rank and micro-batch."""
    accumulation: Count | None = None
    """Micro-batches per optimizer step (gradient accumulation)."""
    global_size: Count | None = None
    """Samples per optimizer step over all ranks."""
    default_global_size: Count = 32
    """Global batch where none of the three is given, rounded to the nearest that the ranks can share."""
    shares: Literal["even", "measured"] | list[float] = "even"
    """Ranks' parts of a micro-batch: equal; by their speed, measured at each start; by weights of nodes or ranks."""
    by_length: bool = False
    """Batches of equal padded size, of samples of about equal length, which the data set tells; sizes are means."""
    pool: Count = 64
    """With `by_length`: global batches whose samples are sorted together. More: less padding, less mixing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSection:
    """AdamW, its schedule, and what happens to the learning rate when the global batch changes."""

    lr: float = 1e-3
    """Peak learning rate, tuned for `lr_global_size`."""
    lr_global_size: Count | None = None
    """Global batch that `lr` was tuned for; default: the run's own, so that nothing is retuned."""
    lr_retune: LrRetune = "none"
    """How `lr` follows a global batch other than `lr_global_size`: none, linear (SGD), sqrt (Adam)."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up; counted in samples, so it does not depend on how a batch is cut."""
    warmup_samples: int | None = None
    """Samples of linear warm-up; default 5 % of the run."""
    min_lr_ratio: float = 0.1
    """Last learning rate of the cosine as a fraction of the peak."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """Decay of AdamW's two moments."""
    eps: float = 1e-8
    """AdamW's denominator term."""
    weight_decay: float = 0.1
    """Decoupled decay, on matrices only (norms, biases and embeddings of one dimension are left alone)."""
    grad_clip_norm: float | None = 1.0
    """Largest global gradient norm, applied once per optimizer step; null switches clipping off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """The loop."""

    max_steps: Count = 1000
    """Optimizer steps of the whole run."""
    eval_every_steps: Count | None = None
    """Optimizer steps between evaluations; null: only at the end."""
    evaluate: bool = True
    """Whether the held-out samples are looked at, where there are some; false for a run that is only timed."""
    log_every_steps: Count = 10
    """Optimizer steps between lines of metrics.jsonl."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast type; auto is bfloat16 on a GPU that has it, else float32."""
    compile: bool = False
    """Passes the model through torch.compile."""
    deterministic: bool = False
    """Deterministic kernels: bitwise repeatable on the same hardware, slower."""
    samples_digest: bool = False
    """Logs an order-free digest of the sample indices that the ranks consumed, for proofs of exactness."""
    start_timeout_s: float = 600.0
    """Time-out of the rendezvous, and of what comes before the end of the first step (compile)."""
    steady_timeout_s: float = 300.0
    """Time-out of collectives after the first step, where nobody watches the ranks (`health.hang_timeout_s`)."""
    threads: Count | None = None
    """CPU threads of torch per rank; default: cores of this rank, at least 1."""
    init_from: str | None = None
    """Weights that the model starts with: a directory in the layout of transformers (for the shipped GPT in Llama's or
    GPT-2's form), or a safetensors file with the model's own names; null: drawn at random from `seed`."""
    sample_tokens: int = 0
    """Length of the text generated at the end of a run by models that can; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSection:
    """DistributedDataParallel."""

    bucket_cap_mb: float = 25.0
    """Size of a gradient bucket."""
    static_graph: bool = False
    """Promise that every step uses the same parameters."""
    comm: Literal["none", "bf16", "powersgd", "post_local_sgd"] = "none"
    """How gradients are exchanged, for slow networks: in full; in bfloat16; as thin matrices (PowerSGD); within each
    node only, with averages of the parameters now and then. All but none train a little differently."""
    comm_start_step: Annotated[int, Bound(0)] = 100
    """Steps that powersgd and post_local_sgd exchange in full at the beginning of a run."""
    powersgd_rank: Count = 2
    """Columns of PowerSGD's matrices: more are nearer to the gradients and more bytes."""
    average_every_steps: Count = 8
    """Optimizer steps between averages of the parameters with post_local_sgd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """When checkpoints are written and how many stay."""

    every_steps: Count | Literal["auto"] | None = 200
    """Optimizer steps between checkpoints; auto: what loses least time; null: only at a stop and at the end."""
    failure_every_h: Positive = 24.0
    """Hours between interruptions that `every_steps=auto` expects; the run's own ledger corrects it."""
    keep: Count = 2
    """Verified checkpoints that stay."""
    background: bool = True
    """Writes while training goes on, from a copy in host memory; false: training waits until all is on disk."""
    local_dir: str | None = None
    """Fast folder on each node's own disk for the periodic checkpoints, e.g. $SLURM_TMPDIR; a stop saves in the run."""
    local_keep: Count = 2
    """Checkpoints that stay on each node."""
    copy_every: Count = 5
    """Every so many of them are copied into the run directory, beside the training; 1: all."""
    save_timeout_s: Positive = 1800.0
    """Time-out of the ranks' exchanges in a background save; the slowest rank's disk has to be quicker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSection:
    """Steps that go wrong, ranks that hang, replicas that drift apart."""

    on_non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """What follows a NaN or infinite loss or gradient. Such a step is never applied; skip: the run goes on with the
    next batch; rollback: it goes back to the newest checkpoint and passes over the samples taken since."""
    spike_factor: Annotated[float, Bound(1, is_open=True)] | None = None
    """A loss above so many times the median of the last `spike_window` losses is a spike; null: not looked at."""
    spike_window: Count = 100
    """Losses that the median is taken over; before there are so many, nothing is a spike."""
    on_spike: Literal["log", "skip", "rollback", "stop"] = "log"
    """What follows a spike; only log lets the step be applied."""
    max_rollbacks: Count = 3
    """Rollbacks of the whole run; the next one stops it."""
    hang_timeout_s: Positive | None = 300.0
    """Seconds without progress that end ranks as hung; at first `train.start_timeout_s` if longer; null: never."""
    check_replicas_every_steps: Count | None = None
    """Optimizer steps between comparisons of the ranks' parameters, also made before each save; null: never."""
    pace_every_steps: Count | Literal["auto"] | None = "auto"
    """Optimizer steps between looks for stragglers; auto: about four a second, one in 64 steps at least; null: none."""
    straggler_excess: float = 0.1
    """A rank is a straggler if its own part of a step takes so much longer than the others' usually; 0.1: a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightSection:
    """The look at nodes and network before the ranks of a Slurm job train."""

    enabled: bool = True
    """Look; false: the ranks meet at once."""
    budget_s: Positive = 10.0
    """Seconds for what is asked once all ranks have come; what is not answered by then is left open."""
    collective_timeout_s: Positive = 60.0
    """Seconds that the first all_reduce of the ranks may take, once they have met."""
    bandwidth: bool = False
    """Also measures and compares how fast nodes compute and are connected; about a second for each node."""
    only: bool = False
    """Ends after the look; this is what `doctor +cluster=NxG` submits."""
    exclude_bad_nodes_h: Annotated[float, Bound(0)] = 4.0
    """Hours for which later submissions leave out a node that was found bad; 0: they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueSection:
    """Coming back after an interruption."""

    enabled: bool = True
    """Ask Slurm to run the job again after preemption, a time limit or a lost node."""
    warn_before_limit_s: Count | Literal["auto"] = "auto"
    """Lead of the warning signal before the time limit (Slurm may send it up to 60 s earlier); auto: from what the
    run's saves and steps have taken, 120 s before anything is measured. The ranks look at the clock themselves, too."""
    max_fruitless_failures: Count = 3
    """Failures in a row without a new checkpoint after which the run is left alone."""
    max_fruitless_returns: Count = 3
    """Time limits in a row without a new checkpoint after which the run is left alone; of lost nodes twice as many, of
    preemptions 30 times as many, since they say less about the run."""
    controller_patience_s: Count = 120
    """How long to go on asking while Slurm's controller does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSection:
    """Many runs from one command line (`--multirun`)."""

    max_parallel: Count | None = None
    """Runs of the sweep that may run at once; default: as many as Slurm has room for, one on this machine."""
    objective: str | None = None
    """Number of result.json that a sweeper which needs values gets; default: eval_loss, or loss without evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSection:
    """Weights & Biases (extra: wandb)."""

    project: str | None = None
    """Project that the run is logged to; null: W&B is not used. The key is read from WANDB_API_KEY or ~/.netrc."""
    entity: str | None = None
    """User or team; default: that of the key."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """auto: WANDB_MODE where it is set, else online with a key and offline without; `wandb sync` uploads the latter."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowSection:
    """MLflow (extra: mlflow)."""

    experiment: str | None = None
    """Experiment that the run is logged to; null: MLflow is not used."""
    uri: str | None = None
    """Server or store; default: MLFLOW_TRACKING_URI, else sqlite:///<run.root>/mlflow.db."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioSection:
    """trackio (extra: trackio)."""

    project: str | None = None
    """Project that the run is logged to; null: trackio is not used."""
    space_id: str | None = None
    """Hugging Face Space that shows it; null: trackio's own folder, see TRACKIO_DIR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackSection:
    """Trackers: who else gets the lines of metrics.jsonl."""

    tensorboard: bool = False
    """Writes TensorBoard events into the run directory (extra: track)."""
    wandb: WandbSection = field(default_factory=WandbSection)
    mlflow: MlflowSection = field(default_factory=MlflowSection)
    trackio: TrackioSection = field(default_factory=TrackioSection)
    timeout_s: float = 120.0
    """Longest that a tracker may take to start or to take some lines; then it is ended and started again later."""
    close_timeout_s: float = 15.0
    """Longest that a job waits for its trackers when its ranks have ended; what is left is sent later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """Degrees of parallelism; their product is the world size. One may be -1."""

    dp_replicate: Degree = -1
    """Data-parallel replicas (DDP, or the outer axis of HSDP)."""
    dp_shard: Degree = 1
    """Shards of the parameters (FSDP2), whose ranks read different samples."""
    tp: Degree = 1
    """Tensor parallel: parts of each matrix, on one node."""
    pp: Degree = 1
    """Pipeline stages; the micro-batches of `batch.accumulation` flow through them."""
    cp: Degree = 1
    """Context parallel: parts of each sequence; these ranks shard the parameters, too."""
    sequence_parallel: bool = False
    """Deals the positions of norms and residuals out among the ranks of `tp`: less memory, the same traffic or less."""
    allow_tp_across_nodes: bool = False
    """Lets a tensor-parallel group span nodes, where every layer waits for the network."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Computes activations again; selective keeps matrix products and attention, full only what enters each block."""
    stages_per_rank: Count = 1
    """Stages on each rank of a pipeline; more than one interleaves them: a smaller bubble, more traffic."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """Order of a pipeline's micro-batches: 1f1b keeps at most `pp` of them in memory, gpipe all."""
    gather_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that sharded parameters are gathered and computed in; float32 means the parameters' own."""
    cpu_offload: bool = False
    """Keeps sharded parameters, gradients and optimizer state in host memory, where they are updated: much slower."""
    reshard_after_forward: bool = True
    """Gives gathered parameters back between forward and backward pass; false: more memory, less traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """What Slurm is asked for, and what the job's environment needs."""

    nodes: Count | str = 1
    """Number of nodes; with `launcher=torchrun` also a range, "2-4": as many of them as Slurm has."""
    gpus_per_node: Count | list[Count] = 1
    """GPUs, and so ranks, on each node; a list for uneven nodes, in rank order, e.g. [4,2]."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """What starts the ranks: srun each of them, or srun one torchrun on each node, which restarts its ranks itself."""
    max_restarts: int = 3
    """How often torchrun starts failed ranks again before the step ends; only with `launcher=torchrun`."""
    cpus_per_gpu: int | None = None
    """CPU cores for each rank; default: what Slurm gives."""
    memory_gb_per_node: int | None = None
    """Memory of a node in GiB; 0 asks for all of it; default: the partition's."""
    memory_gb_per_gpu: int | None = None
    """Memory of a node in GiB for each of its GPUs, where `memory_gb_per_node` says nothing."""
    partition: str | None = None
    """Partition; default: Slurm's own default."""
    account: str | None = None
    """Account the time is charged to."""
    qos: str | None = None
    """Quality of service."""
    time_limit_min: int | None = None
    """Wall-clock limit of one attempt in minutes; default: the partition's."""
    nodelist: str | None = None
    """Nodes that must be part of the job, e.g. "node[1-4]"."""
    exclude: str | None = None
    """Nodes that must not be part of it."""
    constraint: str | None = None
    """Node features, e.g. "h100"."""
    gpu_flag: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How this site wants GPUs to be asked for; none: CPU ranks only."""
    gpu_type: str | None = None
    """Type of GPU as Slurm names it, e.g. "a100"; default: any."""
    network_interface: str | None = None
    """Interface of the collectives, e.g. "ib0"; sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""
    env: dict[str, Any] = field(default_factory=dict)
    """Variables exported in the job, e.g. {NCCL_DEBUG: INFO}."""
    export: list[str] = field(default_factory=list)
    """Further variables of the submitting shell that travel into the job, by name or pattern, e.g. ["WANDB_API_KEY",
    "MY_*"]. PATH, HOME, proxies and what tunes known libraries go anyway; a secret only by its full name."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the ranks start, e.g. ["module load cuda/12.4"]."""
    python: str | None = None
    """Interpreter in the job; default: the one that submits."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Further sbatch flags by their long names, e.g. {reservation: maint}; true: a flag without a value."""
    srun: dict[str, Any] = field(default_factory=dict)
    """Further srun flags, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSection:
    """An image that the ranks' Python runs in; everything else stays outside. Chosen by `container=NAME`."""

    kind: Literal["apptainer", "pyxis"]
    """Who runs the image: Apptainer (or Singularity) as a command, or pyxis (enroot) as a plugin of srun."""
    image: str
    """Path of the image on the nodes, or a name that `kind` understands, e.g. "docker://pytorch/pytorch"."""
    mounts: list[str] = field(default_factory=list)
    """Further paths that ranks see, "/path", "/path:/inside" or "/path:/inside:ro"; run, code and data are there."""
    python: str = "python3"
    """Interpreter inside the image."""
    command: str | None = None
    """Of apptainer: the program, e.g. "singularity"; default: apptainer."""
    flags: list[str] = field(default_factory=list)
    """Further words for `apptainer exec`; flags of pyxis are `cluster.srun.container_...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that decides a run. `model`, `data` and `task` are `_target_` mappings, open for your own code."""

    seed: int = 0
    launch: Launch = "slurm"
    run: RunSection = field(default_factory=RunSection)
    model: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    batch: BatchSection = field(default_factory=BatchSection)
    optim: OptimSection = field(default_factory=OptimSection)
    train: TrainSection = field(default_factory=TrainSection)
    ddp: DdpSection = field(default_factory=DdpSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    health: HealthSection = field(default_factory=HealthSection)
    preflight: PreflightSection = field(default_factory=PreflightSection)
    requeue: RequeueSection = field(default_factory=RequeueSection)
    sweep: SweepSection = field(default_factory=SweepSection)
    track: TrackSection = field(default_factory=TrackSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    cluster: ClusterSection | None = None
    site: str | None = None
    container: ContainerSection | None = None
    task: dict[str, Any] | None = None
    script: list[str] | None = None

    @property
    def trains(self) -> bool:
        """Whether the built-in trainer runs (not a user's own function or script)."""
        return self.task is None and self.script is None


def build_config(cls: type[T], values: Mapping[str, Any], *, path: str = "") -> T:
    """Returns an instance of a dataclass.

    Args:
        cls: the dataclass to build.
        values: its keys and values; missing keys take their defaults.
        path: dotted path of this mapping, for messages.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of its range.
    """
    hints = _hints(cls)
    for key in values:
        if key not in hints:
            raise unknown_key_error(f"{path}{key}", (f"{path}{name}" for name in hints), value=values[key])
    return cls(**{key: _convert(hints[key], value, f"{path}{key}") for key, value in values.items()})


def to_mapping(value: Any) -> Any:
    """Returns the plain mapping of a dataclass, for writing and hashing."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_mapping(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_mapping(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_mapping(item) for item in value]
    return value


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested mapping by dotted keys, e.g. {"optim.lr": 0.003}; an empty mapping stays a value."""
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mapping that `flat` was made of, e.g. {"optim": {"lr": 0.003}}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        functools.reduce(lambda holder, parent: holder.setdefault(parent, {}), parents, found)[last] = value
    return found


def unknown_key_error(key: str, known: Iterable[str], *, value: object = None) -> ConfigError:
    """Returns the error for a key that does not exist, with what other trainers mean by it, or the nearest that do.

    Args:
        key: as typed, e.g. "optim.learning_rate".
        known: the keys that there are.
        value: what was typed for it, for the hint.
    """
    hint = advise(key, value)
    if not hint:
        nearest = difflib.get_close_matches(key, list(known), n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "`--cfg job` prints every key"
    return ConfigError(f"there is no configuration key {key!r}", hint=hint)


@functools.cache
def all_keys(cls: type[Any], *, prefix: str = "") -> Mapping[str, Any]:
    """Returns the dotted names of all keys of a dataclass with their types, e.g. {"optim.lr": float}."""
    keys: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        keys[f"{prefix}{name}"] = hint
        for option in (hint, *get_args(hint)):
            if dataclasses.is_dataclass(option) and isinstance(option, type):
                keys |= all_keys(option, prefix=f"{prefix}{name}.")
    return keys


# How a type is called in messages, and an example of a value as it is typed.
_TYPES: Mapping[Any, tuple[str, str]] = {
    int: ("a whole number", "8"),
    float: ("a number", "1e-3"),
    str: ("a text", "text"),
    bool: ("true or false", "true"),
    list: ("a list", "[a,b]"),
    dict: ("a mapping", "{a:1}"),
    type(None): ("null", "null"),
}


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        candidates = [option for option in options if option is not type(None)]
        if len(candidates) == 1 and isinstance(value, (Mapping, list)):
            return _convert(candidates[0], value, path)
        for option in candidates:
            if option is str and not isinstance(value, str):
                continue  # a number was meant for another option, and is out of its range
            with contextlib.suppress(ConfigError):
                return _convert(option, value, path)
    elif origin is Annotated:
        with contextlib.suppress(ConfigError):
            if options[1].holds(number := _convert(options[0], value, path)):
                return number
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return build_config(hint, {str(key): item for key, item in value.items()}, path=f"{path}.")
    elif origin is dict and isinstance(value, Mapping):
        # Of a mapping of sections, one with nothing below it is null in YAML.
        empty: Any = {} if dataclasses.is_dataclass(options[1]) else None
        items = ((str(key), empty if item is None else item) for key, item in value.items())
        return {key: _convert(options[1], item, f"{path}.{key}") for key, item in items}
    elif origin is list and isinstance(value, (list, tuple)):
        return [_convert(options[0], item, f"{path}[{index}]") for index, item in enumerate(value)]
    elif hint is Any or type(value) is hint or (origin is Literal and value in options):
        return value
    elif hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            return float(value)
    elif hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    asked, example = _describe(hint)
    raise ConfigError(f"{path} must be {asked}, got {value!r}", hint=f'for example "{path}={example}"')


def _describe(hint: Any) -> tuple[str, str]:
    """Returns what a field takes and an example, e.g. ("a whole number, at least 1, or null", "8")."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        asked, example = _describe(options[0])
        return f"{asked}, {options[1]}", example
    if origin is Literal:
        return " or ".join(map(str, options)), str(options[0])
    if origin in (Union, types.UnionType):
        described = [_describe(option) for option in options]
        return ", or ".join(asked for asked, _ in described), described[0][1]
    return _TYPES.get(origin or hint, _TYPES[dict])
