"""What other trainers, and Slurm's own commands, call a setting or a verb: what to type here instead.

The names are those of Hugging Face's Trainer and accelerate, Lightning, timm, torchtitan, composer, DeepSpeed, nanoGPT,
submitit and Slurm. Nothing is translated silently: a name that this program does not have is refused, and the hint says
what to type. `docs/coming-from.md` has the same answers side by side; a test compares them, and composes every setting.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_SETTINGS = {
    # --- optimizer ---
    "optim.lr=<3e-4>": "lr learning_rate base_lr peak_lr lr_base lr0",
    "optim.weight_decay=<0.1>": "weight_decay wd",
    '"optim.betas=[0.9,0.95]"': "betas adam_betas adam_beta1 adam_beta2 beta1 beta2 opt_betas",
    "optim.eps=<1e-8>": "eps adam_eps adam_epsilon opt_eps",
    "optim.grad_clip_norm=<1.0|off:null>": (
        "max_grad_norm max_norm grad_clip grad_clip_norm gradient_clip_val gradient_clipping clip_grad clip_norm"
    ),
    "optim=<adamw|sgd|muon|adamw_torch:adamw|adamw_torch_fused:adamw>, of adamw, sgd and muon; any other: "
    "optim._target_=torch.optim.NAdam optim.lr=1e-3": (
        "optimizer --optim optimizer.name optimizer_type optimizers opt optim_wrapper optimizer_config"
    ),
    "optim=sgd optim.momentum=<0.9>": "momentum sgd_momentum",
    "optim=sgd optim.nesterov=<!true|off:false>": "nesterov",
    "optim=sgd +optim.dampening=<0.1>, a keyword of the optimizer's class": "dampening",
    "+optim.amsgrad=<!true|off:false>, a keyword of the optimizer's class": "amsgrad",
    "optim.schedule=<cosine|linear|constant|wsd|inverse_sqrt|constant_with_warmup:constant|warmup_stable_decay:wsd>, "
    "of cosine, linear, constant, wsd and inverse_sqrt; any other: optim.schedule._target_=my_package.falling": (
        "lr_scheduler lr_scheduler_type scheduler schedulers lr_schedule decay_type sched lr_decay_style "
        "param_scheduler lr_config cos_lr"
    ),
    "optim.schedule=wsd optim.decay_samples=3200, which is steps x global batch": (
        "decay_steps decay_ratio warmdown_ratio"
    ),
    "optim.warmup_samples=<!3200|off:0>, which is steps x global batch": (
        "warmup warmup_steps num_warmup_steps warmup_iters warmup_ratio lr_warmup_steps warmup_epochs "
        "lr_warmup_fraction warmup_updates lr_warmup_iters"
    ),
    "optim.min_lr_ratio=0.1, a fraction of optim.lr": "min_lr lr_min eta_min",
    "optim.min_lr_ratio=<0.1>, a fraction of optim.lr": "min_lr_factor min_lr_ratio min_lr_rate lrf",
    '"optim.groups=[{match:embedding,lr_scale:<0.8>}]", one for each layer': "layer_decay layerwise_lr_decay llrd",
    '"optim.groups=[{match:embedding,lr:<1e-3>}]", patterns of names': "embedding_lr matrix_lr unembedding_lr",
    # --- batch ---
    "batch.local_size=<8>": (
        "per_device_train_batch_size per_device_batch_size micro_batch_size train_micro_batch_size_per_gpu "
        "local_batch_size batch_size_per_gpu device_train_microbatch_size device_batch_size samples_per_gpu"
    ),
    "batch.global_size=<256>, over all ranks; batch.local_size=8 is the micro-batch of one rank": (
        "batch_size global_batch_size train_batch_size total_batch_size data.batch_size"
    ),
    "batch.accumulation=<4>": (
        "gradient_accumulation_steps accumulate_grad_batches gradient_accumulation grad_accum grad_accum_steps "
        "update_freq"
    ),
    "batch.growth='{1000: 2}', counted in steps": (
        "GradientAccumulationScheduler gradient_accumulation_scheduler accumulation_schedule"
    ),
    "batch.by_length=<!true|off:false>": "group_by_length length_grouped",
    # --- the loop ---
    "train.max_steps=<10000>": (
        "max_steps max_iters num_steps total_steps training.steps train_steps iterations num_iterations max_iterations "
        "limit_train_batches train_subset_num_batches train_iters max_update"
    ),
    "train.max_epochs=<3>": "max_epochs num_train_epochs epochs num_epochs n_epochs max_epoch",
    "train.max_epochs=3 for 3ep; train.max_steps=1000 for 1000ba": "max_duration",
    "train.precision=<bfloat16|float16|float32|fp8|auto|off:float32>": (
        "bf16 precision mixed_precision amp dtype torch_dtype mixed_precision_param use_amp amp_dtype"
    ),
    "train.precision=<!float16|off:float32>": "fp16 float16 half 16-mixed use_fp16",
    "train.precision=<!fp8|off:auto>": "fp8 float8 enable_float8 transformer-engine model.converters",
    "train.precision=float32": "fp32 float32 full_precision",
    "train.precision=<!tf32|off:float32>": "tf32 allow_tf32 enable_tf32 float32_matmul_precision matmul_precision",
    "train.param_dtype=<bfloat16|float32|off:float32>": (
        "pure_bf16 full_bf16 bf16_params model_dtype param_dtype training.dtype"
    ),
    "train.compile=<!true|off:false>": (
        "torch_compile compile use_compile compile.enable torchcompile compile_config torch_compile_backend"
    ),
    "train.compile_mode=max-autotune-no-cudagraphs": "torch_compile_mode compile_mode max_autotune",
    "data.document_mask=<!true|off:false>": (
        "document_mask doc_mask intra_document_mask block_causal attn_mask_type reset_attention_mask "
        "reset_position_ids use_document_mask"
    ),
    "train.deterministic=<!true|off:false>": "deterministic full_determinism deterministic_mode",
    "train.log_every_steps=<10>": (
        "logging_steps log_every_n_steps log_interval log_freq steps_per_print logging_strategy print_freq "
        "console_log_interval"
    ),
    "train.log_every_steps=<!1|off:10>": "logging_first_step",
    "train.eval_every_steps=<500|off:null>, in steps; an epoch has samples / global batch": (
        "eval_steps eval_interval val_check_interval eval_strategy evaluation_strategy validation.freq eval_freq "
        "val_interval"
    ),
    "train.eval_every_steps=500, which is epochs x samples / global batch": "check_val_every_n_epoch evals_per_epoch",
    "train.evaluate=<!true|off:false>": "do_eval validation.enable",
    "train.eval_max_batches=<50>, in global batches": (
        "limit_val_batches limit_test_batches eval_iters max_eval_batches validation.steps eval_subset_num_batches"
    ),
    "train.eval_max_batches=50, which is samples / global batch": "max_eval_samples max_val_samples",
    "train.init_from=DIR for weights; a run that was interrupted is continued by the same command, or `resume RUN`": (
        "resume_from_checkpoint ckpt_path load_checkpoint init_from initial_load_path load_path initial_checkpoint "
        "checkpoint_path weights resume_from load_from"
    ),
    "train.max_steps=10, or look first: `plan` in front of the words": "fast_dev_run dry_run debug smoke_test",
    "train.start_timeout_s=<1800>": "ddp_timeout init_timeout_seconds nccl_timeout dist_timeout",
    "train.steady_timeout_s=<300>": "train_timeout_seconds",
    "seed=<0|0:0>": "random_seed manual_seed seed_everything data_seed training.seed debug.seed",
    # --- checkpoints and places ---
    "checkpoint.every_steps=<500|off:null>": (
        "save_steps save_interval save_every every_n_train_steps checkpoint.interval checkpoint_interval "
        "save_strategy save_interval_updates"
    ),
    "checkpoint.every_steps=200, which is samples / global batch for an epoch": "saves_per_epoch every_n_epochs",
    "checkpoint.every_steps=<!200|off:null>": "enable_checkpointing enable_checkpoint checkpoint.enable",
    "checkpoint.keep=<2>": (
        "save_total_limit keep_latest_k checkpoint_hist save_num_checkpoints_to_keep keep_last_epochs "
        "keep_interval_updates"
    ),
    "checkpoint.background=<!true|off:false|disabled:false>": "async_mode async_save",
    # --- callbacks ---
    '"callbacks=[{_target_:slurm_train.train.callbacks.EarlyStopping,patience:3,monitor:eval_loss,mode:min}]"; or '
    "monitor:eval_accuracy,mode:max": (
        "early_stopping early_stopping_patience patience EarlyStopping EarlyStoppingCallback"
    ),
    '"callbacks=[{_target_:slurm_train.train.callbacks.BestCheckpoint,monitor:eval_loss,mode:min}]"; or '
    "monitor:eval_accuracy,mode:max": (
        "load_best_model_at_end metric_for_best_model greater_is_better save_top_k save_best ModelCheckpoint "
        "eval_metric best_checkpoint_metric"
    ),
    '"callbacks=[{_target_:slurm_train.train.callbacks.EMA}]"': (
        "ema use_ema ema_decay EMA model_ema ema_rate model_ema_decay swa"
    ),
    '"callbacks=[{_target_:slurm_train.train.callbacks.ProfilerWindow}]"': (
        "profile profiler enable_profiling profile_freq"
    ),
    '"callbacks=[{_target_:my_package.Mine}]", a class of yours': "algorithms plugins custom_hooks default_hooks",
    "run.root=<runs>": (
        "output_dir default_root_dir out_dir dump_folder save_dir work_dir logging_dir save_folder checkpoint.folder "
        "checkpoint_dir"
    ),
    "run.name=<my_run>": "run_name name experiment_name exp_name job_name -J",
    # --- trackers ---
    "track.wandb.project=<my_project>": "wandb_project",
    "track.<wandb:wandb.project=my_project|tensorboard:tensorboard=true|mlflow:mlflow.experiment=my_experiment|"
    "trackio:trackio.project=my_project>": (
        "wandb report_to logger loggers use_wandb wandb_log log_wandb enable_wandb log_with"
    ),
    "track.wandb.entity=<my_team>": "wandb_entity",
    "track.tensorboard=<!true|off:false>": "tensorboard use_tensorboard enable_tensorboard tensorboard_dir",
    "track.mlflow.experiment=my_experiment": "mlflow mlflow_experiment",
    # --- model and data ---
    "model=hf model.path=DIR": (
        "model_name_or_path model_name model_path pretrained model.name pretrained_model base_model"
    ),
    "model=llama3-8b, llama3-70b or gpt2-124m": "model.flavor",
    "model=hf model.path=DIR 'model.lora={r: <16>}'": (
        "lora use_lora lora_r lora_rank peft adapter finetuning_type use_peft model.lora_r model.lora_rank lora_config"
    ),
    "model=hf model.path=DIR 'model.lora={r:16,lora_alpha:<32>}'": "lora_alpha",
    "model=hf model.path=DIR 'model.lora={r:16,lora_dropout:<0.1>}'": "lora_dropout",
    "model=hf model.path=DIR 'model.lora={r:16,target_modules:all-linear}'": (
        "target_modules lora_target lora_target_modules"
    ),
    "data=hf data.path=DIR": "dataset dataset_name dataset_path train_file data_dir data_path training.dataset",
    "data=hf data.path=DIR data.tokenizer=<DIR>": (
        "tokenizer tokenizer_name tokenizer_path model.tokenizer_path model.hf_assets_path tokenizer_type vocab_file "
        "merge_file"
    ),
    "data=hf data.path=DIR data.held_out=<0.1>, a fraction; a data set of your own has its own held-out samples": (
        "val_split validation_split test_size train_split val_size val_set_size"
    ),
    "data=hf data.path=DIR data.text_column=<text>": "text_column dataset_text_field text_field",
    "model._target_=my_package.MyModel data._target_=my_package.MyData": (
        "train_dataloader eval_dataloader train_dataset eval_dataset"
    ),
    "model._target_=my_package.MyModel data._target_=my_package.MyData data.collate=my_package.collate": (
        "collate_fn data_collator"
    ),
    "data.context=<1024>": (
        "max_seq_length max_seq_len seq_len seq_length block_size max_length sequence_length cutoff_len sequence_len "
        "max_position_embeddings"
    ),
    "data.num_workers=<4|0:0>, with a data set of your own": (
        "num_workers dataloader_num_workers workers workers_per_gpu"
    ),
    "model.num_layers=<12>": "n_layer n_layers num_hidden_layers num_layers model.n_layer model.num_hidden_layers",
    "model.width=<768>": "n_embd hidden_size d_model hidden_dim model.n_embd model.hidden_size model.d_model model.dim",
    "model.num_heads=<12>": "n_head n_heads num_attention_heads num_heads model.n_head model.num_attention_heads",
    "model.dropout=<0.1>, an argument of the model": "dropout drop dropout_rate attention_dropout hidden_dropout",
    # --- parallelism ---
    "parallel.dp_shard=<8> for FSDP2; parallel.tp, pp and cp go with it; DDP needs nothing": (
        "strategy fsdp fsdp_config deepspeed deepspeed_config parallelism_config zero zero_stage "
        "zero_optimization.stage"
        "use_distributed_optimizer zero_optimization data_parallel_shard_degree"
    ),
    "parallel.tp=<8>": "tp tensor_parallel tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size",
    "parallel.pp=<2>": "pp pipeline_parallel pipeline_parallel_degree pipeline_model_parallel_size",
    "parallel.cp=<2>": "cp context_parallel context_parallel_degree context_parallel_size",
    "parallel.dp_replicate=<2>": "data_parallel_replicate_degree",
    "parallel.sequence_parallel=<!true|off:false>": "sequence_parallel",
    "parallel.stages_per_rank=<2>": "virtual_pipeline_model_parallel_size num_virtual_stages",
    "parallel.async_tp=<!true|off:false>": "enable_async_tensor_parallel",
    "parallel.pipeline_schedule=<1f1b|gpipe|zero_bubble>": "pipeline_parallel_schedule",
    "parallel.reshard_after_forward=<!true|off:false>": "fsdp_reshard_after_forward",
    "ddp.find_unused_parameters=<!true|off:false>": "find_unused_parameters ddp_find_unused_parameters find_unused",
    "ddp.static_graph=<!true|off:false>": "ddp_static_graph",
    "ddp.bucket_cap_mb=<25>": "ddp_bucket_cap_mb",
    "parallel.cpu_offload=<!true|off:false>": "cpu_offload offload offload_optimizer enable_cpu_offload",
    "parallel.activation_checkpointing=<full|selective|alternate|none|off:none>": (
        "gradient_checkpointing activation_checkpointing activation_checkpoint activation_checkpoint.mode "
        "grad_checkpointing recompute_activations recompute_granularity"
    ),
    "parallel.activation_checkpointing=alternate, every other block": "selective_ac_option",
    # --- Slurm ---
    "+cluster=2x8, nodes x GPUs per node": (
        "nodes --cluster num_nodes nnodes -N gpus -G gpus_per_node gres devices num_gpus n_gpus nproc_per_node "
        "num_processes num_machines ngpus ntasks -n ntasks_per_node tasks_per_node trainer gpus_per_task"
    ),
    "cluster.partition=<gpu>": "partition slurm_partition",
    "cluster.account=<my_account>": "account -A slurm_account",
    "cluster.qos=<normal>": "qos -q slurm_qos",
    "cluster.time=<4:00:00>": "time -t walltime time_limit timelimit",
    "cluster.time_limit_min=240, in minutes": "cluster.time",
    "cluster.time_limit_min=<240>": "time_limit_min timeout_min time_min",
    "cluster.memory_gb_per_node=<64>": "mem memory mem_gb",
    "cluster.cpus_per_gpu=<8>": "cpus_per_task cpus_per_gpu",
    "cluster.gpu_type=<a100>": "gpu_type",
    "cluster.constraint=<h100>": "constraint -C slurm_constraint",
    "cluster.nodelist=<node1>": "nodelist -w",
    "cluster.exclude=<node1>": "exclude -x slurm_exclude",
    '"cluster.setup=[module load cuda]"': "slurm_setup setup",
    "cluster.sbatch.comment=text; every flag of sbatch likewise": (
        "slurm_additional_parameters slurm_comment comment job.description"
    ),
    "cluster.sbatch.exclusive=true": "exclusive",
    "cluster.sbatch.reservation=<maint>": "reservation",
    "cluster.sbatch.mail-type=<END>": "mail_type",
    "cluster.sbatch.mail-user=<me@example.org>": "mail_user",
    "cluster.sbatch.dependency=<afterok:1234>; for a run of yours: after=RUN": "dependency -d depends_on",
    "cluster.sbatch.begin=<now+1hour>": "begin",
    "cluster.env.NAME=VALUE; cluster.export=[NAME] takes it from this shell": "env --export environment",
    "requeue.enabled=<!true|off:false>, true by default": "auto_requeue",
    "requeue.warn_before_limit_s=<300>": "signal slurm_signal_delay_s",
    "requeue.max_returns_without_progress=<3>; with progress a run comes back without end": "slurm_max_num_timeout",
    "sweep.max_parallel=<4>, with -m and several values": "slurm_array_parallelism array_parallelism",
}
"""What to type -> other names for it.

In angle brackets stands an example, whose place a typed value takes if it is of its kind: a number, a whole number or a
text. Behind it may stand values that are accepted, `typed:ours` where they are called otherwise here; "off" is typed as
false, none, null, no or 0. If there are others without a colon, or a "!" in front, no other value is taken.
"""
_ADVICE = {
    "the settings alone train, here or with +cluster on Slurm: python -m slurm_train +cluster=2x8 optim.lr=3e-4": (
        "train fit run start launch submit main do_train pretrain finetune sft"
    ),
    "`evaluate RUN` measures a checkpoint; train.eval_every_steps=100 does so during the training": (
        "evaluate eval validate test predict do_predict limit_predict_batches"
    ),
    "`generate RUN` continues a text; `checkpoint export RUN OUT --format hf` writes the model for other programs": (
        "generate chat infer inference sample"
    ),
    "`checkpoint export RUN model.safetensors`": "export save convert",
    "there is none: a checkpoint has all that a resume needs; `checkpoint export RUN FILE` writes the weights alone": (
        "save_only_model save_weights_only last_save_model_only export_dtype load_weights_only save_filename "
        "save_latest_filename"
    ),
    "there is none: `checkpoint export RUN OUT --format hf`, then upload OUT by hf upload org/name OUT": (
        "push_to_hub hub_model_id hub_token hub_strategy"
    ),
    "`prepare TEXT --out DIR`": "tokenize preprocess encode",
    "-m and several values, which makes one job array: -m optim.lr=1e-3,3e-4": (
        "sweep multirun tune hpo search grid array -a"
    ),
    "`status`; `status -w` goes on looking": "squeue watch ls list ps jobs show queue info sacct",
    "there is none: a start in a terminal shows its progress, and `status -w` that of any run": (
        "disable_tqdm enable_progress_bar progress_bar log_to_console"
    ),
    "`cancel RUN`": "scancel stop kill abort",
    "`logs -f RUN`; all runs are below run.root=DIR": "log tail follow attach output error -o -e",
    "`resume RUN`, or the run's own command; an interrupted job is requeued automatically (requeue.enabled=true)": (
        "continue restart rerun retry requeue autoresume auto_resume resume start_epoch fault_tolerance.enable "
        "fault_tolerance"
    ),
    "leave it out: a resume goes on with the next sample, and nothing is skipped or read again": "ignore_data_skip",
    "there is none: another run.name=NAME or seed=N makes another run, and a run's own command continues it": (
        "overwrite_output_dir save_overwrite exist_ok"
    ),
    "`diff RUN_A RUN_B`": "compare",
    "`report RUN`": "plot dashboard html results plot_loss",
    "`init` looks at this cluster and writes a site file": "setup configure install",
    "`doctor`, with +cluster=2x8 for its nodes": "check healthcheck env_check",
    "--help lists verbs and flags": "help usage",
    "--cfg job prints every key with its value": "config print_config show_config",
    "a folder of YAML files is --config-dir DIR, another primary file --config-name NAME": "--config config_file conf",
    "leave it out: ranks, devices and their meeting point follow from Slurm": (
        "accelerator device local_rank backend master_addr master_port node_rank rdzv_backend rdzv_endpoint use_cpu "
        "no_cuda gpu_ids world_size rank distributed dist_url dist_backend ddp_backend multiprocessing_distributed"
    ),
    "there is none: each rank normalises by its own micro-batch; torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) "
    "in the model's constructor has all ranks normalise together, on GPUs": (
        "sync_batchnorm sync_bn convert_to_sync_batchnorm use_sync_bn dist_bn"
    ),
    'leave it out: this program starts the ranks; a script of yours is "script=[train.py,--flag]"': (
        "python python3 srun sbatch salloc accelerate mpirun mpiexec horovodrun"
    ),
    # --- what the program does by itself ---
    "leave it out: ranks share out one order of samples, which follows from the seed; none is dropped or repeated": (
        "shuffle data.shuffle sampler batch_sampler drop_last dataloader_drop_last use_distributed_sampler "
        "train_sampling_strategy spin_dataloaders reload_dataloaders_every_n_epochs worker_seeding"
    ),
    "leave it out: batches are read ahead; data.num_workers=4 sets the processes, with a data set of your own": (
        "pin_memory pin_mem dataloader_pin_memory prefetch_factor dataloader_prefetch_factor persistent_workers "
        "dataloader_persistent_workers"
    ),
    "leave it out: held-out samples are measured in micro-batches of batch.local_size, without gradients": (
        "per_device_eval_batch_size eval_batch_size val_batch_size test_batch_size validation_batch_size "
        "eval_accumulation_steps inference_mode"
    ),
    "leave it out: each token or sample counts alike, over micro-batches and ranks": "average_tokens_across_devices",
    "leave it out: data=hf packs texts into windows of data.context tokens": (
        "packing sample_packing pad_to_sequence_len"
    ),
    "leave it out: the micro-batch that fits is chosen, see `plan`; batch.local_size=8 sets it": "auto_find_batch_size",
    "leave it out: convolutions take channels last and cuDNN's fastest algorithm by themselves": (
        "channels_last benchmark cudnn_benchmark"
    ),
    "leave it out: attention is torch's scaled_dot_product_attention, which takes the fastest kernel that fits": (
        "attn_implementation flash_attention flash_attn use_flash_attn use_flash_attention_2"
    ),
    "leave it out: data=hf encodes text once and keeps the tokens": "preprocessing_num_workers overwrite_cache",
    "leave it out: the schedule goes on with each step": "step_schedulers_every_batch",
    "leave it out: the fused form is taken where it can be": "fused optimizer.implementation",
    "leave it out: garbage collections pass over what the first step has made": "gc_freq",
    "leave it out: the pipeline's micro-batches follow from batch.accumulation": "pipeline_parallel_microbatch_size",
    "leave it out: `plan` prints the model's size and its memory": "enable_model_summary",
    # --- what there is not ---
    "there is none: data=hf reads finished text, data.text_column=NAME; a data set of your own gives labels": (
        "chat_template template prompt_template train_on_inputs special_tokens formatting_func completion_only_loss "
        "assistant_only_loss"
    ),
    "there is none: the model computes such a loss in its `training_loss`, see docs/own-model.md": (
        "label_smoothing label_smoothing_factor smoothing loss loss_fn criterion class_weights bce_loss jsd_loss"
    ),
    "there is none: samples are changed in a data set of your own, data._target_=my_package.MyData, or in its "
    "data.collate": (
        "mixup cutmix aa auto_augment reprob color_jitter hflip vflip no_aug transform transforms augment augmentation "
        "remove_unused_columns class_map"
    ),
    "there is none: gradients are clipped by their norm, optim.grad_clip_norm=1.0": (
        "gradient_clip_algorithm clip_grad_value clip_mode clip_value"
    ),
    'there is none: another schedule is a function of yours, "optim.schedule._target_=my_package.falling" with its own '
    "keys, see docs/optimizers.md": (
        "lr_scheduler_kwargs num_cycles gamma step_size milestones decay_rate decay_epochs decay_milestones t_max "
        "max_lr pct_start cooldown_epochs patience_epochs warmup_lr scale_schedule_ratio"
    ),
    "there is none: keywords of an optimizer's class are keys of optim, e.g. +optim.amsgrad=true": (
        "optim_args optim_target_modules"
    ),
    "there is none: train.max_steps or train.max_epochs is the length, over as many jobs as it takes": (
        "max_time min_steps min_epochs exit_duration_in_mins exit_interval"
    ),
    "there is none: train.max_steps=20 train.eval_every_steps=10 tries steps, evaluation and save first": (
        "num_sanity_val_steps eval_on_start barebones"
    ),
    "there is none: torch.autograd.set_detect_anomaly(True) in the model's file; health.on_non_finite acts on NaN": (
        "detect_anomaly"
    ),
    "there is none: the model's own code does it, model._target_=my_package.MyModel": (
        "freeze frozen drop_path drop_block neftune_noise_alpha use_liger_kernel load_in_4bit "
        "load_in_8bit quantization head_init_scale bn_momentum bn_eps"
    ),
    "there is none: an argument of the model's class, e.g. model._target_=my_package.MyModel model.num_classes=10": (
        "num_classes img_size input_size arch imgsz"
    ),
    "there is none: a data set of a few samples, data._target_=my_package.MyData, and train.max_steps=20": (
        "overfit_batches"
    ),
    "there is none: all gradients are clipped and checked before a step": "early_step_in_backward",
    "there is none: no code that comes with weights is run": "trust_remote_code",
    "there is none: the model's `evaluation_sums` gives measures, see docs/own-model.md": (
        "compute_metrics metrics include_for_metrics"
    ),
    "there is none: gradients are added in float32; ddp.comm=bf16 sends less": (
        "mixed_precision_reduce ddp_sync_strategy"
    ),
    "there is none: experts are not spread over ranks": "expert_parallel_degree ep expert_parallel_size",
    "there is none: `logs -f RUN` prints all that the ranks say": (
        "log_level python_log_level verbose verbosity include_num_input_tokens_seen"
    ),
    "there is none: weights must fit the model, whole and by name": (
        "load_strict_model_weights load_ignore_keys strict"
    ),
    "there is none: checkpoints are read from a file system, also one that a bucket is mounted as": "load_object_store",
}
"""What to do -> names for which no one setting stands."""
EXPORT_WORDS: Mapping[str, str] = {
    "ALL": "all variables but secrets: \"cluster.export=['*']\"; a secret by its name as well",
    **dict.fromkeys(
        ("NONE", "NIL"),
        "leave cluster.export out: of your own variables a job gets those that it names, besides PATH, HOME and what "
        "libraries are tuned by",
    ),
}
"""Words of sbatch's --export -> what they are here."""
_EXAMPLE = re.compile(r"<([^<>]*)>")
_OFF = ("off", "false", "none", "null", "no", "never", "0", "0.0")
_OWN_GROUPS = ("model", "data", "task")


_PAIRS = [(name, answer) for answer, names in (_SETTINGS | _ADVICE).items() for name in names.split()]
_ANSWERS = dict(_PAIRS)
OTHER_NAMES = tuple(name for name, _ in _PAIRS)
"""All names that `advise` knows."""

OTHER_VALUES = {
    **dict.fromkeys(("fp16", "half", "16", "16-mixed", "amp_fp16"), "float16"),
    **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true", "amp_bf16"), "bfloat16"),
    **dict.fromkeys(("fp32", "32", "32-true", "float", "full", "no"), "float32"),
    **dict.fromkeys(("float8", "amp_fp8", "transformer-engine"), "fp8"),
}
"""Values that other trainers call otherwise."""


def advise(name: str, value: object = None) -> str:
    """Returns what to type for a name of another trainer or of Slurm, "" for one that is not known.

    Args:
        name: as typed: "lr", "--learning-rate", "trainer.max_steps", "-N".
        value: what was typed for it; it takes the place of the example where it is of its kind.
    """
    key = name.lstrip("-+~").replace("-", "_")
    head, _, last = key.rpartition(".")
    names = [name, key, key.lower()]
    section = head.partition(".")[0]
    if section not in _OWN_GROUPS:
        names.append(last.lower())
    answer = next((_ANSWERS[name] for name in names if name in _ANSWERS), "")
    if section == "optim" and answer not in _SETTINGS:
        # The class of an optimizer or schedule may have a keyword of that name.
        return ""
    if answer not in _SETTINGS:
        return answer
    text = "" if value is None or isinstance(value, (dict, list)) else str(value)
    written = _EXAMPLE.sub(lambda match: _fitting(text, match[1]), answer)
    if _switches_off(text, _EXAMPLE.findall(answer)):
        return f"leave it out: nothing but {written} turns it on"
    return f"write {written}"


def _fitting(text: str, example: str) -> str:
    """Returns what is typed here for a value that was typed, or the example.

    Args:
        text: that was typed, "" for none.
        example: as in `_SETTINGS`, within the brackets.
    """
    first, *others = example.removeprefix("!").split("|")
    typed_first, _, ours_first = first.partition(":") if others else (first, "", "")
    choices = {typed_first: ours_first or typed_first}
    for choice in others:
        typed, _, ours = choice.partition(":")
        choices[typed] = ours or typed
    word = text.lower()
    for candidate in (word, "off" if word in _OFF else word, OTHER_VALUES.get(word, word)):
        if candidate in choices:
            return choices[candidate]
    is_open = not example.startswith("!") and all(":" in choice for choice in others)
    return text if is_open and text and _is_like(text, choices[typed_first]) else choices[typed_first]


def _is_like(text: str, example: str) -> bool:
    """Returns whether a typed value can stand for an example: a count for a count, a number for a number, a text."""
    if example.isdigit():
        return text.isdigit() and int(text) > 0
    if _is_number(example):
        return _is_number(text) and 0 <= float(text) < float("inf")
    return text.lower() not in (*_OFF[1:6], "true") and not re.search(r"[\s\[\]{},'\"]", text)


def _switches_off(text: str, examples: Sequence[str]) -> bool:
    """Returns whether a value was typed to switch something off that is on only where it is asked for."""
    word = text.lower()
    if any("off:" in example for example in examples):
        return False
    has_number = any(_is_number(example.partition("|")[0]) for example in examples)
    return word == "false" or (word in _OFF[2:6] and not has_number)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
