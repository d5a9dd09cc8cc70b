"""Bad input: a clear text on stderr, exit code 2, nothing written, nothing submitted."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Shell

REFUSED = {
    "optim.lrr=3e-4": "there is no configuration key 'optim.lrr'",
    "model=hf model.model_type=llama +model.lora.r=4 run.processes=2 parallel.tp=2": (
        "parallel.tp=2 was asked, and model.lora puts adapters around the matrices that it would cut"
    ),
    "model=hf model.model_type=llama model.lora=16": "model.lora=16 is no mapping of arguments of peft",
    "+cluster=4x8 model=hf model.path=llama": "model.path=llama: there is no llama/config.json",
    "train.init_from=nowhere": "train.init_from=nowhere is not there",
    "optim=lion": "any other by its class: optim._target_=torch.optim.NAdam optim.lr=1e-3",
    "optim.schedule=my.falling": 'for example "optim.schedule._target_=my.falling"',
    "optim.schedule._target_=my.falling": "optim.schedule._target_=my.falling: there is no module 'my'",
    "optim.schedule._target_=torch.optim.lr_scheduler.CosineAnnealingLR": "takes an optimizer and sets its rate",
    "optim.schedule._target_=torch.optim.lr_scheduler.StepLR +optim.schedule.step_size=9": "takes an optimizer",
    "optim.schedule._target_=transformers.get_cosine_schedule_with_warmup": "takes an optimizer and sets its rate",
    "optim.min_lr_ratio=2": "optim.min_lr_ratio must be a number, at least 0 and at most 1, got 2",
    "train.max_steps=300 optim.warmup_samples=9600": (
        "optim.warmup_samples=9600 was asked, and the run has 9,600 samples: the rate would never reach optim.lr"
    ),
    "train.max_steps=300 optim.schedule=wsd optim.warmup_samples=5000 optim.decay_samples=4601": (
        "the rate would jump where one meets the other"
    ),
    "optim.decay_samples=64": "optim.decay_samples=64 was asked with optim.schedule=cosine, which does not use it",
    "'callbacks=[{_target_:slurm_train.train.callbacks.EarlyStopping}]' train.eval_every_steps=9 train.max_steps=27": (
        "can end a run at step 27 at the earliest, and this one has 27 steps"
    ),
    "optim.schedule=inverse_sqrt optim.warmup_samples=0": "hint: drop optim.warmup_samples (5 % of the run)",
    "optim._target_=torch.optim.SGD": "optim.lr has no value",
    "optim._target_=torch.optim.SDG optim.lr=1": "did you mean torch.optim.SGD?",
    "+optim.amsgra=true": "optim._target_=torch.optim.AdamW got an unexpected keyword argument 'amsgra'",
    "'optim.groups=[{lr: -1}]'": "optim.groups[0].lr must be a number, above 0",
    "optim.lr=0 'optim.groups=[{match: \"*head*\", lr: 1e-3}]'": (
        "optim.groups[0].lr=0.001 was asked with optim.lr=0, of which the schedule gives each group a multiple\n"
        "hint: to train these parameters alone: optim.lr=0.001, and {lr_scale: 0} as the last of optim.groups"
    ),
    "-m +cluster=1x8 seed=1,2 batch.global_size=32,7": "run 1 (seed=1",
    "-m optim.lr=1,x": "run 1 (optim.lr=x): optim.lr must be a number, at least 0, got 'x'",
    "-m sweep.max_parallel=1,2 seed=1": "sweep.max_parallel",
    "--wait": "--wait waits for the runs of a sweep",
    "--ranks": "--ranks prints where the ranks would run",
    "plan -m --ranks seed=1,2": "--ranks is for one run",
    "plan -m --json seed=1,2": "--json is for one run",
    "plan --ranks --when 1 +cluster=1x1": "--ranks and --when print different tables",
    "plan --suggest 80 --json +cluster=1x2": "--json has no effect on the table of --suggest",
    "write --cfg job": "`write` does nothing with --cfg",
    "write after=1234": "`write` does nothing with after=",
    "scaling --info config +cluster=1x2": "`scaling` does nothing with --info",
    "--when 1-4 +cluster=1x1": "--when goes with `plan`",
    "plan --when 4-1 +cluster=1x1": "--when takes numbers of nodes, got 4-1",
    "plan --when 1-99 +cluster=1x1": "--when 1-99 is more than 21 sizes",
    "plan --when 1-4": "--when is about jobs of Slurm",
    "plan --when 2 +cluster=2x2 'cluster.gpus_per_node=[4,2]'": "--when is for equal nodes, not for [4, 2]",
    "-m +cluster=2x2 'cluster.gpus_per_node=[4,2]' seed=1,2": "no arrays of heterogeneous jobs",
    "'callbacks=[{_target_:slurm_train.train.callbacks.Ema}]'": "slurm_train.train.callbacks has no 'Ema'",
    "'callbacks=[{_target_:slurm_train.train.callbacks.EarlyStopping}]' train.eval_every_steps=null": (
        "a callback compares evaluations, and the run makes none on its way"
    ),
    "callbacks.mine._target_=a.B": 'hint: callbacks is a list of mappings: "callbacks=[{...}]"',
    "model.dropout=2": "model.dropout must be below 1, got 2",
    "model.width=30": "model.width=30 cannot be split into model.num_heads=4 heads of an even width",
    "data.context=64 model.context=32": "data.context=64 is longer than model.context=32",
    "+data.heldout=0.1": "data.heldout must be a mapping, or null, got 0.1",
    "+cluster=1x1 'cluster.setup=['\"'\"'a\nb'\"'\"']'": "cluster.setup has a line break",
    "task.x=1": "task has no _target_",
    "data=text data.path=nowhere": "holds no prepared text",
    "status nothing": "no run matches 'nothing'",
    "logs": "there is no run below runs",
    "cancel": "the following arguments are required",
    "supervise x": "supervise cannot read ['x']",
    "status --state asleep": "there is no state 'asleep'",
    "status --last 0": "--last must be at least 1, got 0",
    "status --since soon": "neither a span of time nor a date",
    "status -w 0.5": "--watch must be at least 1 s, got 0.5",
    "--json": "--json goes with `plan`",
    "--suggest 80 +cluster=1x1": "--suggest goes with `plan`",
    "plan --cfg job": "hint: drop `plan`",
    "plan --suggest much": "--suggest must be a number of GiB greater than 0, got much",
    "plan --suggest 0.001 +cluster=1x2": "legal layouts of 2 ranks fits into 0.001 GiB a device",
    "stats": "'stats' is neither a verb nor a setting\nhint: did you mean `status`?",
    "prepare none.txt --out out": "none.txt cannot be read",
    "+cluster=1x8 hydra.run.dir=out": "write run.root=DIR to keep runs elsewhere",
    "-m +cluster=1x8 hydra/launcher=joblib seed=5,6": "sweep.max_parallel=N of them at a time",
    "-m hydra/sweeper=nowhere +cluster=1x8 seed=1,2": "hydra/sweeper=nowhere: there is no such sweeper in this",
    # What a new user types who comes from another trainer, or from Slurm: each answer has the next step in it.
    "lr=3e-4": "write optim.lr=3e-4",
    "batch_size=64": "write batch.global_size=64, over all ranks; batch.local_size=8",
    "warmup_steps=100": "write optim.warmup_samples=3200, which is steps x global batch",
    "train.max_epochs=3 train.max_steps=90": "give one of them",
    "model.hidden_size=64": "write model.width=",
    "resume_from_checkpoint=true": "`resume RUN`",
    # Flags of other trainers and of Slurm.
    "--optim.lr 3e-4": "a setting has no dashes: write optim.lr=3e-4",
    "--nodes=2 --gpus-per-node=8": "write +cluster=2x8, nodes x GPUs per node",
    "--partition gpu": "write cluster.partition=gpu",
    "--time=4:00:00": "write cluster.time=4:00:00",
    "+cluster=1x1 cluster.sbatch.time=60": "use cluster.time instead",
    "--dry-run": "`plan` in front of the words",
    "--multi-run": "did you mean --multirun?",
    # Words that are no verbs here.
    "trian": "the settings alone train",
    "train.py --epochs 3": '"script=[train.py,--epochs,3]"',
    "python train.py": '"script=[train.py,--flag]"',
    "evaluate": "the following arguments are required: RUN",
    "squeue": "`status -w`",
    "4x8": "write +cluster=4x8",
    "my_conf/base.yaml": "write --config-dir my_conf --config-name base",
    "corpus.parquet": "write data=hf data.path=corpus.parquet",
    # Slips of the keyboard, and what the shell makes of blanks and quotes.
    "optim.lr=\u20183e-4\u2019": "type plain ones",
    "train.precision=bf16": '"train.precision=bfloat16"',
    '"script=[t.py,--a,it\'s]"': "hint: put an item that has quotes, brackets or braces in quotes of its own",
    "track.wandb=true": '"track.wandb.project=text"',
    "+cluster=1x1 track.mlflow=yes": '"track.mlflow.experiment=text"',
    "train.precision=fp16": '"train.precision=float16"',
    "train.precision=32-true": '"train.precision=float32"',
    "script=train.py": '"script=[train.py]"',
    "script='train.py --epochs 3'": '"script=[train.py,--epochs,3]"',
    "'script=[train.py --epochs 3,--lr,1]'": "hint: commas between the words: script=[train.py,--epochs,3,--lr,1]",
    "model._target_=net.py:Net data._target_=a.B": "is not a dotted path\nhint: write model._target_=net.Net",
    "model._target_=./src/net:Net data._target_=a.B": "is not a dotted path\nhint: write model._target_=src.net.Net",
    "task._target_=train:main": "is not a dotted path\nhint: write task._target_=train.main",
    "seed=1 plan": "the verb is the first word: python -m slurm_train plan",
    "--config my.yaml": "--config-dir DIR",
    "resume 3f9a1c07 --lr 1e-4": "settings are key=value, without dashes",
    "+optim.lr=1e-4": "without the +",
    "optim.lr 3e-4": "write optim.lr=3e-4, without blanks",
    "optim.betas=[0.9, 0.95]": 'with its blanks in quotes: "optim.betas=[0.9, 0.95]"',
    '"optim.lr=\'3e-4"': "quote a value",
    "optimizer=sgd": "write optim=sgd",
    "optim.momentum=0.8": "write optim=sgd optim.momentum=0.8",
    "train.max_steps=1e3": 'for example "train.max_steps=8"',
    # Things that are not there.
    "data=digits": (
        "model.context is ${data.context}, and there is no data.context\nhint: choose a model that fits these data "
        "(model=cnn; +experiment=digits chooses both), or set model.context=VALUE"
    ),
    "data=digits model.context=8": "the model reads tokens, and data=digits gives images",
    "model=cnn": "model=cnn reads images, and the data are text\nhint: take images, e.g. data=digits",
    "run.name='${data.place}'": "run.name is ${data.place}, and there is no data.place",
    "script=[-m]": "script=['-m']: -m is followed by no module",
    "script=[-m,--flag]": '"script=[-m,my_package.train,--flag]"',
    "script=[train.py,--out=${SLURM_TRAIN_RUN_DIR}]": "without braces, and in single quotes, it is the directory of",
    "data=text data.path=corpus.txt": "make it with `python -m slurm_train prepare",
    "--config-dir conf": "name a folder with your YAML files",
    "site=mycluster +cluster=1x1": "init mycluster",
}
"""What is typed, and a part of the answer; the rooms' own tests have what each of them refuses."""


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_refused_before_anything_happens(words: str, shell: Shell) -> None:
    shell.refuses(REFUSED[words], words)
    assert shell.left() == [] and shell.slurm.said("submitted.sh") is None


def test_weights_that_were_not_downloaded_are_found_before_the_queue(shell: Shell) -> None:
    model = shell.folder / "llama"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    pointer = model / "model-00001-of-00002.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    before = shell.left()
    for words in ("model=hf model.path=llama", "train.init_from=llama", f"train.init_from=llama/{pointer.name}"):
        shell.refuses(f"{pointer.name} was not downloaded: it is a pointer of Git LFS", f"+cluster=1x1 {words}")
    assert shell.slurm.said("submitted.sh") is None and shell.left() == before
    other = "model-00002-of-00002.safetensors"
    index = {"weight_map": {"embedding": pointer.name, "head": other}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for words in ("model=hf model.path=llama", "train.init_from=llama"):
        shell.refuses("llama lacks 1 of the 2 files that model.safetensors.index.json names", f"+cluster=1x1 {words}")


def test_what_slurm_would_refuse_is_not_submitted(shell: Shell) -> None:
    shell.slurm.refuse("sbatch: error: Batch job submission failed: Requested node configuration is not available")
    words = "+cluster=2x16 batch.global_size=null"
    for more in ("", "launch=interactive", "-m seed=1,2"):
        shell.refuses("Slurm would not take this job: Requested node configuration", f"{words} {more}")
        assert shell.slurm.said("tested.sh") is not None and shell.slurm.said("submitted.sh") is None
        assert shell.left() == []
    shell.has_run(job_ids=("12",))
    before = shell.left()
    shell.refuses("Slurm would not take this job", "resume gpt-stdlib")
    assert shell.left() == before


@pytest.mark.parametrize("name", ["SBATCH_CLUSTERS", "SLURM_CLUSTERS"])
def test_a_shell_that_asks_for_another_cluster_submits_nothing(name: str, shell: Shell) -> None:
    (shell.slurm.folder / "config.out").write_text("ClusterName             = cpu\nMaxArraySize            = 1001\n")
    shell.patch.setenv(name, "gpu2")
    for words in ("+cluster=1x1", "-m +cluster=1x1 seed=1,2", "+cluster=1x1 launch=interactive"):
        shell.refuses(f"{name}=gpu2 asks for another cluster than cpu", words)
    assert shell.slurm.said("submitted.sh") is None and shell.left() == []
    shell.patch.setenv(name, "cpu")
    assert shell.types("+cluster=1x1").code == 0


def test_a_cluster_where_there_is_no_slurm(shell: Shell) -> None:
    shell.leaves_slurm()
    shell.refuses("there is no Slurm here (no sbatch on the PATH)", "+cluster=4x8")
    shell.refuses("there is no Slurm here", "+cluster=1x2 launch=interactive")
    with shell.patch.context() as patch:
        patch.setattr("slurm_train.request.acceptance.is_in_container", lambda _env: True)
        shell.refuses("the container that this Python runs in has no Slurm", "+cluster=4x8")
    assert shell.left() == []
    shell.has_run()
    shell.refuses("there is no Slurm here", "resume gpt-stdlib")


def test_a_root_that_is_a_file(shell: Shell) -> None:
    (shell.folder / "runs").write_text("")
    shell.refuses("runs is not a directory", "+cluster=1x1")
    assert shell.left() == ["runs"]
    shell.refuses(f"{shell.folder}/runs is a file, and no folder", "plan +cluster=1x1")


def test_a_home_that_is_a_file(shell: Shell) -> None:
    home = shell.folder / "home"
    home.write_text("")
    shell.patch.setenv("HOME", str(home))
    assert shell.types("+cluster=1x1").code == 0
    shell.refuses(f"{home} is a file, and no folder\nhint: name another place", "init here --yes")


@pytest.mark.parametrize("words", ["plan -h", "checkpoint export -h", "-h train"])
def test_help_behind_a_verb_is_help(words: str, shell: Shell) -> None:
    done = shell.types(words)
    assert done.code == 0 and "python -m slurm_train" in done.out
