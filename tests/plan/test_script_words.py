from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from slurm_train.errors import ConfigError
from slurm_train.plan.script_words import file_command, find_launcher
from tests.support.plans import make_plan

# Shell files as projects publish them.
FILES = {
    "wrap.sh": "# not srun\nset -e\ncd . && source env\n\ntorchrun --standalone --nproc_per_node=2 \\\n  ddp.py\n",
    "outer.sh": "export A=1\nbash wrap.sh\n",
    "tee.sh": "CUDA_VISIBLE_DEVICES=0,1 exec accelerate launch x.py --lr 1 2>&1 | tee log\n",
    "branch.sh": 'if [ -n "$SLURM_JOB_ID" ]; then\n  srun python x.py\nelse\n  python x.py\nfi\n',
    "nodes.sh": "torchrun --nnodes=2 --node_rank=$RANK --nproc_per_node=8 x.py\n",
    "function.sh": "run() {\n  torchrun x.py\n}\npython x.py\n",
    "late.sh": "python x.py\nexit $?\ntorchrun x.py\n",
    "and.sh": "[ -f x ] && torchrun x.py\n",
}
STARTS_RANKS = {
    "torchrun x.py": "torchrun",
    "python -X importtime -m torch.distributed.launch x.py": "torchrun",
    "-m torch.distributed.run x.py": "torchrun",
    "uv run --no-sync torchrun x.py": "torchrun",
    "conda run --no-capture-output -n e accelerate launch x.py": "accelerate",
    "poetry run composer -n 2 x.py": "composer",
    "env A=1 B=2 srun python x.py": "srun",
    "nohup mpirun -np 2 x": "mpirun",
    "numactl --cpunodebind 0 torchrun x.py": "torchrun",
    "bash -lc 'cd x && torchrun y.py'": "torchrun",
    "bash -euo pipefail -c 'torchrun y.py'": "torchrun",
    "bash wrap.sh": "torchrun",
    "bash outer.sh": "torchrun",
    "bash tee.sh": "accelerate",
    "./wrap.sh": "torchrun",
    "tune run --nproc_per_node 2 full --config c": "tune",
    "trl sft --model m": "trl",
    "llamafactory-cli train a.yaml": "llamafactory-cli",
    "fabric run --devices=2 x.py": "fabric",
    "ray job submit -- python x.py": "ray",
    "axolotl train c.yml": "axolotl",
    "xtuner train c --launcher pytorch": "xtuner",
    "sbatch job.sh": "sbatch",
}
STARTS_NONE = [
    *("uv run --with deepspeed train.py", "conda run -n deepspeed python train.py", "pixi run train", "python", "uv"),
    *("python train.py --launcher torchrun", "train.py torchrun", "-m my.train --with torchrun"),
    *("tune run lora_single_device --config c", "tune download m", "trl vllm-serve", "llamafactory-cli export a"),
    *("axolotl train c.yml --launcher python", "xtuner train c", "ray", "bash nowhere.sh"),
    *("bash branch.sh", "bash nodes.sh", "bash function.sh", "bash late.sh", "bash and.sh"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("words", "name"), STARTS_RANKS.items())
def test_a_launcher_is_found_behind_other_programs_and_in_shell_files(folder: Path, words: str, name: str) -> None:
    launcher = find_launcher(shlex.split(words), folder)
    assert launcher is not None and launcher.name == name


@pytest.mark.parametrize("words", STARTS_NONE)
def test_what_starts_no_ranks_is_let_through(folder: Path, words: str) -> None:
    assert find_launcher(shlex.split(words), folder) is None


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ("bash wrap.sh", ["torchrun (wrap.sh, line 5) starts ranks", "script=[ddp.py]"]),
        ("bash tee.sh", ["accelerate (tee.sh, line 1) starts ranks", "script=[x.py,--lr,1]:"]),
        ("uv run torchrun -m pkg.train --lr 1", ["torchrun", "script=[-m,pkg.train,--lr,1]"]),
        ("llamafactory-cli train a.yaml", ["llamafactory-cli", "script=[-m,llamafactory.launcher,"]),
    ],
)
def test_a_launcher_is_refused_for_several_ranks_with_what_to_type(folder: Path, words: str, facts: list[str]) -> None:
    (folder / "x.py").touch()
    with pytest.raises(ConfigError) as refused:
        make_plan(folder, script=shlex.split(words), cluster={"nodes": 2, "gpus_per_node": 1})
    assert all(fact in str(refused.value) for fact in facts), refused.value


def test_one_rank_may_start_others_by_its_own_program(folder: Path) -> None:
    one = {"nodes": 1, "gpus_per_node": 1}
    for words in (["bash", "wrap.sh"], ["llamafactory-cli", "train", "a.yaml"], ["ray", "start", "--head"]):
        make_plan(folder, script=words, cluster=one)


def test_a_shell_file_needs_no_permission_and_other_files_are_refused_before_the_queue(folder: Path) -> None:
    assert file_command(folder / "late.sh") == ["bash", f"{folder}/late.sh"]
    make_plan(folder, script=["late.sh"])
    (folder / "late.sh").chmod(0o755)
    assert file_command(folder / "late.sh") == [f"{folder}/late.sh"]
    (folder / "program").write_text("echo 1\n")
    with pytest.raises(ConfigError, match="script=program may not be executed"):
        make_plan(folder, script=["program"])
