"""The typed configuration of a run: every key a person may set, with its meaning, unit, range and default.

`build_config` makes these frozen values of plain mappings, strictly: no unknown key, no value out of its range, no
silent conversion. An int is accepted where a float is asked (YAML writes `lr: 1`), and "3e-4" as well, which YAML 1.1
reads as a string. Everything else that does not fit is a ConfigError that names the key, the value found and what is
asked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import re
import shlex
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from slurm_train.config.synonyms import EXPORT_WORDS, OTHER_VALUES, advise
from slurm_train.errors import ConfigError

T = TypeVar("T")

LrRetune = Literal["none", "linear", "sqrt"]
Launch = Literal["slurm", "interactive", "local"]


class Bound(NamedTuple):
    """Which numbers a field takes."""

    least: float
    is_open: bool = False
    """Whether `least` itself is refused."""
    sentinel: int | None = None
    """One number below that is taken as well."""
    most: float = float("inf")

    def __str__(self) -> str:
        text = f"{'above' if self.is_open else 'at least'} {self.least:g}"
        text += "" if self.most == float("inf") else f" and at most {self.most:g}"
        return text if self.sentinel is None else f"{text} (or {self.sentinel})"

    def holds(self, value: float) -> bool:
        """Returns whether a field may have this value; NaN never."""
        is_large_enough = value > self.least if self.is_open else value >= self.least
        return value == self.sentinel or (is_large_enough and value <= self.most)


Count = Annotated[int, Bound(1)]
NonNegativeInt = Annotated[int, Bound(0)]
PositiveOrAuto = Annotated[int, Bound(1, sentinel=-1)]
Positive = Annotated[float, Bound(0, is_open=True)]
NonNegative = Annotated[float, Bound(0)]
Fraction = Annotated[float, Bound(0, most=1)]

KEYWORDS = "keywords"
"""Field of a section that takes keys which no other field has; in mappings they are at the same level as the others."""

# Resolving annotations takes a millisecond for each class, and every word is checked against all of them.
type_hints_of: Callable[[Any], dict[str, Any]] = functools.cache(
    functools.partial(typing.get_type_hints, include_extras=True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """Where a run is stored, and its name."""

    root: str = "runs"
    """Directory of all runs; on a cluster every node must see this path. If others may write to it, your runs are in
    the folder `@<user>` there."""
    name: str | None = None
    """Folder below `root`; default "<model>-<data>", the names of the chosen files."""
    share: Literal["private", "group"] = "private"
    """group: the Unix group of `root` may read the run; `root` must be set up for it (`chmod g+rxs`)."""
    processes: Count | None = None
    """Local ranks when there is no cluster; default: one per GPU, else 2."""
    snapshot_limit_mb: Count = 100
    """Largest copy of the code (of each folder) in MiB; a larger folder is refused, since it probably holds data."""
    snapshot_folders: list[str] = field(default_factory=list)
    """Further folders to copy, e.g. ["../mylib"], for packages that are outside of the current directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSection:
    """Batch arithmetic: global = local x ranks x accumulation. Set any of them, the rest is computed."""

    local_size: Count | None = None
    """Samples per rank and micro-batch, at most."""
    accumulation: Count | None = None
    """Micro-batches per optimizer step (gradient accumulation)."""
    global_size: Count | None = None
    """Samples per optimizer step over all ranks."""
    default_global_size: Count = 32
    """Global batch if none of the three is set, rounded to the nearest size that the ranks can share, in micro-batches
    of at most 32. A model's file may name its own."""
    growth: dict[str, Count] = field(default_factory=dict)
    """Global batches of a step, by the steps before it, e.g. {1000: 2, 3000: 4}: two from step 1001 on."""
    shares: Literal["even"] | list[float] = "even"
    """Samples of a global batch per rank: even, or by weights of nodes or ranks, e.g. [2,1]."""
    by_length: bool = False
    """Batches of similar lengths, padded alike (needs `lengths` of the data set); batch sizes become averages."""
    pool: Count = 64
    """With `by_length`: global batches whose samples are sorted together. More: less padding, less mixing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """An entry of `optim.groups`: which parameters, and what is different for them."""

    match: str | list[str] = field(default_factory=list)
    """Patterns of parameter names, e.g. "*embed*"; empty: all."""
    dims: int | list[int] = field(default_factory=list)
    """Numbers of dimensions, e.g. [0, 1] for scalars and vectors; empty: all."""
    lr: Positive | None = None
    """Peak learning rate in place of `optim.lr`."""
    lr_scale: NonNegative = 1.0
    """The same as a multiple of `optim.lr`."""
    weight_decay: NonNegative | None = None
    _target_: str | None = None
    """Another optimizer for these."""
    keywords: dict[str, Any] = field(default_factory=dict)

    def fits(self, name: str, *, dims: int | None = None) -> bool:
        """Returns whether it is for a parameter of this name and, if given, so many dimensions."""
        patterns = [self.match] if isinstance(self.match, str) else self.match
        counts = [self.dims] if isinstance(self.dims, int) else self.dims
        is_named = not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        return is_named and (dims is None or not counts or dims in counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimSection:
    """The optimizer, its schedule, and what happens to the learning rate when the global batch changes."""

    _target_: str = "torch.optim.AdamW"
    """Class of the optimizer, of torch or a package; other keys of this section that it takes are its keywords, e.g.
    `optim._target_=torch.optim.SGD optim.lr=0.1 optim.momentum=0.9`."""
    lr: NonNegative = 3e-3
    """Peak learning rate, tuned for `lr_global_size`."""
    lr_global_size: Count | None = None
    """Global batch that `lr` was tuned for; default: that of the run, so `lr` is not changed."""
    lr_retune: LrRetune = "none"
    """How `lr` is scaled if the global batch is not `lr_global_size`: none, linear (SGD), sqrt (Adam)."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] | dict[str, Any] = "cosine"
    """Shape after the warm-up, counted in samples, so it does not depend on how a batch is split; wsd is constant, then
    linear at the end. `optim.schedule._target_=my_package.my_schedule`: a function of your own, warm-up included."""
    warmup_samples: NonNegativeInt | None = None
    """Samples of linear warm-up; default 5 % of the run."""
    decay_samples: NonNegativeInt | None = None
    """Samples of the linear decay at the end of wsd; default 20 % of the run."""
    min_lr_ratio: Fraction = 0.1
    """Lowest learning rate after the warm-up, as a fraction of the peak."""
    betas: list[NonNegative] = field(default_factory=lambda: [0.9, 0.95])
    """Decay rates of the two moments, for a class that takes `betas` and `eps`."""
    eps: NonNegative = 1e-8
    """Term that such a class adds to the denominator."""
    weight_decay: NonNegative = 0.1
    """Weight decay of parameters with two or more dimensions (not of norms and biases)."""
    grad_clip_norm: Positive | None = 1.0
    """Largest global gradient norm, applied once per optimizer step; null switches clipping off."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Rules for some parameters, of which the first that fits counts. `match` (patterns of names, e.g. "*embed*") and
    `dims` (numbers of dimensions) say which; `lr` or `lr_scale`, `weight_decay`, `_target_` and its keywords say
    what is different."""
    keywords: dict[str, Any] = field(default_factory=dict)
    """The keys of the section that are none of the above."""

    def __post_init__(self) -> None:
        """Refuses rules that are not understood, rates of groups of an `lr` of 0, and a fall from nothing."""
        if self.schedule == "inverse_sqrt" and self.warmup_samples == 0:
            raise ConfigError(
                "optim.schedule=inverse_sqrt falls with the root of warmup_samples / samples, and was asked with "
                "optim.warmup_samples=0: the first step would already have the lowest rate",
                hint="drop optim.warmup_samples (5 % of the run), or set it to steps x global batch",
            )
        for index, rule in enumerate(self.rules()):
            if rule.lr is not None and not self.lr:
                raise ConfigError(
                    f"optim.groups[{index}].lr={rule.lr:g} was asked with optim.lr=0, of which the schedule gives each "
                    "group a multiple",
                    hint=f"to train these parameters alone: optim.lr={rule.lr:g}, and {{lr_scale: 0}} as the last of "
                    "optim.groups, for all others",
                )

    def rules(self) -> list[GroupRule]:
        """Returns `groups` as values.

        Raises:
            ConfigError: a value that does not fit.
        """
        return [
            build_config(GroupRule, group, path=f"optim.groups[{index}].") for index, group in enumerate(self.groups)
        ]

    def num_kept(self, name: str, *, dims: int) -> int:
        """Returns how many numbers the optimizer keeps for each one of a parameter; two where it is not known."""
        rule = next((rule for rule in self.rules() if rule.fits(name, dims=dims)), GroupRule())
        target = rule._target_ or self._target_
        keywords = self.keywords if target == self._target_ else {}
        if target == "torch.optim.SGD":
            return 1 if {**keywords, **rule.keywords}.get("momentum") else 0
        return 1 if target == "torch.optim.Muon" else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """The training loop."""

    max_steps: Count = 300
    """Optimizer steps of the whole run."""
    max_epochs: Positive | None = None
    """Passes over the training samples, in place of `max_steps`; rounded up to whole steps."""
    eval_every_steps: Count | None = 100
    """Optimizer steps between evaluations; null: only at the end."""
    eval_max_batches: Count | None = None
    """Largest evaluation, in global batches, of samples that are spread over the held-out ones; null: all of them."""
    evaluate: bool = True
    """Whether held-out samples are evaluated, if there are any; false for a run that is only timed."""
    log_every_steps: Count = 10
    """Optimizer steps between lines of metrics.jsonl."""
    precision: Literal["auto", "float32", "tf32", "bfloat16", "float16", "fp8"] = "auto"
    """Autocast type; float16 uses dynamic loss scaling. tf32: float32, but GPUs (Ampere and later) multiply with
    10 bits of each mantissa, up to eight times as fast; float32 multiplies exactly. fp8: bfloat16, but the matrix
    products of blocks are in float8 (extra: fp8; GPUs of Ada, Hopper and later). auto is the fastest that all GPUs of
    the run have: bfloat16 (Ampere and later), float16 (Volta, Turing), else float32; on CPUs float32."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters, and with it that of gradients, moments and checkpoints. bfloat16 takes half of the memory
    and computes in bfloat16 everywhere, but small updates are rounded away."""
    compile: bool | Literal["auto"] = "auto"
    """Compiles model and loss with torch.compile; auto: on GPUs. The first step of each attempt then takes longer."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """Mode of torch.compile; the other one times several kernels for each product: minutes more in the first step."""
    deterministic: bool = False
    """Uses deterministic kernels, and one algorithm of NCCL: repeatable bit for bit on the same hardware and software,
    but slower. Without it, attention and additions in parallel may round differently on a GPU from run to run."""
    samples_digest: bool = False
    """Logs a digest of the sample indices that the ranks used (independent of their order), for tests of exactness."""
    start_timeout_s: Positive = 600.0
    """Time-out of the rendezvous, and of the time until the end of the first step (compilation)."""
    steady_timeout_s: Positive = 300.0
    """Time-out of collectives after the first step, if there is no hang watchdog (`health.hang_timeout_s`)."""
    threads: Count | None = None
    """CPU threads of torch per rank; default: cores of this rank, at least 1."""
    init_from: str | None = None
    """Initial weights: a directory in the format of transformers (for the included GPT in Llama's or GPT-2's form), or
    a safetensors file with the model's own parameter names, or a repository of the Hub (`org/name@REVISION`);
    null: random weights from `seed`."""
    evaluate_from: str | None = None
    """A save of a run that is evaluated, and nothing is trained: `checkpoints/checkpoint_<step>_<save id>`, whoever
    owns it by then, or the path of a checkpoint; `evaluate` and `generate` set it."""
    evaluate_data: str | None = None
    """Fingerprint of the held-out samples that `evaluate_from` is measured on; `evaluate` sets it. Other samples are
    another evaluation."""
    generate: dict[str, Any] | None = None
    """Texts that `evaluate_from` continues, and how, in place of the evaluation; `generate` sets it."""
    follow: str | None = None
    """Scores every checkpoint of the folder `evaluate_from` as it appears, until the run there is over; the text is the
    name of the scores, "" for none. `evaluate --follow` sets it."""
    sample_tokens: NonNegativeInt = 200
    """Length of the text that is generated at the end of a run, if the model can generate; 0: none."""

    def compiles(self, *, on_gpu: bool) -> bool:
        """Returns what `compile` means on such devices."""
        return on_gpu if self.compile == "auto" else self.compile


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpSection:
    """DistributedDataParallel."""

    bucket_cap_mb: Positive = 25.0
    """Size of a gradient bucket in MiB."""
    static_graph: bool = False
    """Promise that every step uses the same parameters."""
    find_unused_parameters: bool = False
    """Looks in every step for parameters that its loss does not depend on; DDP stops a run that has them otherwise."""
    comm: Literal["none", "bf16"] = "none"
    """How gradients are sent: in full, or rounded to bfloat16, which halves the bytes and changes the result
    slightly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSection:
    """When checkpoints are written and how many are kept."""

    every_steps: Count | Literal["auto"] | None = 100
    """Optimizer steps between checkpoints; auto: what loses least time; null: only at a stop and at the end."""
    failure_every_h: Positive = 24.0
    """Hours between interruptions that `every_steps=auto` assumes; it is updated from the interruptions of the run."""
    keep: Count = 2
    """Number of verified checkpoints to keep."""
    background: bool = True
    """Writes during training, from a copy in host memory; false: training waits until everything is on disk."""
    local_dir: str | None = None
    """Folder on each node's local disk for periodic checkpoints, e.g. $SLURM_TMPDIR; a stop uses the run directory."""
    local_keep: Count = 2
    """Number of checkpoints to keep on each node."""
    copy_every: Count = 5
    """Every n-th local checkpoint is copied into the run directory in the background; 1: all."""
    save_timeout_s: Positive = 1800.0
    """Time-out of a save; it must be longer than the save of the slowest rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSection:
    """Steps with NaN or spikes, ranks that hang or are slow, replicas that differ."""

    on_non_finite: Literal["stop", "skip", "rollback"] = "stop"
    """What to do after a NaN or infinite loss or gradient. The step is never applied; skip: continue with the next
    batch; rollback: load the newest checkpoint and skip the samples used since then."""
    spike_factor: Annotated[float, Bound(1, is_open=True)] | None = None
    """A loss above this factor times the median of the last `spike_window` losses is a spike; null: no check."""
    spike_window: Count = 100
    """Number of losses for the median; before there are that many, nothing is a spike."""
    on_spike: Literal["log", "skip", "rollback", "stop"] = "log"
    """What to do after a spike; the step is applied only with log."""
    max_rollbacks: Count = 3
    """Largest number of rollbacks of a run; the next one stops it."""
    hang_timeout_s: Positive | None = 300.0
    """Seconds without progress until ranks count as hung; null: off. If longer, `train.start_timeout_s` counts at the
    start and `checkpoint.save_timeout_s` in a save. For your own script or function: seconds without a sign of life."""
    check_replicas_every_steps: Count | None = None
    """Optimizer steps between comparisons of the parameters of all replicas, also before each save; null: never."""
    pace_every_steps: Count | Literal["auto"] | None = "auto"
    """Steps between measurements for stragglers; auto: about four per second, at least every 64 steps; null: off."""
    straggler_excess: Positive = 0.1
    """A rank is a straggler if its own part of a step takes this fraction longer than that of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightSection:
    """Checks of nodes and network before the ranks of a Slurm job train."""

    enabled: bool = True
    """Whether the checks are made."""
    budget_s: Positive = 10.0
    """Seconds for the checks after all ranks have connected; checks that take longer are skipped."""
    collective_timeout_s: Positive = 60.0
    """Seconds that the first all_reduce of the ranks may take."""
    bandwidth: bool = False
    """Also measures and compares compute speed and network speed of nodes: about a second, with GPUs up to a minute."""
    only: bool = False
    """Ends after the checks; `doctor +cluster=NxG` sets it."""
    exclude_bad_nodes_h: NonNegative = 4.0
    """Hours for which later submissions exclude a bad node; 0: they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueSection:
    """Restarts after an interruption."""

    enabled: bool = True
    """Ask Slurm to run the job again after preemption, a time limit or a lost node."""
    warn_before_limit_s: Count | Literal["auto"] = "auto"
    """Lead of the warning signal before the time limit (Slurm may send it up to 60 s earlier); auto: from what the
    run's saves and steps have taken, 120 s before anything is measured. The ranks look at the clock themselves, too."""
    max_failures_without_progress: Count = 3
    """Failures in a row without a new checkpoint after which the run is not restarted."""
    max_returns_without_progress: Count = 3
    """Time limits in a row without a new checkpoint after which the run is not restarted; twice as many for lost nodes,
    30 times as many for preemptions, since these say less about the run."""
    controller_timeout_s: Count = 120
    """Seconds to retry while Slurm's controller does not answer."""
    notify_after: Count = 3
    """With `notify`: how often the run may come back after an interruption before a message says so, once."""
    warm_ranks: bool = False
    """Keep a second process for each rank, which has imported torch and waits: ranks that fail are started again in
    these. A process takes some 0.3 GB of host memory."""
    grow_every_min: Count | Literal["auto"] | None = "auto"
    """A run of a range of nodes that has fewer than the most asks at a save, at most so often, whether Slurm would give
    it more now, and is requeued for them where that pays. auto: 30, and never where jobs are preempted; null: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnResumeSection:
    """The resume that a script has itself: [used as that of the run](scripts.md#the-scripts-own-resume)."""

    words: list[str] = field(default_factory=list)
    """`own_resume.words=[--resume,latest]`: words that the script gets from its second start on, where it has saved a
    checkpoint. `{checkpoint}` is the newest one, `{folder}` the folder that it is in, `{step}` the last number in its
    name."""
    checkpoints: str | None = None
    """Where the script saves, e.g. '$SLURM_TRAIN_RUN_DIR/out/ckpt_*.pt': files or folders; `*` is any part of a name,
    `**` any folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSection:
    """Many runs from one command line (`--multirun`)."""

    max_parallel: Count | None = None
    """Largest number of runs at the same time; default: no limit on a cluster, one on this machine."""
    pack: Count = 1
    """Runs that share one job on one node, side by side, each with its own GPUs; for sites that give whole nodes."""
    runs_per_gpu: Count = 1
    """With `sweep.pack`, for runs of one GPU each: so many share a GPU and its memory, each with CPUs of its own."""
    objective: str | None = None
    """Key of result.json that a sweeper optimizes; default: eval_loss, or loss where nothing was evaluated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbSection:
    """Weights & Biases (extra: wandb)."""

    project: str | None = None
    """Project that the run is logged to; null: W&B is not used. The key is read from WANDB_API_KEY or ~/.netrc."""
    entity: str | None = None
    """User or team; default: that of the API key."""
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
    """Trackers: where the lines of metrics.jsonl are also sent."""

    tensorboard: bool = False
    """Writes TensorBoard events into the run directory (extra: tensorboard)."""
    wandb: WandbSection = WandbSection()
    mlflow: MlflowSection = MlflowSection()
    trackio: TrackioSection = TrackioSection()
    timeout_s: Positive = 120.0
    """Seconds that a tracker may take to start or to accept lines; then it is ended and started again later."""
    close_timeout_s: NonNegative = 15.0
    """Seconds that a job waits for its trackers after its ranks have ended; missing lines are sent later."""

    @property
    def tracker_names(self) -> list[str]:
        """The trackers that are switched on; a tracker is named after its package, e.g. ["tensorboard", "wandb"]."""
        switches = {
            "tensorboard": self.tensorboard,
            "wandb": self.wandb.project is not None,
            "mlflow": self.mlflow.experiment is not None,
            "trackio": self.trackio.project is not None,
        }
        return [name for name, is_on in switches.items() if is_on]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """Degrees of parallelism; their product is the number of ranks. One may be -1: it is computed."""

    dp_replicate: PositiveOrAuto = -1
    """Data-parallel replicas (DDP, or the outer axis of HSDP)."""
    dp_shard: PositiveOrAuto | Literal["auto"] = "auto"
    """Shards of the parameters (FSDP2), whose ranks read different samples; auto: 1, unless the included GPT would not
    fit into the GPUs as whole replicas; then as many as needed, of one node if that is enough."""
    auto_shards: Count = 1
    """What `dp_shard=auto` stands for; the plan of a run sets it, anew on other nodes."""
    tp: PositiveOrAuto = 1
    """Tensor parallel: parts of each matrix, on one node."""
    pp: PositiveOrAuto = 1
    """Pipeline stages; the micro-batches of `batch.accumulation` flow through them."""
    cp: PositiveOrAuto = 1
    """Context parallel: parts of each sequence; these ranks also shard the parameters."""
    sequence_parallel: bool = False
    """Divides the positions of norms and residuals among the ranks of `tp`: less memory, not more traffic."""
    async_tp: bool = False
    """Cuts gathers and sums of `tp` into parts that overlap with matrix products: torch's own way, for compiled blocks
    on GPUs with `sequence_parallel`."""
    allow_tp_across_nodes: bool = False
    """Lets a tensor-parallel group span nodes, where every layer waits for the network."""
    activation_checkpointing: Literal["none", "selective", "alternate", "full"] = "none"
    """Computes activations again; selective keeps matrix products and attention, alternate every second product and
    attention, full only the input of each block."""
    stages_per_rank: Count = 1
    """Stages on each rank of a pipeline; more than one interleaves them: a smaller bubble, more traffic."""
    pipeline_schedule: Literal["1f1b", "gpipe", "zero_bubble"] = "1f1b"
    """Order of a pipeline's micro-batches: 1f1b keeps at most `pp` of them in memory, gpipe all; zero_bubble computes
    gradients of weights where 1f1b would wait, which torch.compile cannot."""
    gather_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which sharded parameters are gathered and used; float32: the type of the parameters; auto: bfloat16 where
    `train.precision` computes in it, unless the model has running statistics (BatchNorm); with fp8 float8 for the
    matrices of blocks, unless `cpu_offload` keeps them on the host."""
    cpu_offload: bool = False
    """Keeps sharded parameters, gradients and optimizer state in host memory, where they are updated: much slower."""
    reshard_after_forward: bool = True
    """Frees gathered parameters between forward and backward pass; false: more memory, less traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSection:
    """The request to Slurm, and the environment of the job."""

    nodes: Count | str = 1
    """Number of nodes, or a range, "2-4": as many as are free; under srun the run goes on with fewer when one is
    lost."""
    gpus_per_node: Count | list[Count] = 1
    """GPUs, and so ranks, on each node; a list for uneven nodes, in rank order, e.g. [4,2]."""
    spare_nodes: NonNegativeInt = 0
    """Further nodes of the allocation that wait: one is used in place of a lost or bad node, without a requeue."""
    launcher: Literal["srun", "torchrun"] = "srun"
    """What starts the ranks: srun, or one torchrun per node, which can restart its ranks."""
    max_restarts: NonNegativeInt = 3
    """Largest number of restarts of failed ranks by torchrun before the step ends; only with `launcher=torchrun`."""
    cpus_per_gpu: Count | Literal["auto"] | None = "auto"
    """CPUs for each rank; auto: its GPU's equal part of the node, as far as Slurm tells; null: what Slurm gives. With
    `sweep.runs_per_gpu` the runs share them."""
    memory_gb_per_node: NonNegativeInt | None = None
    """Memory of a node in GiB; 0: all of it; default: that of the partition."""
    memory_gb_per_gpu: NonNegativeInt | None = None
    """Memory of a node in GiB for each of its GPUs, instead of `memory_gb_per_node`; runs that share a GPU share it."""
    partition: str | None = None
    """Partition; default: Slurm's own default."""
    account: str | None = None
    """Account the time is charged to."""
    qos: str | None = None
    """Quality of service."""
    time_limit_min: Count | None = None
    """Wall-clock limit of one attempt in minutes; default: the partition's."""
    nodelist: str | None = None
    """Nodes that the job must use, e.g. "node[1-4]"."""
    exclude: str | None = None
    """Nodes that the job must not use."""
    constraint: str | None = None
    """Node features, e.g. "h100"."""
    gpu_flag: Literal["gpus-per-node", "gres", "gpus-per-task", "none"] = "gpus-per-node"
    """How GPUs are requested at this site; gpus-per-task: where a submit filter wants it; none: no GPUs (CPU ranks)."""
    gpu_type: str | None = None
    """Type of GPU as Slurm names it, e.g. "a100"; default: any."""
    network_interface: str | None = None
    """Network interface of the collectives, e.g. "ib0"; sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME."""
    rendezvous_address: str | None = None
    """Where the ranks meet rank 0: an interface of its node, e.g. "ib0", or the name of the node with an ending, e.g.
    "%Ni" (%N: Slurm's name of it); default: `network_interface` where that is one, else the node's name."""
    rendezvous_ports: str | None = None
    """Ports at which rank 0 may listen, e.g. "20000-20100"; default: those from 10000 up to the kernel's own."""
    env: dict[str, Any] = field(default_factory=dict)
    """Variables exported in the job, e.g. {NCCL_DEBUG: INFO}."""
    export: list[str] = field(default_factory=list)
    """Further variables of the submitting shell to export into the job, by name or pattern, e.g. ["WANDB_API_KEY",
    "MY_*"]; "*" is all but secrets. PATH, HOME, proxies and settings of known libraries are always exported; a secret
    only by its full name."""
    setup: list[str] = field(default_factory=list)
    """Shell lines before the ranks start, e.g. ["module load cuda/12.4"]."""
    python: str | None = None
    """Interpreter in the job; default: the one that submits."""
    stage_python: str | None = None
    """Folder on each node's own disk, e.g. "/tmp": Python's packages are copied there once per node, and the ranks
    import them from there; default: from where they are installed."""
    job_name_prefix: str | None = None
    """Text in front of the job's name, where a site prescribes one, e.g. "project-sub:"."""
    sbatch: dict[str, Any] = field(default_factory=dict)
    """Further sbatch flags by their long names, e.g. {reservation: maint}; true: a flag without a value."""
    srun: dict[str, Any] = field(default_factory=dict)
    """Further srun flags, likewise."""

    @property
    def rendezvous_interface(self) -> str:
        """The interface of rank 0's node at whose address the ranks meet; "" where a name decides."""
        name = self.rendezvous_address or self.network_interface or ""
        # NCCL knows lists of interfaces as well, and those to leave out.
        return name if re.fullmatch(r"[\w.-]+", name) else ""

    @property
    def outlives_nodes(self) -> bool:
        """Whether the job continues when a node is lost: it has spare nodes, or the run can use fewer."""
        return self.launcher == "srun" and (self.spare_nodes > 0 or isinstance(self.nodes, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSection:
    """The image in which the Python of the ranks runs; everything else runs on the host. Set by `container=NAME`."""

    kind: Literal["apptainer", "pyxis"]
    """What runs the image: the command apptainer (or singularity), or pyxis (enroot), a plugin of srun."""
    image: str
    """Path of the image on the nodes, or a name that `kind` understands, e.g. "docker://pytorch/pytorch"."""
    mounts: list[str] = field(default_factory=list)
    """Further paths to mount, "/path", "/path:/inside" or "/path:/inside:ro"; run, code and data are always mounted."""
    python: str = "python3"
    """Interpreter inside the image."""
    command: str | None = None
    """With kind=apptainer: the program, e.g. "singularity"; default: apptainer."""
    flags: list[str] = field(default_factory=list)
    """Further words for `apptainer exec`; flags of pyxis are `cluster.srun.container_...`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The whole configuration of a run. `model`, `data` and `task` are `_target_` mappings for your own code."""

    seed: int = 0
    """Seed of everything random: weights, order of the samples, augmentation, dropout."""
    launch: Launch = "slurm"
    """slurm: as a job; interactive: in an salloc, yours or a new one; local: here, even with a cluster."""
    run: RunSection = RunSection()
    model: dict[str, Any] | None = None
    """The model: a group (`model=gpt`) or `model._target_=my_package.MyModel`; see below."""
    data: dict[str, Any] | None = None
    """The data: a group (`data=stdlib`) or `data._target_=my_package.MyData`; see below."""
    batch: BatchSection = BatchSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    ddp: DdpSection = DdpSection()
    checkpoint: CheckpointSection = CheckpointSection()
    health: HealthSection = HealthSection()
    preflight: PreflightSection = PreflightSection()
    requeue: RequeueSection = RequeueSection()
    sweep: SweepSection = SweepSection()
    track: TrackSection = TrackSection()
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """Code that is called at moments of the training, a list of `_target_`s: [callbacks](callbacks.md)."""
    notify: list[str] = field(default_factory=list)
    """Who is told that the run has finished, failed for good, hung, or was requeued again and again: commands, or
    webhooks as `file:PATH` or `env:NAME`: [being told](notifications.md)."""
    parallel: ParallelSection = ParallelSection()
    cluster: ClusterSection | None = None
    """`+cluster=4x8` asks Slurm for 4 nodes with 8 GPUs each."""
    site: str | None = None
    """`site=NAME`: a file with your cluster's partition, account and so on; `init` writes it."""
    container: ContainerSection | None = None
    """`container=apptainer container.image=/images/torch.sif`: the Python of the ranks runs in an image."""
    task: dict[str, Any] | None = None
    """`task._target_=my_package.main`: your function on every rank instead of the trainer."""
    script: list[str] | None = None
    """`script=[train.py,--flag]`: your script on every rank instead of the trainer."""
    own_resume: OwnResumeSection = OwnResumeSection()

    @property
    def uses_cluster(self) -> bool:
        """Whether its ranks run in an allocation of Slurm, and not on the machine that starts it."""
        return self.cluster is not None

    @property
    def slurm(self) -> ClusterSection:
        """The section `cluster`, or its defaults where the run has none."""
        return self.cluster or ClusterSection()

    @property
    def is_submitted(self) -> bool:
        """Whether a start leaves a job in Slurm's queue, and nobody waits for its end."""
        return self.uses_cluster and self.launch == "slurm"


GPT_TARGET = "slurm_train.models.gpt.GPT"
CAUSAL_LM = "slurm_train.models.causal_lm.causal_lm"
EMA = "slurm_train.train.callbacks.EMA"
"""The callback that averages weights, by its `_target_`."""


def measured_average(callbacks: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the name of the state with the weights that evaluations measure; None where they are the trained ones.

    Args:
        callbacks: those of the run. Of several averages the last one is in the model.
    """
    averages = [callback for callback in callbacks if callback.get("_target_") == EMA]
    measured = [number for number, callback in enumerate(averages) if callback.get("evaluate")]
    return f"{measured[-1]} {EMA}" if measured else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GptSection:
    """What the shipped GPT takes as `model`; the meanings are those of its constructor's arguments."""

    vocab_size: Count = 257
    context: Count = 256
    num_layers: Count = 4
    num_heads: Count = 4
    num_kv_heads: NonNegativeInt = 0
    width: Count = 160
    hidden: NonNegativeInt = 0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: Positive = 1e-5
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: Positive = 10000.0
    rope_scaling: dict[str, Any] | None = None
    bias: bool = False
    dropout: NonNegative = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        """Refuses heads that do not divide the width or each other, and a dropout of everything."""
        if self.dropout >= 1:
            raise ConfigError(f"model.dropout must be below 1, got {self.dropout:g}", hint="write model.dropout=0.1")
        if self.width % (2 * self.num_heads):
            raise ConfigError(
                f"model.width={self.width} cannot be split into model.num_heads={self.num_heads} heads of an even "
                "width",
                hint=f"set model.width to a multiple of {2 * self.num_heads}",
            )
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ConfigError(
                f"model.num_heads={self.num_heads} heads cannot share model.num_kv_heads={self.num_kv_heads} "
                "in equal groups",
                hint=f"set model.num_kv_heads to a divisor of {self.num_heads}; 0: as many",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSection:
    """Keys of `data` whose types are known whatever its target is (`data.build`)."""

    heldout: dict[str, Any] | None = None
    num_workers: NonNegativeInt | Literal["auto"] = "auto"
    prefetch: NonNegativeInt | None = None
    keyed_randomness: bool = True
    allow_world_change: bool = False
    document_mask: bool = False


def check_groups(config: RunConfig) -> None:
    """Checks what is known of the open sections `model` and `data` before anything is built of them.

    Raises:
        ConfigError: a value of the wrong type or out of its range; sequences longer than the shipped GPT takes.
    """
    model = config.model or {}
    data = config.data or {}
    _build_known(ReadingSection, data, path="data.")
    positions = None
    if str(data.get("_target_")).startswith("slurm_train.data.") and "context" in data:
        positions = _convert(Count, data["context"], "data.context")
    if model.get("_target_") == GPT_TARGET:
        shape = _build_known(GptSection, model, path="model.")
        if positions is not None and positions > shape.context:
            raise ConfigError(
                f"data.context={positions} is longer than model.context={shape.context}",
                hint="leave model.context out: it follows data.context",
            )


def _build_known(cls: type[T], values: Mapping[str, Any], *, path: str) -> T:
    return build_config(cls, {key: value for key, value in values.items() if key in type_hints_of(cls)}, path=path)


def build_config(cls: type[T], values: Mapping[str, Any], *, path: str = "") -> T:
    """Returns an instance of a dataclass.

    Args:
        cls: the dataclass to build.
        values: its keys and values; missing keys take their defaults.
        path: dotted path of this mapping, for messages.

    Raises:
        ConfigError: an unknown key, a value of the wrong type or out of its range.
    """
    hints = dict(type_hints_of(cls))
    is_open = hints.pop(KEYWORDS, None) is not None
    fields = {key: _convert(hints[key], value, f"{path}{key}") for key, value in values.items() if key in hints}
    unknown = {key: value for key, value in values.items() if key not in hints}
    if is_open:
        fields[KEYWORDS] = unknown
    elif unknown:
        key, value = next(iter(unknown.items()))
        raise unknown_key_error(f"{path}{key}", (f"{path}{name}" for name in hints), value=value)
    missing = [name for name in _required_keys(cls) if name not in fields]
    if missing:
        names = " and ".join(f"{path}{name}" for name in missing)
        raise ConfigError(
            f"{path.rstrip('.')} has no {' and '.join(missing)}",
            hint=f"add a value: {names}=..., see docs/configuration.md",
        )
    return cls(**fields)


def _required_keys(cls: type[Any]) -> list[str]:
    """Returns the fields of a dataclass that have no default."""
    return [
        item.name
        for item in dataclasses.fields(cls)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    ]


def defaults_of(cls: type[Any]) -> dict[str, Any]:
    """Returns the default of every key of a dataclass that has one, e.g. {"nodes": 1, ...}."""
    defaults = {}
    for item in dataclasses.fields(cls):
        if item.name == KEYWORDS:
            continue
        if item.default is not dataclasses.MISSING:
            defaults[item.name] = to_mapping(item.default)
        elif item.default_factory is not dataclasses.MISSING:
            defaults[item.name] = to_mapping(item.default_factory())
    return defaults


def to_mapping(value: Any) -> Any:
    """Returns the plain mapping of a dataclass, for writing and hashing."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapping = {item.name: to_mapping(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return mapping | mapping.pop(KEYWORDS, {})
    if isinstance(value, Mapping):
        return {str(key): to_mapping(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_mapping(item) for item in value]
    return value


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns a nested mapping by dotted keys, e.g. {"optim.lr": 0.003}; an empty mapping stays a value."""
    by_key: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            by_key |= flat(value, f"{prefix}{key}.")
        else:
            by_key[f"{prefix}{key}"] = value
    return by_key


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the mapping that `flat` was made of, e.g. {"optim": {"lr": 0.003}}."""
    mapping: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = key.split(".")
        holder = mapping
        for parent in parents:
            holder = holder.setdefault(parent, {})
        holder[last] = value
    return mapping


def unknown_key_error(key: str, keys: Iterable[str], *, value: object = None) -> ConfigError:
    """Returns the error for a key that does not exist, with what other trainers mean by it, or the nearest that do.

    Args:
        key: as typed, e.g. "optim.learning_rate".
        keys: the keys that there are.
        value: what was typed for it, for the hint.
    """
    import difflib

    hint = advise(key, value)
    # "callbacks.mine._target_": lists of mappings are the parts that other tools let one name.
    lists = [name for name, kind in all_keys(RunConfig).items() if kind == list[dict[str, Any]]]
    list_key = next((name for name in lists if key.startswith(f"{name}.")), "")
    if list_key and not hint:
        hint = f'{list_key} is a list of mappings: "{list_key}=[{{...}}]"'
    if not hint:
        nearest = difflib.get_close_matches(key, list(keys), n=3, cutoff=0.7)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "`--cfg job` prints every key"
    return ConfigError(f"there is no configuration key {key!r}", hint=hint)


@functools.cache
def all_keys(cls: type[Any], *, prefix: str = "") -> Mapping[str, Any]:
    """Returns the dotted names of all keys of a dataclass with their types, e.g. {"optim.lr": float}."""
    keys: dict[str, Any] = {}
    for name, hint in type_hints_of(cls).items():
        if name == KEYWORDS:
            continue
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
    import difflib

    origin = get_origin(hint)
    options = get_args(hint)
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
            number = _convert(options[0], value, path)
            if options[1].holds(number):
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
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    elif hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    expected, example = _describe(hint)
    typed = f"{path}={example}"
    kind = _kind(hint)
    if kind is str and isinstance(value, (list, tuple)) and value:
        typed = f"{path}={','.join(map(str, value))}"
    section = next((option for option in (hint, *options) if dataclasses.is_dataclass(option)), None)
    if isinstance(section, type):
        # Its first key is the one that it needs, or the one that is set most.
        name, key_hint = next(iter(type_hints_of(section).items()))
        typed = f"{path}.{name}={_describe(key_hint)[1]}"
    elif path == "script" and isinstance(value, str):
        with contextlib.suppress(ValueError):  # an open quote
            typed = f"script=[{','.join(shlex.split(value))}]"
    elif isinstance(value, str) and re.fullmatch(r"[\w./,-]+", value):
        # A text that only lacks what makes it a list or a target, or is another spelling of a choice.
        if kind is list:
            typed = f"{path}=[{value}]"
        elif (kind is dict and path in ("task", "model", "data")) or (path == "optim.schedule" and "." in value):
            typed = f"{path}._target_={value}"
        else:
            choices = list(_choices(hint))
            same = OTHER_VALUES.get(value, "")
            near = [same] if same in choices else difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
            typed = f"{path}={near[0]}" if near else typed
    advice = EXPORT_WORDS.get(str(value), "") if path == "cluster.export" else ""
    raise ConfigError(f"{path} must be {expected}, got {value!r}", hint=advice or f'for example "{typed}"')


def _kind(hint: Any) -> Any:
    """Returns the type that a field takes, of several the first."""
    if get_origin(hint) in (Annotated, Union, types.UnionType):
        return _kind(get_args(hint)[0])
    return get_origin(hint) or hint


def _choices(hint: Any) -> Iterator[str]:
    """Yields the words that a field takes, where these are few."""
    options = get_args(hint)
    if get_origin(hint) is Literal:
        yield from map(str, options)
    elif hint is bool:
        yield from ("true", "false")
    elif hint is type(None):
        yield "null"
    elif get_origin(hint) in (Union, types.UnionType):
        for option in options:
            yield from _choices(option)


def _describe(hint: Any) -> tuple[str, str]:
    """Returns what a field takes and an example, e.g. ("a whole number, at least 1, or null", "8")."""
    origin = get_origin(hint)
    options = get_args(hint)
    if origin is Annotated:
        expected, example = _describe(options[0])
        return f"{expected}, {options[1]}", example
    if origin is Literal:
        return " or ".join(map(str, options)), str(options[0])
    if origin in (Union, types.UnionType):
        described = [_describe(option) for option in options]
        return ", or ".join(expected for expected, _ in described), described[0][1]
    return _TYPES.get(origin or hint, _TYPES[dict])
