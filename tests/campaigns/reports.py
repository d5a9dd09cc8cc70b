"""What people have reported of other launchers on Slurm, typed on this one.

Each situation is one trial on a real Slurm: the words that a person types, at a site with its own wrappers, filters,
partitions and paths, and what must come of them. The sources are public threads and pages of sites.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from slurm_train.rundir.events import add_bad_nodes
from slurm_train.rundir.paths import RunDirectory
from tests.campaigns.record import Tally, only_true
from tests.fakes.hub import TOKENS_MODULE, Repository, serving
from tests.support.cluster_faults import extra_qos, firewall, on_node
from tests.support.command_line import Done, Person
from tests.support.slurm_runs import command, job_state, wait_for_state, wait_until_finished
from tests.support.waiting import wait_for

_SCRIPT = "import sys\nimport time\n\ntime.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 1)\n"
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_PATIENCE_S = 120.0
_NAMED = "Submitted batch job $id on cluster lab"

Find = Callable[[Person], Iterator[str]]


class Situation(NamedTuple):
    """A report, and what was typed for it."""

    what: str
    find_problems: Find
    """Types it, and yields what is not as it should be."""

    def __str__(self) -> str:
        return self.what


def run(tally: Tally, *, seed: int, trials: int, folder: Path) -> dict[str, str]:
    """Types each situation, or the first so many of them, each in a folder of its own; the seed changes nothing."""

    def find_problems(situation: Situation) -> list[str]:
        person = Person(folder / f"{SITUATIONS.index(situation):02d}" / "project")
        person.folder.mkdir(parents=True)
        (person.folder / "train.py").write_text(_SCRIPT)
        try:
            return list(situation.find_problems(person))
        finally:
            _cancel_all(person)

    tally.try_all(SITUATIONS[:trials], find_problems)
    return {"situations": str(len(SITUATIONS[:trials]))}


# --- typing ---


def _types(person: Person, words: str, **env: str) -> Done:
    return person.types(*shlex.split(words), env=env)


def _submits(person: Person, words: str, **env: str) -> tuple[str, RunDirectory]:
    return _types(person, f"script=[train.py,1] +cluster=1x1 {words}", **env).job_and_run


def _put_before(person: Person, program: str, body: str) -> str:
    """Puts a script of a site in front of a program of Slurm, which it knows as $real; returns the new PATH."""
    folder = person.folder.parent / "site"
    folder.mkdir(exist_ok=True)
    path = person.environment()["PATH"]
    (folder / program).write_text(f"#!/bin/bash\nreal='env PATH={path} {program}'\n{body}\n")
    (folder / program).chmod(0o755)
    return f"{folder}:{path}"


def _ends(job: str) -> str:
    wait_for(lambda: job_state(job) in _ENDED, within_s=_PATIENCE_S, what=f"the end of job {job}")
    return job_state(job)


def _status(person: Person, run: RunDirectory) -> dict[str, object]:
    (status,) = json.loads(_types(person, f"status --json {run.path}").out)
    return dict(status)


def _cancel_all(person: Person) -> None:
    """Cancels the jobs whose scripts lie in the folder of the trial."""
    lines = command("squeue", "--noheader", "--format=%i %o").splitlines()
    jobs = {line.split()[0].partition("_")[0] for line in lines if str(person.folder.parent) in line}
    if jobs:
        command("scancel", "--quiet", *jobs, must=False)


# --- what files and the shell say ---


def _yaml_values(person: Person) -> Iterator[str]:
    folder = person.folder / "conf" / "experiment"
    folder.mkdir(parents=True)
    values = "{begin: 16:00, comment: 0123, wckey: 12e3}"
    text = f"cluster:\n  env: {{JOB_CODE: 0755, START: 1:30}}\n  sbatch: {values}\n"
    (folder / "night.yaml").write_text(f"# @package _global_\n{text}")
    done = _types(person, "plan --config-dir conf +cluster=1x1 +experiment=night site=none script=[train.py]")
    if done.code:
        if "quote" not in done.err:
            yield f"refused without a word of quotes: {done.err[-200:]}"
        return
    script = done.out.replace("'", "")
    wanted = ("--begin=16:00", "--comment=0123", "--wckey=12e3", "export JOB_CODE=0755", "export START=1:30")
    yield from (f"{text} did not arrive as it is written" for text in wanted if text not in script)


def _yaml_limit(person: Person) -> Iterator[str]:
    for group, key, words in (("experiment", "time_limit_min", "+experiment=x site=none"), ("site", "time", "site=x")):
        folder = person.folder / "conf" / group
        folder.mkdir(parents=True)
        head = "# @package _global_\n" if group == "experiment" else ""
        (folder / "x.yaml").write_text(f"{head}cluster:\n  {key}: 12:00:00\n")
        done = _types(person, f"plan --config-dir conf +cluster=1x1 {words} script=[train.py]")
        if "43200" in done.out + done.err:
            yield f"{key} of {group}: 12:00:00 became 43200"
        if done.code == 0 and "--time=720" not in done.out:
            yield f"{key} of {group}: 12:00:00 is no limit of 720 minutes"


def _shell_choices(person: Person) -> Iterator[str]:
    job, _ = _submits(person, "run.name=a cluster.sbatch.hold=true", SBATCH_QOS="urgent")
    qos = command("squeue", "--noheader", f"--jobs={job}", "--format=%q")
    said = _types(person, "plan script=[train.py] +cluster=1x1", SBATCH_QOS="urgent").err
    if qos != "urgent" and "SBATCH_QOS" not in said:
        yield f"SBATCH_QOS=urgent gave QOS {qos}, and the plan does not name it"


def _disk_beside_gpus(person: Person) -> Iterator[str]:
    words = "plan script=[train.py] +cluster=1x2 cluster.gpu_flag=gres"
    script = _types(person, f"{words} cluster.sbatch.gres=nvme:10").out
    if "#SBATCH --gres=gpu:2,nvme:10" not in script:
        yield f"GPUs and nvme are not asked for together: {re.findall('--g.*', script)}"
    refused = _types(person, f"{words} cluster.sbatch.gres=gpu:4,nvme:10")
    if refused.code != 2 or "cluster.gpus_per_node=4" not in refused.err:
        yield f"two numbers of GPUs: exit code {refused.code}: {refused.err[-200:]}"


def _variable_of_shell(person: Person) -> Iterator[str]:
    (person.folder / "train.py").write_text(
        "import os\n\nprint('lr', os.environ.get('MY_LR'), os.environ['SITE_DATA'])\n"
    )
    words = "script=[train.py] +cluster=1x1 requeue.enabled=false"
    done = _types(person, f"{words} run.name=left", MY_LR="3e-4", SITE_DATA="/data")
    if "cluster.export=[MY_LR,SITE_DATA]" not in done.err:
        yield f"variables that stay behind are not named: {done.err[-300:]}"
    job, run = done.job_and_run
    _ends(job)
    note = str(_status(person, run)["note"])
    if "cluster.export=[SITE_DATA]" not in note:
        yield f"status says: {note}"
    exported = f"{words} run.name=taken cluster.export=[MY_LR,SITE_DATA]"
    job, run = _types(person, exported, MY_LR="3e-4", SITE_DATA="/data").job_and_run
    _ends(job)
    if "lr 3e-4 /data" not in run.rank_log(0, 0).read_text():
        yield "a variable that is exported by its name is not there"


def _variable_in_words(person: Person) -> Iterator[str]:
    said = _types(person, "plan +cluster=1x1 'script=[train.py,--data,$SLURM_TMPDIR/x]'").err
    if 'os.environ["SLURM_TMPDIR"]' not in said:
        yield f"the word is not named: {said[-300:]}"
    refused = _types(person, "plan data=text 'data.path=$SLURM_TMPDIR/books'")
    if refused.code != 2 or "--out $SLURM" in refused.err:
        yield f"a path of data: exit code {refused.code}: {refused.err[-200:]}"
    for node in ("node1", "node2"):
        (person.folder / node).mkdir()
    (person.folder / "books").write_text("text")
    each = "srun --ntasks=$SLURM_NNODES --ntasks-per-node=1"
    staging = f'\'cluster.setup=["{each} sh -c \\"cp books \\$SLURMD_NODENAME/\\""]\''
    job, _ = _types(
        person, f"script=[train.py] +cluster=2x2 run.name=staged {staging} cluster.nodelist=node[1-2]"
    ).job_and_run
    state = _ends(job)
    missing = [node for node in ("node1", "node2") if not (person.folder / node / "books").exists()]
    if missing or state != "COMPLETED":
        yield f"the job is {state}, nothing was copied for {missing}"


_WRAPPER = """#!/bin/bash
exec unshare --mount --propagation private bash -c '
  mount -t tmpfs none {image}; mkdir {image}/env; mount --bind {prefix} {image}/env
  exec {image}/env/bin/python "$@"' _ "$@"
"""


def _python_of_container(person: Person) -> Iterator[str]:
    image = person.folder.parent / "image"
    image.mkdir()
    wrapper = person.folder.parent / "wrapper"
    wrapper.write_text(_WRAPPER.format(image=image, prefix=sys.prefix))
    wrapper.chmod(0o755)
    words = ("-m", "slurm_train", "script=[train.py]", "+cluster=1x1", "requeue.enabled=false")
    done = person.runs(str(wrapper), *words, "run.name=inside")
    if "is in a container" not in done.err or "cluster.python=" not in done.err:
        yield f"the container is not named: {done.err[-300:]}"
    job, run = done.job_and_run
    _ends(job)
    note = str(_status(person, run)["note"])
    if "cluster.python=PATH" not in note:
        yield f"status says: {note}"
    job, _ = person.runs(str(wrapper), *words, "run.name=named", f"cluster.python={wrapper}").job_and_run
    if (state := _ends(job)) != "COMPLETED":
        yield f"with cluster.python=WRAPPER the job is {state}"


def _words_of_export(person: Person) -> Iterator[str]:
    plan = "plan script=[train.py] +cluster=1x1"
    for words in ("cluster.export=ALL", "cluster.export=[ALL]", "cluster.sbatch.export=ALL"):
        refused = _types(person, f"{plan} {words}")
        if refused.code != 2 or "cluster.export=['*']" not in refused.err:
            yield f"{words}: exit code {refused.code}: {refused.err[-200:]}"
    if "MY_LR?" not in _types(person, f"{plan} cluster.export=[MY_LRR]", MY_LR="1").err:
        yield "a name that is nearly right is taken without a word"


def _token(person: Person) -> Iterator[str]:
    # No auth/jwt is installed; a SLURM_* that reached the job would show that the token does.
    wants = '[ -n "$SLURM_JWT" ] || { echo "authentication error" >&2; exit 1; }'
    for program in ("sbatch", "sinfo", "squeue", "scontrol", "sacct", "sacctmgr"):
        path = _put_before(person, program, f'{wants}\nexport SLURM_TAKEN=$SLURM_JWT\nunset SLURM_JWT\nexec $real "$@"')
    (person.folder / "train.py").write_text("import os\n\nprint(*os.environ, flush=True)\n")
    words = "script=[train.py] +cluster=1x1 run.name=token"
    done = _types(person, words, PATH=path, SLURM_JWT="eyJ")
    if done.code:
        yield f"exit code {done.code}: {done.err[-200:]}"
        return
    job, run = done.job_and_run
    _ends(job)
    names = run.rank_log(0, 0).read_text().split()
    if "HOME" not in names or {"SLURM_JWT", "SLURM_TAKEN"} & set(names):
        yield f"the job has {names}"


# --- steps, and causes that are named ---


def _total_gpus(person: Person) -> Iterator[str]:
    words = "script=[train.py] +cluster=2x2 run.name=total cluster.gpu_flag=none cluster.sbatch.gpus=4"
    job, run = _types(person, words).job_and_run
    state = _ends(job)
    if state != "COMPLETED":
        yield f"the job is {state}: {_status(person, run)['note']}"


def _total_gpus_in_salloc(person: Person) -> Iterator[str]:
    salloc = ("salloc", "--quiet", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--gpus=8")
    words = ("script=[train.py]", "+cluster=1x4", "run.name=part", "launch=interactive")
    done = person.runs(*salloc, person.python, "-m", "slurm_train", *words, timeout_s=_PATIENCE_S)
    if "the run is finished" not in done.err:
        yield f"exit code {done.code}: {done.err[-300:]}"


def _no_step(person: Person) -> Iterator[str]:
    refused = "srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification"
    path = _put_before(person, "srun", f"echo '{refused}' >&2; exit 1")
    words = "script=[train.py] +cluster=2x1 run.name=refused requeue.enabled=false"
    job, run = _types(person, words, PATH=path).job_and_run
    _ends(job)
    said = (run.logs / "batch.log").read_text()
    yield from only_true(
        {
            "srun's own words are missing": "Invalid generic resource" not in said,
            "there is no STEP_REFUSED": "STEP_REFUSED" not in said,
            "a node is blamed": "NODE_MISSING" in said or "cluster.exclude" in said,
        }
    )


def _flags_of_srun(person: Person) -> Iterator[str]:
    words = "script=[train.py] +cluster=1x1 run.name=flags"
    for flag in ("cluster.srun.cpu-bnd=none", "cluster.srun.gpu-bind=foo"):
        refused = _types(person, f"{words} {flag}")
        if refused.code == 0 or "srun" not in refused.err:
            yield f"{flag}: exit code {refused.code}: {refused.err[-200:]}"
    # Another machine may have the plug-in.
    job, run = _types(person, f"{words} cluster.srun.auto-resume=1").job_and_run
    _ends(job)
    note = str(_status(person, run)["note"])
    if "unrecognized option '--auto-resume=1'" not in note or "the ranks ended" in note:
        yield f"status says: {note}"


def _limit_of_shell(letter: str, limit: str, program: str) -> Find:
    def find_problems(person: Person) -> Iterator[str]:
        (person.folder / "train.py").write_text(program)
        words = ("-m", "slurm_train", "script=[train.py]", "+cluster=1x1", "run.name=limit")
        limited = ("bash", "-c", f'ulimit -S -{letter} {limit}; exec "$@"', "limited", person.python, *words)
        done = person.runs(*limited)
        job, run = done.job_and_run
        _ends(job)
        note = str(_status(person, run)["note"])
        yield from (
            f"there is no ulimit -{letter}: {text[-300:]}"
            for text in (done.err, note)
            if f"ulimit -{letter}" not in text
        )
        freed = person.runs(*limited, "cluster.sbatch.propagate=NONE")
        if "ulimit" in freed.err:
            yield f"a limit that does not travel is named: {freed.err[-300:]}"

    return find_problems


_LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset

for batch in DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, num_workers=2):
    pass
"""


def _long_folder_for_temporary_files(person: Person) -> Iterator[str]:
    (person.folder / "train.py").write_text(_LOADER)
    folder = person.folder.parent / ("a" * 60) / ("b" * 40)
    folder.mkdir(parents=True)
    done = _types(person, "script=[train.py] +cluster=1x1 run.name=long", TMPDIR=str(folder))
    job, run = done.job_and_run
    _ends(job)
    note = str(_status(person, run)["note"])
    yield from only_true(
        {
            "the submission does not name it": "TMPDIR has" not in done.err,
            f"status says: {note}": "AF_UNIX path too long" not in note or "cluster.env.TMPDIR" not in note,
        }
    )
    job, run = _types(
        person, "script=[train.py] +cluster=1x1 run.name=short cluster.env.TMPDIR=/tmp", TMPDIR=str(folder)
    ).job_and_run
    if (state := _ends(job)) != "COMPLETED":
        yield f"with cluster.env.TMPDIR=/tmp the job is {state}: {_status(person, run)['note']}"


@contextlib.contextmanager
def _features(of_nodes: dict[str, str]) -> Iterator[None]:
    def set_features(node: str, features: str) -> None:
        command("scontrol", "update", f"NodeName={node}", f"AvailableFeatures={features}", f"ActiveFeatures={features}")

    for node, features in of_nodes.items():
        set_features(node, features)
    try:
        yield
    finally:
        for node in of_nodes:
            set_features(node, "")


def _failed_while_it_waited(person: Person) -> Iterator[str]:
    # sbatch --test-only takes it; Slurm fails the job when it looks for nodes.
    words = "script=[train.py] +cluster=2x1 run.name=bad 'cluster.sbatch.constraint=first*1&second*1'"
    with _features({"node1": "first", "node2": "second"}):
        job, run = _types(person, words).job_and_run
        _ends(job)
    status = _status(person, run)
    if "BadConstraints" not in str(status["note"]):
        yield f"status says {status['state']}: {status['note']}"


def _late_answer(person: Person) -> Iterator[str]:
    is_test = 'case " $* " in *" --test-only "*) exec $real "$@";; esac'
    late = f'(sleep 8; $real "$@") > {person.folder}/late 2>&1 < /dev/null &'
    path = _put_before(person, "sbatch", f"{is_test}\n{late}\necho 'Your request was accepted.'")
    done = _types(person, "script=[train.py] +cluster=1x1 run.name=late cluster.sbatch.hold=true", PATH=path)
    if "is not known" not in done.err:
        yield f"the answer was taken for something: {done.err[-200:]}"
        return
    (config,) = (person.folder / "runs" / "late").glob("*/config.yaml")
    run = RunDirectory(config.parent)
    before = _status(person, run)
    if before["state"] != "not_started" or "resume" not in str(before["note"]):
        yield f"before it is in the queue status says {before['state']}: {before['note']}"
    job_file = person.folder / "late"
    wait_for(lambda: job_file.exists() and job_file.read_text().strip(), within_s=_PATIENCE_S, what="the late job")
    status = _status(person, run)
    if (status["state"], status["job_id"]) != ("queued", job_file.read_text().strip()):
        yield f"status says {status['state']} of job {status['job_id']}: {status['note']}"


# --- nodes without internet ---

_OF_HUB = (
    "+cluster=2x1 run.name=hub model=hf model.path=lab/tiny data._target_=mine.Tokens train.max_steps=2 "
    "train.evaluate=false batch.global_size=4 checkpoint.every_steps=1 train.sample_tokens=0"
)


def _model_of_hub(person: Person) -> Iterator[str]:
    from slurm_train.models.causal_lm import causal_lm

    (person.folder / "mine.py").write_text(TOKENS_MODULE)
    shape = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32}
    causal_lm(model_type="llama", config=shape | heads).network.save_pretrained(person.folder.parent / "model")
    files = {path.name: path.read_bytes() for path in (person.folder.parent / "model").iterdir()}
    with serving() as hub:
        hub.repositories["lab/tiny"] = Repository()
        commit = hub.repositories["lab/tiny"].commit(files)
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(person.folder.parent / "hf")}
        for words in ("model.path=lab/none", "model.revision=v9"):
            refused = _types(person, f"{_OF_HUB} {words}", **env)
            if refused.code != 2 or "Hub" not in refused.err or (person.folder / "runs").exists():
                yield f"{words}: exit code {refused.code}: {refused.err[-200:]}"
        _, run = _types(person, _OF_HUB, **env).job_and_run
    # The Hub is gone before the ranks have started.
    wait_until_finished(run, within_s=_PATIENCE_S)
    (pinned,) = json.loads(run.provenance.read_text())["hub"]
    yield from only_true(
        {
            "the commit is not on record": pinned["commit"] != commit,
            "ranks may have asked the Hub": (person.folder / "offline").read_text() != "1",
        }
    )


def _failing_setup(line: str, words: str) -> Find:
    def find_problems(person: Person) -> Iterator[str]:
        job, run = _submits(person, f"run.name=a {shlex.quote(line)}")
        _ends(job)
        status = _status(person, run)
        if status["state"] != "failed" or words not in str(status["note"]):
            yield f"status says {status['state']}: {status['note']}"

    return find_problems


def _relative_setup(person: Person) -> Iterator[str]:
    (person.folder / "env.sh").write_text("export ENVSH=yes\n")
    setup = shlex.quote("cluster.setup=[source env.sh]")
    done = _types(person, f"script=[train.py,60] +cluster=1x1 run.name=e {setup}")
    if done.code:
        if "relative" not in done.err:
            yield f"refused without a word of relative paths: {done.err[-200:]}"
        return
    job, run = done.job_and_run
    wait_for(lambda: (run.logs / "attempt_0").is_dir(), within_s=_PATIENCE_S, what="an attempt")
    _types(person, "cancel e")
    _ends(job)
    again = Person(person.folder.parent).types("resume", str(run.path))
    second = again.job_and_run[0]
    has_begun = run.logs / "attempt_1"
    wait_for(lambda: has_begun.is_dir() or job_state(second) in _ENDED, within_s=_PATIENCE_S, what="a second attempt")
    if not has_begun.is_dir():
        yield f"resumed from another folder the job is {job_state(second)}: {_status(person, run)['note']}"


def _failed_resume(person: Person) -> Iterator[str]:
    (person.folder / "env.sh").write_text("export ENVSH=yes\n")
    setup = shlex.quote(f"cluster.setup=[source {person.folder}/env.sh]")
    job, run = _types(person, f"script=[train.py,60] +cluster=1x1 run.name=e {setup}").job_and_run
    wait_for(lambda: (run.logs / "attempt_0").is_dir(), within_s=_PATIENCE_S, what="an attempt")
    _types(person, "cancel e")
    _ends(job)
    (person.folder / "env.sh").unlink()
    _ends(_types(person, f"resume {run.path}").job_and_run[0])
    status = _status(person, run)
    if status["state"] != "failed" or "env.sh: No such file" not in str(status["note"]):
        yield f"status says {status['state']}: {status['note']}"
    if "env.sh: No such file" not in _types(person, f"logs {run.path}").out:
        yield "logs shows the attempt before"


# --- what wrappers and filters print ---


def _wrapped_run(answer: str) -> Find:
    def find_problems(person: Person) -> Iterator[str]:
        path = _wrapped(person, answer)
        job, run = _submits(person, "run.name=h cluster.sbatch.hold=true", PATH=path)
        if command("squeue", "--noheader", f"--jobs={job}", "--format=%o", must=False).find(str(run.path)) < 0:
            yield f"job {job} is not the run's"

    return find_problems


def _wrapped_sweep(person: Person) -> Iterator[str]:
    path = _wrapped(person, _NAMED)
    done = _types(person, "-m script=[train.py] +cluster=1x1 run.name=s seed=1,2 cluster.sbatch.hold=true", PATH=path)
    scripts = list((person.folder / "runs" / "sweeps").glob("*/arrays/000/runs.txt"))
    if done.code or not scripts:
        yield f"exit code {done.code}, {len(scripts)} arrays with their files: {done.err[-200:]}"


def _wrapped(person: Person, answer: str) -> str:
    is_test = 'case " $* " in *" --test-only "*) exec $real "$@";; esac'
    return _put_before(person, "sbatch", f'{is_test}\nid=$($real "$@") || exit\necho "{answer}"')


def _lines_of_sinfo(person: Person) -> Iterator[str]:
    for program in ("sinfo", "squeue", "scontrol"):
        path = _put_before(person, program, 'echo "Welcome to the lab, 3 messages"; exec $real "$@"')
    done = _types(person, "script=[train.py] +cluster=1x1 cluster.time=5:00 cluster.sbatch.hold=true", PATH=path)
    if done.code:
        yield f"a run with a time limit is not submitted: {done.err[-200:]}"
    said = _types(person, "doctor", PATH=path).out
    if "CONTROLLER_AWAY" in said:
        yield "doctor says CONTROLLER_AWAY"


def _refused_with(lines: tuple[str, ...], stream: int, setting: str) -> Find:
    def find_problems(person: Person) -> Iterator[str]:
        body = "\n".join(f"echo {shlex.quote(line)} >&{stream}" for line in lines)
        said = _types(
            person, "plan script=[train.py] +cluster=1x1", PATH=_put_before(person, "sbatch", f"{body}\nexit 1")
        )
        yield from (f"{line!r} is missing" for line in lines if line.strip() not in said.err)
        if setting not in said.err:
            yield f"{setting} is not named"

    return find_problems


def _no_arrays(person: Person) -> Iterator[str]:
    refuse = "grep -q '^#SBATCH --array' \"$script\" && { echo '  [*] Job arrays are not allowed.'; exit 1; }"
    path = _put_before(person, "sbatch", f'for script; do :; done\n{refuse}\nexec $real "$@"')
    done = _types(person, "-m script=[train.py] +cluster=1x1 run.name=n seed=1,2 cluster.sbatch.hold=true", PATH=path)
    if done.code or len(done.out.splitlines()) != 2:
        yield f"exit code {done.code}, {done.out!r}: {done.err[-200:]}"


# --- networks ---

_EXCHANGE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2
"""


@contextlib.contextmanager
def _second_network() -> Iterator[None]:
    """Joins node1 and node2 by ib0, and drops what comes to them by the first network at ports of ranks."""
    command("ip", "link", "add", "ib0", "netns", "node1", "type", "veth", "peer", "name", "ib0", "netns", "node2")
    try:
        for number in (1, 2):
            on_node(f"node{number}", "ip", "address", "add", f"10.79.0.1{number}/24", "dev", "ib0")
            on_node(f"node{number}", "ip", "link", "set", "ib0", "up")
        closed = "iifname eth0 tcp dport 10000-32767 drop"
        with firewall("node1", closed), firewall("node2", closed):
            yield
    finally:
        on_node("node1", "ip", "link", "del", "ib0")


def _other_network(person: Person) -> Iterator[str]:
    (person.folder / "train.py").write_text(_EXCHANGE)
    words = "script=[train.py] +cluster=2x1 cluster.nodelist=node[1-2] requeue.enabled=false"
    ways = {
        "a": "cluster.network_interface=ib0",
        "b": "cluster.rendezvous_address=ib0",
        "c": "cluster.network_interface=ib0 cluster.launcher=torchrun",
        "d": "cluster.rendezvous_ports=40000-40100",
    }
    with _second_network():
        runs = {way: _types(person, f"{words} run.name={name} {way}").job_and_run for name, way in ways.items()}
        job, run = _types(person, f"{words} run.name=plain").job_and_run
        for way, (its_job, its_run) in runs.items():
            if (state := _ends(its_job)) != "COMPLETED":
                yield f"{way}: the job is {state}: {_status(person, its_run)['note']}"
        _ends(job)
        note = str(_status(person, run)["note"])
    if "PORT_BLOCKED" not in note or "cluster.rendezvous_address=ib0" not in note:
        yield f"without any of them status says: {note}"


# --- file systems ---

_WITHOUT_LINKS = "def link(*_, **__):\n    raise OSError(errno.EPERM, os.strerror(errno.EPERM))\n\n\nos.link = link\n"
_WITHOUT_FSYNC = """
fsync = os.fsync


def of_files(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    fsync(descriptor)


os.fsync = of_files
"""


def _python_with(person: Person, body: str) -> str:
    """Returns a PYTHONPATH by which each Python, here and in the job, begins with this."""
    folder = person.folder.parent / "start"
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import errno\nimport os\nimport stat\n\n{body}")
    return f"{folder}:{person.environment()['PYTHONPATH']}"


def _no_hard_links(person: Person) -> Iterator[str]:
    path = _python_with(person, _WITHOUT_LINKS)
    for words in ("run.name=a", "-m run.name=b seed=1,2"):
        refused = _types(person, f"{words} script=[train.py] +cluster=1x1 cluster.sbatch.hold=true", PYTHONPATH=path)
        if refused.code == 0 or "hard links" not in refused.err or "run.root=DIR" not in refused.err:
            yield f"{words}: exit code {refused.code}: {refused.err[-200:]}"
    setup = shlex.quote(f"cluster.setup=[export PYTHONPATH={path}]")
    job, run = _submits(person, f"run.name=c {setup}")
    _ends(job)
    if "hard links" not in str(_status(person, run)["note"]):
        yield f"status says: {_status(person, run)['note']}"


def _no_fsync_of_folders(person: Person) -> Iterator[str]:
    path = _python_with(person, _WITHOUT_FSYNC)
    done = _types(person, "script=[train.py] +cluster=1x1 run.name=a", PYTHONPATH=path)
    if done.code:
        yield f"refused: {done.err[-300:]}"
        return
    job, run = done.job_and_run
    if (state := _ends(job)) != "COMPLETED":
        yield f"the job is {state}: {_status(person, run)['note']}"


# --- partitions, paths, names ---


@contextlib.contextmanager
def _second_partition() -> Iterator[None]:
    command("scontrol", "create", "PartitionName=low", "Nodes=node[3-4]", "MaxTime=30", "State=UP")
    try:
        yield
    finally:
        command("scontrol", "delete", "PartitionName=low")


def _limits_of_partitions(person: Person) -> Iterator[str]:
    words = "plan script=[train.py] +cluster=1x1 cluster.partition=low,main"
    with _second_partition():
        too_long = _types(person, f"{words} cluster.time=48:00:00").err
        fits = _types(person, f"{words} cluster.time=2:00:00").err
    if "would take it" in too_long:
        yield "48 h in partitions of 30 min and a day: the plan says that Slurm would take it"
    if "would take it" not in fits:
        yield f"2 h in partitions of 30 min and a day: {fits[-200:]}"


@contextlib.contextmanager
def _partition(*settings: str) -> Iterator[None]:
    """Makes a partition `other` of two nodes."""
    command("scontrol", "create", "PartitionName=other", "Nodes=node[3-4]", "MaxTime=7-0", *settings)
    try:
        yield
    finally:
        command("scontrol", "delete", "PartitionName=other")


def _limit_of_qos(person: Person) -> Iterator[str]:
    words = "script=[train.py] +cluster=1x1 cluster.partition=other"
    with extra_qos({"brief": "maxwall=00:30:00"}), _partition("QoS=brief", "State=UP"):
        too_long = _types(person, f"plan {words} cluster.time=4:00:00").err
        submitted = _types(person, f"{words} cluster.time=4:00:00")
        fits = _types(person, f"plan {words} cluster.time=20").err
    yield from only_true(
        {
            "4 h where a QOS allows 30 min: the plan says that Slurm would take it": "would take it" in too_long,
            "the QOS is not named": "QOS brief of partition other" not in too_long,
            "4 h where a QOS allows 30 min are submitted": submitted.code == 0 or (person.folder / "runs").exists(),
            "20 min are refused": "would take it" not in fits,
        }
    )


def _partition_down(person: Person) -> Iterator[str]:
    with _partition("State=DOWN"):
        said = _types(person, "plan script=[train.py] +cluster=1x1 cluster.partition=other").err
    if "DOWN" not in said or "estimated start" in said:
        yield f"a partition that is down: {said[-200:]}"


def _fewest_nodes(person: Person) -> Iterator[str]:
    with _partition("MinNodes=2", "State=UP"):
        said = _types(person, "plan script=[train.py] +cluster=1x1 cluster.partition=other").err
    if "fewer than partition other wants" not in said or "lower cluster.nodes" in said:
        yield f"a node where two are wanted: {said[-200:]}"


def _other_message(person: Person) -> Iterator[str]:
    lines = (
        "sbatch: error: memory limit must be provided for shared jobs",
        "sbatch: error: Batch job submission failed: Invalid feature specification",
    )
    body = "\n".join(f"echo {shlex.quote(line)} >&2" for line in lines)
    path = _put_before(person, "sbatch", f"{body}\nexit 1")
    said = _types(person, "plan script=[train.py] +cluster=1x1", PATH=path).err
    if "cluster.memory_gb_per_gpu" not in said or "cluster.constraint" in said:
        yield f"memory is missing: {said[-200:]}"


def _lone_job(person: Person) -> Iterator[str]:
    with extra_qos({"lone": "maxsubmitjobsperuser=1"}):
        said = _types(person, "plan script=[train.py] +cluster=1x1 cluster.qos=lone").err
        found = _types(person, "doctor").out
    if "QOS lone lets one job of a user into the queue" not in said:
        yield f"the plan does not name the QOS: {said[-200:]}"
    if "LONE_JOB" not in found:
        yield "doctor has no LONE_JOB"


def _requeue_by_exit_code(person: Person) -> Iterator[str]:
    path = _put_before(person, "scontrol", "$real \"$@\" | sed 's/^\\(RequeueExit *= \\).*/\\11/'")
    said = _types(person, "plan script=[train.py] +cluster=1x1", PATH=path).err
    if "RequeueExit=1" not in said:
        yield f"the plan does not name RequeueExit: {said[-200:]}"
    if "REQUEUE_EXIT" not in _types(person, "doctor", PATH=path).out:
        yield "doctor has no REQUEUE_EXIT"


def _bad_node_of_partitions(person: Person) -> Iterator[str]:
    with _second_partition():
        _, first = _submits(person, "run.name=a cluster.sbatch.hold=true")
        add_bad_nodes(first, {"node4": "GPU_BUSY: tried"}, hours=1.0, now_unix_s=time.time())
        job, _ = _submits(person, "run.name=b cluster.sbatch.hold=true cluster.partition=main,low")
        record = command("scontrol", "show", "job", job)
        command("scancel", job)
        wait_for_state(job, "CANCELLED")
    left_out = re.search(r"ExcNodeList=(\S+)", record)
    if left_out is None or left_out[1] != "node4":
        yield f"the job leaves out {left_out and left_out[1]}"


_LOGIN_NODE = """
mount --bind "$1/site/home" "$1/auto/host7"
mount -t tmpfs none "$1/site"
ln -s "$1/auto/host7" "$1/site/home"
cd "$1/site/home/project"
shift
exec "$@"
"""


def _linked_home(person: Person) -> Iterator[str]:
    base = person.folder.parent / "links"
    for name in ("site/home/project", "auto/host7"):
        (base / name).mkdir(parents=True)
    typed = base / "site/home/project"
    (typed / "train.py").write_text(_SCRIPT)
    words = ("script=[train.py,1]", "+cluster=1x1", "run.name=auto", f"run.root={typed}/runs")
    login = ("unshare", "--mount", "--propagation", "private", "bash", "-c", _LOGIN_NODE, "login", str(base))
    done = person.runs(*login, person.python, "-m", "slurm_train", *words)
    job, run = done.job_and_run
    if not run.path.is_relative_to(typed):
        yield f"the typed path became {run.path}"
    if (state := _ends(job)) != "COMPLETED":
        yield f"the job is {state}"


# --- launchers in a script ---

_LAUNCHER = """#!{python}
import os, subprocess, sys
numbers = [{{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29500"}} for rank in range(2)]
ranks = [subprocess.Popen(sys.argv[1:], env={{**os.environ, **number}}) for number in numbers]
sys.exit(max(rank.wait() for rank in ranks))
"""


def _launcher_that_is_seen(person: Person) -> Iterator[str]:
    (person.folder / "wrap.sh").write_text("#!/bin/bash\ntorchrun --standalone --nproc_per_node=2 train.py\n")
    for words in ("bash,wrap.sh", "uv,run,torchrun,train.py", "composer,-n,2,train.py", "srun,python,train.py"):
        done = _types(person, f"script=[{words}] +cluster=2x1")
        if done.code == 0 or "starts ranks" not in done.err or "script=[train.py]" not in done.err:
            yield f"script=[{words}] is not refused with what to type: {done.err[-200:]}"


def _launcher_in_a_branch(person: Person) -> Iterator[str]:
    launcher = person.folder / "torchrun"
    launcher.write_text(_LAUNCHER.format(python=person.python))
    launcher.chmod(0o755)
    (person.folder / "run.sh").write_text(f"if true; then\n  ./torchrun {person.python} train.py 20\nfi\n")
    job, run = _types(person, "script=[run.sh] +cluster=2x1 run.name=a").job_and_run
    wanted = "ranks of their own by torchrun (WORLD_SIZE=2)"
    is_named = wait_for(
        lambda: wanted in str(_status(person, run)["note"]) or job_state(job) in _ENDED,
        within_s=_PATIENCE_S,
        what="the note or the end",
    )
    if not is_named or job_state(job) in _ENDED:
        yield "nothing is said of it while it runs"
    _ends(job)
    status = _status(person, run)
    if status["state"] != "finished" or wanted not in str(status["note"]):
        yield f"status says {status['state']}: {status['note']}"


def _launchers_that_are_one_world(person: Person) -> Iterator[str]:
    launcher = person.folder / "torchrun"
    text = _LAUNCHER.format(python=person.python).replace("str(rank), ", "str(rank + 2 * int(os.environ['RANK'])), ")
    launcher.write_text(text.replace('"WORLD_SIZE": "2"', '"WORLD_SIZE": "4"'))
    launcher.chmod(0o755)
    (person.folder / "run.sh").write_text(f"if true; then\n  ./torchrun {person.python} train.py 10\nfi\n")
    job, run = _types(person, "script=[run.sh] +cluster=2x1 run.name=a").job_and_run
    _ends(job)
    status = _status(person, run)
    if status["state"] != "finished" or status["note"]:
        yield f"status says {status['state']}: {status['note']}"


def _prescribed_name(person: Person) -> Iterator[str]:
    tried = []
    for words in ("cluster.job_name_prefix=proj-sub:", "cluster.sbatch.job-name=proj-sub:test1"):
        done = _types(person, f"script=[train.py] +cluster=1x1 run.name=test1 cluster.sbatch.hold=true {words}")
        tried.append(done.err.strip()[-120:])
        if done.code == 0:
            name = command("squeue", "--noheader", f"--jobs={done.job_and_run[0]}", "--format=%j")
            if not name.startswith("proj-sub:"):
                yield f"the job is called {name}"
            return
    yield f"no job can be called proj-sub:...: {tried}"


_LIMITS = (
    ("t", "2", "while True:\n    pass\n"),
    ("f", "1000", "with open('big', 'wb') as file:\n    file.write(bytes(3_000_000))\n"),
    ("v", "700000", "bytes(800_000_000)\n"),
)
_ACCOUNTS = ("You may use several accounts.", "Name one of these:", "  lab-one, lab-two", "Use --account=NAME.")
_QUEUE = ("--> Verifying job request is within current queue limits...FAILED", "    [*] Too many jobs in queue.")
_SETUP = {
    "module": ("cluster.setup=[module load cuda/12.4]", "module: command not found"),
    "conda": ("cluster.setup=[conda activate myenv]", "conda: command not found"),
    "ulimit": ("cluster.setup=[ulimit -n 99999999]", "ulimit: open files: cannot modify limit"),
    "python": ("cluster.python=/nonexistent/bin/python", "/nonexistent/bin/python: No such file"),
}
SITUATIONS: tuple[Situation, ...] = (
    Situation("variables and flags in a file arrive as they are written", _yaml_values),
    Situation("a time limit in a file is no number in base 60", _yaml_limit),
    Situation("SBATCH_QOS of the shell is used, or named", _shell_choices),
    Situation("variables of the shell that the program reads", _variable_of_shell),
    Situation("$NAME in words, and data for each node", _variable_in_words),
    Situation("a Python that a container wrapper mounts", _python_of_container),
    Situation("words of --export in cluster.export", _words_of_export),
    Situation("a token in place of munge", _token),
    Situation("a local disk beside the GPUs of --gres", _disk_beside_gpus),
    Situation("a job that asks for its GPUs in total", _total_gpus),
    Situation("a part of an allocation with GPUs in total", _total_gpus_in_salloc),
    Situation("srun that creates no step blames no node", _no_step),
    Situation("flags that srun does not know", _flags_of_srun),
    Situation("a TMPDIR that is too long for sockets", _long_folder_for_temporary_files),
    *(Situation(f"a limit of the login shell: ulimit -{words[0]}", _limit_of_shell(*words)) for words in _LIMITS),
    *(
        Situation(f"a job that ends before it begins: {name}", _failing_setup(line, words))
        for name, (line, words) in _SETUP.items()
    ),
    Situation("a job that Slurm fails while it waits", _failed_while_it_waited),
    Situation("a relative path in cluster.setup, resumed from another folder", _relative_setup),
    Situation("a resume that fails before it begins", _failed_resume),
    Situation("a wrapper that prints sbatch's sentence", _wrapped_run(_NAMED)),
    Situation("a wrapper that prints a sentence of its own", _wrapped_run("Your job no. $id is queued")),
    Situation("an answer that comes before the job", _late_answer),
    Situation("a wrapper around the sbatch of a sweep", _wrapped_sweep),
    Situation("lines of a site on stdout of sinfo, squeue and scontrol", _lines_of_sinfo),
    Situation("a filter that explains itself on stdout", _refused_with(_QUEUE, 1, "squeue --me")),
    Situation("a filter that explains itself in several lines", _refused_with(_ACCOUNTS, 2, "cluster.account")),
    Situation("a site that refuses job arrays", _no_arrays),
    Situation("nodes that reach each other by a second network only", _other_network),
    Situation("a file system without hard links", _no_hard_links),
    Situation("a file system that does not synchronize folders", _no_fsync_of_folders),
    Situation("the time limit of a list of partitions", _limits_of_partitions),
    Situation("the time limit of a partition's QOS", _limit_of_qos),
    Situation("a partition that is down", _partition_down),
    Situation("a partition that wants several nodes", _fewest_nodes),
    Situation("a filter with a message of Slurm about something else", _other_message),
    Situation("a QOS that lets one job into the queue", _lone_job),
    Situation("a site that starts failed jobs again", _requeue_by_exit_code),
    Situation("bad nodes of a list of partitions", _bad_node_of_partitions),
    Situation("a home that is a link on the login node alone", _linked_home),
    Situation("a site that prescribes the names of jobs", _prescribed_name),
    Situation("a launcher in script= that can be seen", _launcher_that_is_seen),
    Situation("a launcher in a branch of a shell file", _launcher_in_a_branch),
    Situation("launchers of two nodes that make up one training", _launchers_that_are_one_world),
    Situation("a model of the Hub, and nodes without internet", _model_of_hub),
)
