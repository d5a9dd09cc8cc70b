"""What other trainers, and Slurm's own commands, call a setting or a verb: what to type here instead.

The names are those of Hugging Face's Trainer and accelerate, Lightning, torchtitan, DeepSpeed, nanoGPT, submitit and
Slurm. Nothing is translated silently: a name that this program does not have is refused, and the hint says what to
type. `docs/coming-from.md` has the same answers side by side; a test compares them, and composes every setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_SETTINGS = {
    # --- optimizer ---
    "optim.lr={3e-4}": "lr learning_rate base_lr peak_lr",
    "optim.weight_decay={0.1}": "weight_decay wd",
    '"optim.betas=[0.9,0.95]"': "betas adam_betas adam_beta1 adam_beta2 beta1 beta2",
    "optim.eps={1e-8}": "eps adam_eps adam_epsilon",
    "optim.grad_clip_norm={1.0}": "max_grad_norm max_norm grad_clip grad_clip_norm gradient_clip_val gradient_clipping",
    "optim={adamw}, of adamw, sgd and muon; any other: optim._target_=torch.optim.NAdam optim.lr=1e-3": (
        "optimizer optimizer.name optimizer_type"
    ),
    "optim=sgd optim.momentum={0.9}": "momentum sgd_momentum",
    "optim.schedule={cosine}, of cosine, linear, constant, wsd and inverse_sqrt": (
        "lr_scheduler lr_scheduler_type scheduler lr_schedule decay_type"
    ),
    "optim.schedule=wsd optim.decay_samples=3200, which is steps x global batch": "decay_steps decay_ratio",
    "optim.warmup_samples=3200, which is steps x global batch": (
        "warmup warmup_steps num_warmup_steps warmup_iters warmup_ratio lr_warmup_steps"
    ),
    "optim.min_lr_ratio=0.1, a fraction of optim.lr": "min_lr lr_min eta_min min_lr_factor",
    # --- batch ---
    "batch.local_size={8}": (
        "per_device_train_batch_size per_device_batch_size micro_batch_size train_micro_batch_size_per_gpu "
        "local_batch_size batch_size_per_gpu"
    ),
    "batch.global_size={256}, over all ranks; batch.local_size=8 is the micro-batch of one rank": (
        "batch_size global_batch_size train_batch_size total_batch_size data.batch_size"
    ),
    "batch.accumulation={4}": (
        "gradient_accumulation_steps accumulate_grad_batches gradient_accumulation grad_accum grad_accum_steps"
    ),
    "batch.growth='{1000: 2}', counted in steps": (
        "GradientAccumulationScheduler gradient_accumulation_scheduler accumulation_schedule"
    ),
    # --- the loop ---
    "train.max_steps={10000}": "max_steps max_iters num_steps total_steps training.steps train_steps",
    "train.max_epochs={3}": "max_epochs num_train_epochs epochs num_epochs",
    "train.precision=bfloat16": "bf16 precision mixed_precision amp dtype torch_dtype mixed_precision_param",
    "train.precision=float16": "fp16 float16 half 16-mixed",
    "train.precision=fp8": "fp8 float8 enable_float8 transformer-engine",
    "train.precision=float32": "fp32 float32 full_precision",
    "train.param_dtype=bfloat16": "pure_bf16 full_bf16 bf16_params model_dtype param_dtype",
    "train.compile=true": "torch_compile compile use_compile compile.enable",
    "train.deterministic=true": "deterministic full_determinism",
    "train.log_every_steps={10}": "logging_steps log_every_n_steps log_interval log_freq steps_per_print",
    "train.eval_every_steps={500}": "eval_steps eval_interval val_check_interval eval_strategy evaluation_strategy",
    "train.evaluate=true": "do_eval",
    "train.eval_max_batches={50}, in global batches": "limit_val_batches eval_iters max_eval_batches validation.steps",
    "train.eval_max_batches=50, which is samples / global batch": "max_eval_samples max_val_samples",
    "train.init_from=DIR for weights; a run that was interrupted is continued by the same command, or `resume RUN`": (
        "resume_from_checkpoint ckpt_path load_checkpoint init_from initial_load_path auto_resume"
    ),
    "train.max_steps=10, or look first: `plan` in front of the words": "fast_dev_run dry_run debug smoke_test",
    "train.start_timeout_s={1800}": "ddp_timeout init_timeout_seconds nccl_timeout",
    "seed={0}": "random_seed manual_seed seed_everything",
    # --- checkpoints and places ---
    "checkpoint.every_steps={500}": (
        "save_steps save_interval save_every every_n_train_steps checkpoint.interval checkpoint_interval"
    ),
    "checkpoint.keep={2}": "save_total_limit keep_latest_k",
    # --- callbacks ---
    '"callbacks=[{_target_:slurm_train.train.callbacks.EarlyStopping,patience:3,monitor:eval_loss,mode:min}]"; or '
    "monitor:eval_accuracy,mode:max": (
        "early_stopping early_stopping_patience patience EarlyStopping EarlyStoppingCallback"
    ),
    '"callbacks=[{_target_:slurm_train.train.callbacks.BestCheckpoint,monitor:eval_loss,mode:min}]"; or '
    "monitor:eval_accuracy,mode:max": (
        "load_best_model_at_end metric_for_best_model greater_is_better save_top_k save_best ModelCheckpoint"
    ),
    '"callbacks=[{_target_:slurm_train.train.callbacks.EMA}]"': "ema use_ema ema_decay EMA",
    '"callbacks=[{_target_:slurm_train.train.callbacks.ProfilerWindow}]"': "profile profiler enable_profiling",
    "run.root={runs}": "output_dir default_root_dir out_dir dump_folder save_dir work_dir logging_dir",
    "run.name={my_run}": "run_name name experiment_name exp_name job_name -J",
    # --- trackers ---
    "track.wandb.project={my_project}": "wandb_project",
    "track.wandb.project=my_project": "wandb report_to logger use_wandb wandb_log enable_wandb log_with",
    "track.wandb.entity={my_team}": "wandb_entity",
    "track.tensorboard=true": "tensorboard use_tensorboard enable_tensorboard",
    "track.mlflow.experiment=my_experiment": "mlflow mlflow_experiment",
    # --- model and data ---
    "model=hf model.path=DIR": "model_name_or_path model_name model_path pretrained model.name pretrained_model",
    "model=hf model.path=DIR 'model.lora={r: 16}'": "lora use_lora lora_r lora_rank peft use_peft",
    "data=hf data.path=DIR": "dataset dataset_name dataset_path train_file data_dir data_path training.dataset",
    "data.context={1024}": "max_seq_length max_seq_len seq_len seq_length block_size max_length sequence_length",
    "data.num_workers={4}, with a data set of your own": "num_workers dataloader_num_workers",
    "model.num_layers={12}": "n_layer n_layers num_hidden_layers num_layers model.n_layer model.num_hidden_layers",
    "model.width={768}": "n_embd hidden_size d_model hidden_dim model.n_embd model.hidden_size model.d_model model.dim",
    "model.num_heads={12}": "n_head n_heads num_attention_heads num_heads model.n_head model.num_attention_heads",
    # --- parallelism ---
    "parallel.dp_shard=8 for FSDP2; parallel.tp, pp and cp go with it; DDP needs nothing": (
        "strategy fsdp fsdp_config deepspeed zero zero_stage stage zero_optimization data_parallel_shard_degree"
    ),
    "parallel.tp={8}": "tp tensor_parallel tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size",
    "parallel.pp={2}": "pp pipeline_parallel pipeline_parallel_degree pipeline_model_parallel_size",
    "parallel.cp={2}": "cp context_parallel context_parallel_degree context_parallel_size",
    "parallel.dp_replicate={2}": "data_parallel_replicate_degree",
    "ddp.find_unused_parameters=true": "find_unused_parameters ddp_find_unused_parameters",
    "parallel.cpu_offload=true": "cpu_offload offload offload_optimizer enable_cpu_offload",
    "parallel.activation_checkpointing=full": (
        "gradient_checkpointing activation_checkpointing activation_checkpoint activation_checkpoint.mode"
    ),
    # --- Slurm ---
    "+cluster=2x8, nodes x GPUs per node": (
        "nodes num_nodes nnodes -N gpus -G gpus_per_node gres devices num_gpus n_gpus nproc_per_node num_processes "
        "num_machines ngpus ntasks -n ntasks_per_node tasks_per_node trainer gpus_per_task"
    ),
    "cluster.partition={gpu}": "partition slurm_partition",
    "cluster.account={my_account}": "account -A slurm_account",
    "cluster.qos={normal}": "qos -q slurm_qos",
    "cluster.time={4:00:00}": "time -t walltime time_limit timelimit",
    "cluster.time_limit_min=240, in minutes": "cluster.time",
    "cluster.time_limit_min={240}": "time_limit_min timeout_min time_min",
    "cluster.memory_gb_per_node={64}": "mem memory mem_gb",
    "cluster.cpus_per_gpu={8}": "cpus_per_task cpus_per_gpu",
    "cluster.gpu_type={a100}": "gpu_type",
    "cluster.constraint={h100}": "constraint -C slurm_constraint",
    "cluster.nodelist={node1}": "nodelist -w",
    "cluster.exclude={node1}": "exclude -x slurm_exclude",
    '"cluster.setup=[module load cuda]"': "slurm_setup setup",
    "cluster.sbatch.comment=text; every flag of sbatch likewise": "slurm_additional_parameters slurm_comment comment",
    "cluster.sbatch.exclusive=true": "exclusive",
    "cluster.sbatch.reservation={maint}": "reservation",
    "cluster.sbatch.mail-type={END}": "mail_type",
    "cluster.sbatch.mail-user={me@example.org}": "mail_user",
    "cluster.sbatch.dependency={afterok:1234}; for a run of yours: after=RUN": "dependency -d depends_on",
    "cluster.sbatch.begin={now+1hour}": "begin",
    "cluster.env.NAME=VALUE; cluster.export=[NAME] takes it from this shell": "env --export environment",
    "requeue.enabled=true, which is the default": "auto_requeue",
    "requeue.warn_before_limit_s={300}": "signal slurm_signal_delay_s",
    "requeue.max_returns_without_progress={3}; with progress a run comes back without end": "slurm_max_num_timeout",
    "sweep.max_parallel={4}, with -m and several values": "slurm_array_parallelism array_parallelism",
}
"""What to type -> other names for it. A value in braces is an example; one that was typed takes its place."""
_ADVICE = {
    "the settings alone train, here or with +cluster on Slurm: python -m slurm_train +cluster=2x8 optim.lr=3e-4": (
        "train fit run start launch submit main do_train pretrain finetune sft"
    ),
    "`evaluate RUN` measures a checkpoint; train.eval_every_steps=100 does so during the training": (
        "evaluate eval validate test predict"
    ),
    "`generate RUN` continues a text; `checkpoint export RUN OUT --format hf` writes the model for other programs": (
        "generate chat infer inference sample"
    ),
    "`checkpoint export RUN model.safetensors`": "export save convert",
    "`prepare TEXT --out DIR`": "tokenize preprocess encode",
    "-m and several values, which makes one job array: -m optim.lr=1e-3,3e-4": (
        "sweep multirun tune hpo search grid array -a"
    ),
    "`status`; `status -w` goes on looking": "squeue watch ls list ps jobs show queue info sacct",
    "`cancel RUN`": "scancel stop kill abort",
    "`logs -f RUN`": "log tail follow attach output error -o -e",
    "`resume RUN`, or the run's own command; an interrupted job is requeued automatically (requeue.enabled=true)": (
        "continue restart rerun retry requeue"
    ),
    "`diff RUN_A RUN_B`": "compare",
    "`report RUN`": "plot dashboard html results",
    "`init` looks at this cluster and writes a site file": "setup configure install",
    "`doctor`, with +cluster=2x8 for its nodes": "check healthcheck env_check",
    "--help lists verbs and flags": "help usage",
    "--cfg job prints every key with its value": "config print_config show_config",
    "a folder of YAML files is --config-dir DIR, another primary file --config-name NAME": "--config config_file conf",
    "leave it out: ranks, devices and their meeting point follow from Slurm": (
        "accelerator device local_rank backend master_addr master_port node_rank rdzv_backend rdzv_endpoint use_cpu "
        "no_cuda sync_batchnorm gpu_ids"
    ),
    'leave it out: this program starts the ranks; a script of yours is "script=[train.py,--flag]"': (
        "python python3 srun sbatch salloc accelerate mpirun mpiexec horovodrun"
    ),
}
REMOVED_KEYS: Mapping[str, tuple[object, str]] = {
    "ddp.comm_start_step": (100, "leave it out: ddp.comm=bf16 is the one way to send less, from the first step on"),
    "ddp.powersgd_rank": (2, "leave it out: PowerSGD was removed; ddp.comm=bf16 halves the bytes"),
    "ddp.average_every_steps": (8, "leave it out: post-local SGD was removed; ddp.comm=bf16 halves the bytes"),
    "train.cuda_graphs": (False, "leave it out: with CUDA graphs steps took 4.9 times as long on an H100"),
}
"""Keys of earlier versions -> the default that they had, what to do instead. Configurations that were frozen with the
default are still read."""
RENAMED_KEYS: Mapping[str, str] = {
    "requeue.max_fruitless_failures": "requeue.max_failures_without_progress",
    "requeue.max_fruitless_returns": "requeue.max_returns_without_progress",
}
"""Keys of earlier versions -> their present names. Configurations that were frozen with them are still read."""
EXPORT_WORDS: Mapping[str, str] = {
    "ALL": "all variables but secrets: \"cluster.export=['*']\"; a secret by its name as well",
    **dict.fromkeys(
        ("NONE", "NIL"),
        "leave cluster.export out: of your own variables a job gets those that it names, besides PATH, HOME and what "
        "libraries are tuned by",
    ),
}
"""Words of sbatch's --export -> what they are here."""
REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    **{("cluster.export", word): answer for word, answer in EXPORT_WORDS.items()},
    ("batch.shares", "measured"): "give weights of nodes or ranks, fastest highest: batch.shares=[2,1]; or even",
    ("ddp.comm", "powersgd"): "PowerSGD was removed; ddp.comm=bf16 halves the bytes",
    ("ddp.comm", "post_local_sgd"): "post-local SGD was removed; ddp.comm=bf16 halves the bytes",
}
"""Key and value of earlier versions, or of sbatch, -> what to do instead."""
_EXAMPLE = re.compile(r"=\{([^{}]*)\}")
_OWN_GROUPS = ("model", "data", "task")


_PAIRS = [(name, answer) for answer, names in (_SETTINGS | _ADVICE).items() for name in names.split()]
_ANSWERS = dict(_PAIRS)
OTHER_NAMES = tuple(name for name, _ in _PAIRS)
"""All names that `advise` knows."""

OTHER_VALUES = {
    **dict.fromkeys(("fp16", "half", "16", "16-mixed"), "float16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bfloat16"),
    **dict.fromkeys(("fp32", "32", "32-true", "float", "full"), "float32"),
}
"""Values that other trainers call otherwise."""


def advise(name: str, value: object = None) -> str:
    """Returns what to type for a name of another trainer or of Slurm, "" for one that is not known.

    Args:
        name: as typed: "lr", "--learning-rate", "trainer.max_steps", "-N".
        value: what was typed for it; it takes the place of the example where it is of its kind.
    """
    key = name.lstrip("-+~").replace("-", "_")
    if key in REMOVED_KEYS:
        return REMOVED_KEYS[key][1]
    if key in RENAMED_KEYS:
        return f"it is called {RENAMED_KEYS[key]} now"
    head, _, last = key.rpartition(".")
    names = [name, key, key.lower()]
    if head.partition(".")[0] not in _OWN_GROUPS:
        names.append(last.lower())
    answer = next((_ANSWERS[name] for name in names if name in _ANSWERS), "")
    if answer not in _SETTINGS:
        return answer
    return "write " + _EXAMPLE.sub(lambda match: f"={_fitting(value, match[1])}", answer)


def _fitting(value: object, example: str) -> str:
    text = "" if value is None or isinstance(value, (bool, dict, list)) else str(value)
    is_kind = text.lower() not in ("true", "false", "null") and (_is_number(text) or not _is_number(example))
    return text if text and is_kind and not re.search(r"[\s\[\]{},'\"]", text) else example


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
