"""The command line: one table of verbs, from which dispatch, parsers, `--help` and completion are made.

A bare first word is a verb, everything else are settings of a run. A verb's module is named in the table and imported
when the verb is called, so each costs only what it needs, and nothing imports a tool but its verb. `complete` is called
at a TAB: this module imports nothing slow.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pwd
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from slurm_train import __version__
from slurm_train.errors import RunError, SlurmTrainError
from slurm_train.formatting import COMMAND, printing_safely

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

_GC_THRESHOLD = 20_000
"""New objects that may have references to others before the collector looks at them; Python's default is 700."""


_TAKES = {
    "DIR": "path",
    "FILE": "path",
    "INPUT": "path",
    "JSON": "path",
    "OUT": "path",
    "RUN": "run",
    "SWEEP": "sweep",
    "RUN|SWEEP": "run or sweep",
    "STATE,...": "states",
}
"""What completion offers for a value, by its name in `--help`."""


class Argument:
    """A flag or a word of a verb.

    Args:
        spec: names of a flag, and of its value unless it is a switch: "-f --follow", "--last N"; of a word the
            attribute, and its name in `--help`: "runs RUN".
        about: its line in `--help`.
        takes: what completion offers for its value where its name does not say it: "a|b" one of these, "a,b" a list
            of these, a kind of `completion` such as "run".
        options: what else argparse is given.
    """

    def __init__(self, spec: str, about: str = "", *, takes: str = "", **options: Any) -> None:
        words = spec.split()
        self.names = tuple(word for word in words if word.startswith("-")) or (words[0],)
        self.about = about
        self.options = options
        if len(words) > len(self.names):
            options["metavar"] = words[-1]
        elif self.is_flag and "choices" not in options:
            options["action"], takes = "store_true", "-"
        if options.get("action") == "append":
            options["default"] = []
        self.takes = takes or "|".join(options.get("choices", ())) or _TAKES.get(options.get("metavar", ""), "")

    @property
    def is_flag(self) -> bool:
        """Whether it is a flag, and no word."""
        return self.names[0].startswith("-")


class Verb:
    """A verb, or an action of one ("checkpoint ls").

    Args:
        module: below slurm_train, with a function `main(words) -> exit code`; or "module:function".
        about: its line in `--help`; "" for what only scripts, shells and other verbs call.
        arguments: its flags and words; None: its words are settings of a run, and it reads them itself.
        settings: "after": key=value words stand beside its RUN; "any": every word that is not its own; "" none.
        examples: shown below its options.
        actions: its actions by name; the chosen one is the attribute `action`.
        is_tool: it stands on the core and could be deleted with its folder.
    """

    def __init__(
        self,
        module: str,
        about: str = "",
        arguments: Sequence[Argument] | None = None,
        *,
        settings: str = "",
        examples: str = "",
        actions: Mapping[str, Verb] | None = None,
        is_tool: bool = False,
    ) -> None:
        self.module = module
        self.about = about
        self.arguments = arguments
        self.settings = settings
        self.examples = examples
        self.actions = actions or {}
        self.is_tool = is_tool

    def load(self) -> Callable[..., int]:
        """Returns its function."""
        module, _, name = self.module.partition(":")
        function: Callable[..., int] = getattr(import_module(f"slurm_train.{module}"), name or "main")
        return function


def _action(about: str, *arguments: Argument) -> Verb:
    return Verb("", about, arguments)


_RUN = "run name, run id, job id or path"
DEFAULT_ROOT = "runs"
_ROOT = Argument("--root DIR", "root of the runs (default: runs; ids are found everywhere)", default=DEFAULT_ROOT)
_WHERE = Argument("--where KEY=VALUE", "of a sweep: with this value", action="append")
_JSON = Argument("--json", "print JSON")
_ONE_RUN = Argument("run RUN", f"{_RUN}; default: the newest", nargs="?")
_CHECKPOINT = "RUN (its newest that verifies), RUN@STEP, RUN@best (RUN@best:eval_loss), or the path of a checkpoint"
DEVCLUSTER_STATE_DIR = "/var/lib/slurm-train-devcluster"
_STATE_DIR = Argument("--state DIR", "directory that holds all of it", default=DEVCLUSTER_STATE_DIR)
_NODE = Argument("node", "e.g. node2")
VERBS = {
    "plan": Verb("cli.plan", "print batch arithmetic, ranks and the exact script; submit nothing"),
    "status": Verb(
        "cli.status",
        "table of runs: state, step, loss, speed, nodes, reason; -w goes on looking",
        [
            Argument("runs RUN|SWEEP", f"{_RUN}, or a sweep; default: all", nargs="*"),
            _ROOT,
            Argument(
                "-w --watch SECONDS",
                "look again every so many seconds (default: 5 on a terminal, else 30) until all have ended",
                nargs="?",
                const="",
            ),
            Argument("--state STATE,...", "only runs in these states, e.g. running,failed"),
            Argument(
                "--where KEY=VALUE",
                "only runs with this value of a key of their configuration; several must all hold",
                action="append",
            ),
            Argument("--last N", "only the N that were submitted or started last", type=int),
            Argument("--since TIME", "only those submitted or started since: 90m, 12h, 2d, a date"),
            Argument("--json", "print JSON; with -w one line per look"),
        ],
        examples="""\
  python -m slurm_train status
  python -m slurm_train status gpt-stdlib        all runs of that name
  python -m slurm_train status 9b1c44e0          a sweep: its runs with the values that differ
  python -m slurm_train status -w                goes on until all have ended; Ctrl-C does not end them
  python -m slurm_train status 9b1c44e0 -w 30    looks every 30 s
  python -m slurm_train status --state running,failed --since 2d
  python -m slurm_train status --where optim.lr=3e-4 --last 5
  python -m slurm_train status 3f9a1c07 --json   numbers for programs; docs/watching.md has the keys
""",
    ),
    "logs": Verb(
        "cli.logs",
        "print a run's log and which rank failed first; -f follows it",
        [
            _ONE_RUN,
            _ROOT,
            Argument("-f --follow", "go on printing as the log grows"),
            Argument("--rank N", "which rank (default: 0); -1: the batch script", type=int, default=0),
            Argument("--attempt N", "which attempt (default: the newest)", type=int),
        ],
        examples="""\
  python -m slurm_train logs -f                     the newest run, as it goes on
  python -m slurm_train logs 3f9a1c07 --rank 5
  python -m slurm_train logs 3f9a1c07 --rank -1 --attempt 0
""",
    ),
    "cancel": Verb(
        "cli.cancel",
        "end a run's job",
        [Argument("runs RUN|SWEEP", f"{_RUN}, or a sweep", nargs="+"), _ROOT, _WHERE],
        examples="""\
  python -m slurm_train cancel 3f9a1c07
  python -m slurm_train cancel 1234          by job id
  python -m slurm_train cancel 9b1c44e0 --where optim.lr=1e-3     those runs of a sweep
""",
    ),
    "resume": Verb(
        "cli.resume",
        "continue an unfinished run from its newest checkpoint",
        [
            Argument("run RUN|SWEEP", f"{_RUN}, or a sweep"),
            _ROOT,
            Argument(
                "--accept NAMES",
                "changes to accept: keys or sections, config, code, data; several with commas",
                takes="changes",
                action="append",
            ),
            Argument("--config-dir DIR", "YAML files of your own, for cluster=NAME"),
            Argument(
                "--only STATE,...",
                "of a sweep: runs in these states, e.g. failed,missing,timeout; default: all unfinished",
            ),
            _WHERE,
        ],
        settings="after",
        examples="""\
  python -m slurm_train resume gpt-stdlib                     the newest run of that name
  python -m slurm_train resume 3f9a1c07 cluster=2x8           on another number of nodes, same global batch
  python -m slurm_train resume 3f9a1c07 optim.lr=1e-4         shows what that would change, and refuses
  python -m slurm_train resume 3f9a1c07 optim.lr=1e-4 --accept optim.lr
  python -m slurm_train resume 3f9a1c07 --accept code         with your files as they are now
  python -m slurm_train resume 9b1c44e0 --only failed,missing,timeout     those runs of a sweep
  python -m slurm_train resume 9b1c44e0 --only failed --accept code       with your files as they are now
""",
    ),
    "collate": Verb(
        "cli.collate",
        "table of a sweep: values, best and last metrics, attempts, GPU-hours",
        [
            Argument("sweep SWEEP", "run name or id of a sweep, job id of an array, or path"),
            _ROOT,
            Argument("--format", "default: after --out, else markdown", choices=("csv", "markdown", "parquet")),
            Argument("--out FILE", "default: stdout"),
        ],
        examples="""\
  python -m slurm_train collate 9b1c44e0                          a Markdown table
  python -m slurm_train collate 9b1c44e0 --out results.csv
  python -m slurm_train collate 9b1c44e0 --out results.parquet    needs pyarrow
""",
    ),
    "report": Verb(
        "cli.report",
        "one HTML page of a run or sweep: curves, speed, where the hours went; needs no network",
        [
            Argument("what RUN|SWEEP", f"{_RUN}, a sweep, or a rehearsal's folder; default: the newest run", nargs="?"),
            _ROOT,
            Argument("--out FILE", "default: report.html in the directory of the run or sweep"),
            Argument("--png DIR", "write the main plots there as PNG (pip install matplotlib)"),
            Argument("--metric NAME", "what a sweep is judged by; default: eval_loss, else loss"),
        ],
        examples="""\
  python -m slurm_train report                              the newest run
  python -m slurm_train report 3f9a1c07 --out today.html
  python -m slurm_train report 9b1c44e0                     a sweep
  python -m slurm_train report 3f9a1c07 --png pictures      the main plots as PNG, too (needs matplotlib)
""",
        is_tool=True,
    ),
    "diff": Verb(
        "cli.diff",
        "what differs between two runs: configuration, code, environment",
        [
            Argument("run RUN_A", _RUN, takes="run"),
            Argument("other RUN_B", "default: the folder of RUN_A as it is now", takes="run", nargs="?"),
            _ROOT,
            Argument("--only PARTS", "some of config,code,environment", takes="config,code,environment"),
            Argument("--stat", "of code, lines added and removed per file"),
            Argument("--json", "as one JSON object"),
        ],
        examples="""\
  python -m slurm_train diff 3f9a1c07 7e497dfb                  configuration, code and environment
  python -m slurm_train diff 3f9a1c07 7e497dfb --only code      a unified diff of the two copies of the code
  python -m slurm_train diff 3f9a1c07 7e497dfb --stat           lines added and removed per file
  python -m slurm_train diff 3f9a1c07                           what you have changed since
""",
    ),
    "track": Verb(
        "cli.track",
        "send a run's metrics to its trackers: what its job could not send",
        [
            Argument("run RUN", _RUN),
            _ROOT,
            Argument(
                "--only NAMES", "some of its trackers, e.g. wandb,mlflow", takes="tensorboard|wandb|mlflow|trackio"
            ),
            # What the supervisor calls: follow the run until stdin ends.
            Argument("--beside"),
        ],
        settings="after",
        examples="""\
  python -m slurm_train track 3f9a1c07                            all trackers that its configuration asks for
  python -m slurm_train track 3f9a1c07 --only wandb
  python -m slurm_train track 3f9a1c07 track.mlflow.experiment=gpt    one that the run did not have
""",
        is_tool=True,
    ),
    "scaling": Verb(
        "cli.scaling",
        "short runs from one rank to all nodes: what limits, and whether more nodes pay",
        [
            Argument("--steps N", "optimizer steps of each run (default: 64)", type=int, default=64),
            Argument("--no-wait", "return when all is submitted"),
        ],
        settings="any",
        examples="""\
  python -m slurm_train scaling +cluster=4x8                          1 rank, 1, 2 and 4 nodes, one run after the other
  python -m slurm_train scaling +cluster=4x8 data.path=/data model=gpt train.precision=bfloat16
  python -m slurm_train scaling +cluster=4x2 ddp.comm=none,bf16
  python -m slurm_train scaling run.processes=2                       on this machine

The same command again starts what is missing, waits for what runs, and prints the report when all is there.
""",
        is_tool=True,
    ),
    "rehearse": Verb(
        "cli.rehearse",
        "does this program come back from a preemption? stops, kills and restarts it, in minutes",
        [
            Argument("--steps N", "steps of each run (default: 16)", type=int, default=16),
            Argument(
                "--seconds S", "the most that they take, without the start (default: 60)", type=float, default=60.0
            ),
            Argument("--notice S", "from the signal to KILL (default: the site's, else 30)", type=float),
            Argument("--pattern REGEX", "of a line of its log, with the groups `step`, `loss` and `epoch`"),
            Argument(
                "--only NAMES",
                "some of again,preempted,time_limit,killed,start,save,epoch,ranks",
                takes="again,preempted,time_limit,killed,start,save,epoch,ranks",
            ),
            Argument("--json", "as one JSON object"),
        ],
        settings="any",
        examples="""\
  python -m slurm_train rehearse "script=[train.py,--epochs,3]"         here; exit code 0 if it survives
  python -m slurm_train rehearse +cluster=2x1 "script=[train.py]"       on Slurm, in a short allocation of its own
  python -m slurm_train rehearse run.processes=2 "script=[train.py]"    two ranks
  python -m slurm_train rehearse model=gpt data=stdlib                  the built-in trainer
  python -m slurm_train rehearse "script=[train.py]" --only preempted,killed
""",
        is_tool=True,
    ),
    "evaluate": Verb(
        "cli.evaluate",
        "measure saved weights on the held-out samples; with +cluster=NxG on Slurm",
        [
            Argument("run RUN|CHECKPOINT", _CHECKPOINT, takes="run"),
            _ROOT,
            Argument("--config-dir DIR", "YAML files of your own, for cluster=NAME"),
            Argument("--follow", "score each checkpoint of RUN as it appears, until the run is over"),
            Argument("--with SETTING", 'with --follow: a scorer of your own, e.g. "script=[score.py]"', dest="scorer"),
            Argument("--name NAME", "with --follow: what the measures are called, e.g. wiki for eval_wiki_loss"),
            Argument(
                "--keep N", "with --follow: so many checkpoints that wait for their score stay (default: 8)", type=int
            ),
        ],
        settings="after",
        examples="""\
  python -m slurm_train evaluate gpt-stdlib                          the newest checkpoint, on this machine
  python -m slurm_train evaluate 3f9a1c07@200 data.path=data/other   of step 200, on other text
  python -m slurm_train evaluate 3f9a1c07 +cluster=1x8 parallel.dp_shard=8
  python -m slurm_train evaluate 3f9a1c07 --follow +cluster=1x1      each checkpoint as it appears, in a small job
  python -m slurm_train evaluate 3f9a1c07 --follow --with "script=[score.py]" +cluster=1x1
""",
    ),
    "generate": Verb(
        "cli.evaluate:generate",
        "let a language model continue a text; with +cluster=NxG on Slurm",
        [
            Argument("run RUN|CHECKPOINT", _CHECKPOINT, takes="run"),
            Argument("--prompt TEXT", "what to continue, also several times; default: nothing", action="append"),
            _ROOT,
            Argument("--config-dir DIR", "YAML files of your own, for cluster=NAME"),
            Argument("--max-new-tokens N", "tokens to add at most (default: 200)", type=int, default=200),
            Argument("--temperature T", "0: always the most likely token (default: 0.8)", type=float, default=0.8),
            Argument("--top-k K", "draw from the K most likely tokens (default: all)", type=int),
            Argument("--seed S", "of the draws (default: 0)", type=int, default=0),
            Argument("--tokenizer JSON", "tokenizer.json; default: that of the data, else of model.path"),
        ],
        settings="after",
        examples="""\
  python -m slurm_train generate gpt-stdlib --prompt "def main"
  python -m slurm_train generate 3f9a1c07@200 --prompt "Once" --temperature 0 --max-new-tokens 50
  python -m slurm_train generate 3f9a1c07 --prompt "Once" --prompt "Then" +cluster=1x2
  python -m slurm_train generate 3f9a1c07 --prompt "Once" +cluster=1x8 parallel.dp_shard=8
""",
    ),
    "checkpoint": Verb(
        "cli.checkpoint",
        "ls, verify, diff, gc and export the checkpoints of a run",
        actions={
            "ls": _action("reads the manifests", _ONE_RUN, _ROOT),
            "verify": _action("reads every byte", _ONE_RUN, _ROOT),
            "gc": _action(
                "removes old checkpoints and what dead attempts left",
                Argument("run RUN", _RUN),
                _ROOT,
                Argument("--keep N", "how many stay (default: the run's checkpoint.keep)", type=int),
            ),
            "diff": _action(
                "compares facts and weights, bit for bit",
                Argument("first A", _CHECKPOINT, takes="run"),
                Argument("second B", "likewise", takes="run"),
                _ROOT,
            ),
            "export": _action(
                "writes the model for use elsewhere",
                Argument("checkpoint RUN", _CHECKPOINT),
                Argument("target OUT", "the file to write, e.g. model.safetensors; hf: the directory"),
                _ROOT,
                Argument(
                    "--format",
                    "hf: a directory that transformers reads",
                    choices=("safetensors", "hf"),
                    default="safetensors",
                ),
                Argument("--ema", "the averaged weights that the callback EMA keeps", action="store_true"),
                Argument("--shard-size SIZE", "hf: largest file (default: 5GB)", default="5GB"),
            ),
        },
        examples="""\
  python -m slurm_train checkpoint ls gpt-stdlib
  python -m slurm_train checkpoint verify 3f9a1c07
  python -m slurm_train checkpoint export gpt-stdlib model.safetensors     the newest that verifies
  python -m slurm_train checkpoint export gpt-stdlib@200 model.safetensors
  python -m slurm_train checkpoint export llama-text llama --format hf     for transformers
  python -m slurm_train checkpoint diff gpt-stdlib@100 gpt-stdlib@200      exit code 1 if weights differ
  python -m slurm_train checkpoint gc gpt-stdlib --keep 1
""",
    ),
    "write": Verb("cli.run:write", "write a run directory and start nothing, for a launcher of your own (torchrun)"),
    "prepare": Verb(
        "cli.prepare",
        "turn text, JSON, CSV and Parquet files into token shards",
        [
            Argument("inputs INPUT", "a file, or a folder to search", nargs="+"),
            Argument("--out DIR", "directory of the shards, made here", required=True),
            Argument("--held-out FRACTION", "of files and rows (default 0.1)", type=float, default=0.1),
            Argument("--suffix .txt", "take only such files of folders", action="append"),
            Argument("--text-column NAME", "of files with rows (default text)", default="text"),
            Argument(
                "--tokenizer JSON",
                "tokenizer.json, a model's directory, or org/name of the Hub; without it bytes are the tokens",
            ),
        ],
        examples="""\
  python -m slurm_train prepare books/ --suffix .txt --out data/books
  python -m slurm_train data=text data.path=data/books
""",
    ),
    "doctor": Verb(
        "cli.doctor",
        "what this cluster does to a run; with +cluster=NxG: are its nodes and its network fit?",
        [
            Argument("settings key=value", "+cluster=NxG and other settings of a run", takes="settings", nargs="*"),
            _JSON,
        ],
        examples="""\
  python -m slurm_train doctor                       what happens to a run here on preemption, what can be lost
  python -m slurm_train doctor --json
  python -m slurm_train doctor +cluster=4x8          a job that checks 4 nodes and their network, and ends
  python -m slurm_train doctor +cluster=4x8 cluster.partition=gpu cluster.network_interface=ib0
""",
        is_tool=True,
    ),
    "init": Verb(
        "cli.init",
        "look at this cluster and write a site file for it, to be chosen by site=NAME",
        [
            Argument("name NAME", "of the site (default: Slurm's ClusterName)", nargs="?"),
            Argument("--yes", "take the default of every question"),
            Argument("--force", "replace an existing file"),
            Argument("--print", "print the file and write nothing"),
            Argument("--config-dir DIR", "write below DIR/site/ (default: ~/.config/slurm_train)"),
        ],
        examples="""\
  python -m slurm_train init                      name and answers are proposed
  python -m slurm_train init mycluster --yes      asks nothing
  python -m slurm_train init --print              shows the file, writes nothing
  python -m slurm_train plan +cluster=4x8 site=mycluster
""",
        is_tool=True,
    ),
    "devcluster": Verb(
        "cli.devcluster",
        "a real Slurm on this one machine, for trying and testing",
        actions={
            "up": _action(
                "build the cluster and wait until its nodes are idle",
                _STATE_DIR,
                Argument("--nodes N", "nodes (default 4)", type=int, default=4),
                Argument("--gpus N", "GPU devices per node (default 8)", type=int, default=8),
                Argument("--user NAME", "a further user who may submit; may be repeated", action="append"),
            ),
            "down": _action(
                "end its jobs and remove all of it",
                _STATE_DIR,
            ),
            "status": _action("daemons and nodes; exit code 0 if healthy, else 1", _STATE_DIR),
            "add-user": _action(
                "let a user who came after `up` submit jobs",
                Argument("user", "a user of this machine", nargs="+"),
                _STATE_DIR,
            ),
            "kill-node": _action(
                "kill the slurmd of a node",
                _NODE,
                _STATE_DIR,
                Argument("--with-jobs", "kill every process on the node, as a power cut does"),
            ),
            "start-node": _action("start the slurmd of a node again", _NODE, _STATE_DIR),
        },
        examples="""\
  python -m slurm_train devcluster up --nodes 4 --gpus 8
  srun --nodes=4 hostname
  python -m slurm_train +cluster=4x8
  python -m slurm_train devcluster kill-node node2      # slurmd dies; the node is down 20 s later
  python -m slurm_train devcluster start-node node2
  python -m slurm_train devcluster down
""",
        is_tool=True,
    ),
    "completion": Verb(
        "tools.completion",
        "print the script that completes slurm-train in bash, zsh or fish",
        [Argument("shell", "your shell", choices=("bash", "fish", "zsh"))],
        examples="""\
  eval "$(python -m slurm_train completion bash)"      now, in this shell; in ~/.bashrc for ever
  eval "$(python -m slurm_train completion zsh)"       in ~/.zshrc after compinit
  python -m slurm_train completion fish | source       in ~/.config/fish/config.fish
  complete -F _slurm_train train                       bash: for an alias `train` of yours
""",
        is_tool=True,
    ),
    "here": Verb("cli.here"),
    "supervise": Verb("cli.supervise"),
    "there": Verb("cli.on:answer_request"),
    "submit": Verb("cli.handles"),
    "torchrun": Verb("worker.torchrun"),
    "worker": Verb("worker.main"),
    "complete": Verb("tools.completion:complete", is_tool=True),
    "measure": Verb("train.measure"),
}
PUBLIC_VERBS = {name: verb for name, verb in VERBS.items() if verb.about}
"""What people type; the others are called by the job, the shell and other verbs."""

_HELP = """\
Slurm-native training for PyTorch: one line plans, submits, watches, checkpoints and finishes a run.

  python -m slurm_train                              train here, on this machine's GPUs or cores
  python -m slurm_train +cluster=4x8                 submit to Slurm: 4 nodes with 8 GPUs each
  python -m slurm_train +cluster=4x8 optim.lr=3e-4   settings are key=value, as in Hydra
  python -m slurm_train -m +cluster=1x8 optim.lr=1e-3,3e-4 "seed=range(8)"      16 runs as one job array
  python -m slurm_train plan +cluster=4x8            look first: arithmetic, ranks, the exact script
  python -m slurm_train +experiment=digits           another model and data set
  python -m slurm_train model._target_=my_package.MyModel data._target_=my_package.MyData
  python -m slurm_train +cluster=2x4 task._target_=my_package.main      your function on every rank
  python -m slurm_train +cluster=2x4 "script=[train.py,--epochs,3]"     your script on every rank

  python -m slurm_train --on HOST +cluster=4x8       from your own machine: by ssh, on that login node; so do all verbs

verbs (`python -m slurm_train VERB --help` tells more):
@VERBS@
settings and flags:
  key=value            any key of the configuration; --cfg job prints them all
  --config-dir DIR     YAML files of your own; they may shadow the shipped ones
  --config-path DIR    likewise, in front of --config-dir
  --config-name NAME   another primary file than config.yaml
  after=RUN            with +cluster: start when that run has finished; RUN,RUN for several
  -m, --multirun       several values make several runs: key=1,2,3, "key=range(8)", key=choice(a,b)
  --wait               with -m: return when all runs have ended
  --cfg job            print the composed configuration and do nothing
  --info               facts about the composition
  --hydra-help         what Hydra's own flags and settings (hydra/sweeper, ...) do here
  --version            versions of this program and of Hydra
"""

HYDRA_HELP = """\
The command line is Hydra's: the grammar of overrides, groups, sweeps and interpolations. docs/hydra.md has all of it.

flags
  --cfg job|hydra|all     print the configuration and do nothing; --package NAME a part of it, --resolve its references
  --info [all|config|defaults|defaults-tree|plugins|searchpath]
  --config-dir DIR, -cd   YAML files of your own, in front of the shipped ones
  --config-path DIR, -cp  the same, in front of --config-dir; also pkg://package
  --config-name NAME, -cn another primary file than config.yaml
  --multirun, -m          a run of each value; --run, -r is what happens without it

settings to Hydra, typed or in a file of your own
  hydra.mode=MULTIRUN              as -m
  hydra.searchpath=[file://DIR]    more places for configurations, behind the shipped ones
  hydra.job.name=NAME              as run.name=NAME
  hydra.job.config.override_dirname.*   shapes ${hydra.job.override_dirname}
  hydra/sweeper=NAME, hydra.sweeper.*   another sweeper, e.g. optuna; hydra.sweeper.params is a sweep

refused, with what to type instead
  hydra.run.dir, hydra.sweep.dir, hydra.sweep.subdir, hydra.output_subdir: run.root=DIR, run.name=NAME
  hydra/launcher=NAME, hydra.launcher.*: +cluster=<nodes>x<GPUs per node>, or nothing
  hydra.verbose, hydra.job_logging, hydra.hydra_logging, hydra.callbacks, hydra.job.chdir=true,
  hydra.job.env_set, hydra.job.env_copy, hydra.sweeper.max_batch_size, --shell-completion, --experimental-rerun
"""
"""Of `--hydra-help`."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run(words: Sequence[str], *, command: str = COMMAND) -> int:
    """Runs a command line; returns its exit code (0 done, 1 failure, 2 wrong use, 75 must be started again).

    Args:
        words: what was typed.
        command: what was typed before it, and is shown before other words to type.
    """
    _set_home_without_passwd_entry()
    # What runs a user's code prints as it likes: into logs, which `logs` looks through.
    is_of_job = bool(words) and words[0] in VERBS and words[0] not in (*PUBLIC_VERBS, "complete", "submit")
    with contextlib.nullcontext() if is_of_job else printing_safely(command=command):
        return _run(words)


def _run(words: Sequence[str]) -> int:
    try:
        code = _dispatch(words)
        # A closed pipe is met here rather than when the interpreter ends.
        sys.stdout.flush()
        return code
    except SlurmTrainError as err:
        return _print_error(err)
    except (PermissionError, NotADirectoryError) as err:
        # Where somebody's own code may be at work the traceback says more.
        if err.filename is None or words[:1] in (["worker"], ["supervise"]):
            raise
        message = f"{err.filename}: you may not read or write it, or not enter its folder"
        hint = "ask its owner, or name another place: --root DIR, run.root=DIR"
        if err.errno == errno.EPERM:
            message = f"{err.filename}: {err.strerror}"
            hint = "its file system, or an attribute of the file (`lsattr`), forbids that; name another: run.root=DIR"
        if isinstance(err, NotADirectoryError):
            message = f"{err.filename}: {_file_above(err.filename)} is a file, and no folder"
            hint = "name another place: --root DIR, run.root=DIR; where it is your home, set HOME"
        return _print_error(RunError(message, hint=hint))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # `... | head` closed the pipe; what is still buffered must go somewhere when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as err:
        if err.errno not in _NO_ROOM or err.filename is None or words[:1] in (["worker"], ["supervise"]):
            raise
        hint = "make room there, or name another place (run.root=DIR); then type the same command again"
        return _print_error(SlurmTrainError(f"{err.filename} cannot be written: {err.strerror}", hint=hint))


def _file_above(path: str) -> str:
    """Returns the part of a path that is a file although something lies below it; the whole path if there is none."""
    folder = os.path.dirname(path)  # noqa: PTH120  # this module imports nothing slow
    while folder not in ("", "/"):
        if os.path.isfile(folder):  # noqa: PTH113  # as above
            return folder
        folder = os.path.dirname(folder)  # noqa: PTH120  # as above
    return path


def _print_error(err: SlurmTrainError) -> int:
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        import traceback

        traceback.print_exc()
    from slurm_train.explained import with_address

    print(f"error: {with_address(str(err), err.message)}", file=sys.stderr, flush=True)
    return err.exit_code


def _set_home_without_passwd_entry() -> None:
    """Sets HOME and USER for a uid without an entry in passwd, as in containers; libraries fail without them.

    The home is "/", as container runtimes have it: nothing is found there, and nothing is written.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("HOME", "/")
        os.environ.setdefault("USER", str(os.getuid()))


def _dispatch(words: Sequence[str]) -> int:
    if "--on" in words:
        at = words.index("--on")
        return _load_quickly(Verb("cli.on"))([*words[at + 1 : at + 2], *words[:at], *words[at + 2 :]])
    first = words[0] if words else ""
    if first in VERBS:
        # A rank runs a user's code, which keeps Python's own settings.
        return VERBS[first].load()(words[1:]) if first == "worker" else _load_quickly(VERBS[first])(words[1:])
    # A word that is no verb is refused there, with what was probably meant.
    if first.isidentifier():
        return _load_quickly(Verb("cli.run"))(words)
    if "--help" in words or "-h" in words:
        print(help_text())
        return 0
    if "--hydra-help" in words:
        print(HYDRA_HELP, end="")
        return 0
    if "--version" in words:
        from importlib.metadata import version

        print(f"slurm_train {__version__}, Hydra {version('hydra-core')}")
        return 0
    # Before what the verb imports, which takes half as long as the answer.
    commands = _load_quickly(Verb("slurm.site:ask_early"))(words, os.environ)
    return _load_quickly(Verb("cli.run"))(words, commands)


def _load_quickly(verb: Verb) -> Callable[..., int]:
    """Returns a verb's function; what its import has made is never looked at by the garbage collector.

    A command that lives for a fifth of a second gains a tenth of it. From then on the collector is on, with a first
    threshold that short commands do not reach: some verbs live for days.
    """
    gc.disable()
    try:
        return verb.load()
    finally:
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        gc.enable()


def help_text() -> str:
    """Returns the text of `--help`."""
    return _HELP.replace("@VERBS@", "\n".join(f"  {name:<20} {verb.about}" for name, verb in PUBLIC_VERBS.items()))


def _is_setting(word: str) -> bool:
    """Returns whether a word behind a run is key=value or ~key; a path may have an equals sign, too."""
    if word.startswith("~"):
        return "/" not in word
    return "=" in word and not word.startswith(("/", "."))


def parse(name: str, words: Sequence[str]) -> Namespace:
    """Returns what was typed behind a verb: an attribute for each of its arguments, and `settings` where it takes them.

    Ends the process with 2 after a usage message where the words are wrong, with 0 after `--help`.

    Args:
        name: of the verb.
        words: what was typed behind it.
    """
    verb = VERBS[name]
    parser = build_parser(name)
    if "" in words:
        # An empty word would mean the default: `resume "$RUN"` would resume the newest run.
        parser.error("one of the words is empty: is it a shell variable that is not set?")
    if verb.settings == "any":
        arguments, remaining = parser.parse_known_args(words)
        arguments.settings = remaining
    elif verb.settings == "after":
        arguments, remaining = parser.parse_known_intermixed_args(words)
        if remaining:
            parser.error(
                f"unrecognized arguments: {' '.join(remaining)} (settings are key=value, without dashes: optim.lr=3e-4)"
            )
        arguments.settings = [word for word in arguments.words if _is_setting(word)]
        runs = [word for word in arguments.words if word not in arguments.settings]
        if len(runs) != 1:
            required = "the following arguments are required: RUN"
            parser.error(f"several runs are named: {' '.join(runs)}" if runs else required)
        arguments.run = runs[0]
    else:
        arguments = parser.parse_args(words)
    return arguments


def build_parser(name: str) -> ArgumentParser:
    """Returns the parser of a verb that does not only take settings."""
    from argparse import ArgumentParser, RawDescriptionHelpFormatter

    verb = VERBS[name]
    parser = ArgumentParser(
        prog=f"python -m slurm_train {name}",
        description=sys.modules[verb.load().__module__].__doc__,
        epilog=f"examples:\n{verb.examples}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    _add_arguments(parser, verb)
    if verb.actions:
        actions = parser.add_subparsers(dest="action", required=True, metavar=f"{{{','.join(verb.actions)}}}")
        for action, its_verb in verb.actions.items():
            _add_arguments(actions.add_parser(action, help=its_verb.about), its_verb)
    return parser


def _add_arguments(parser: ArgumentParser, verb: Verb) -> None:
    from argparse import SUPPRESS

    for argument in verb.arguments or ():
        if verb.settings == "after" and not argument.is_flag:
            # Settings may be typed on either side of the run and the flags.
            parser.add_argument("words", nargs="*", metavar=argument.options["metavar"], help=argument.about)
            flags = " ".join(f"[{flag.names[-1]} ...]" for flag in verb.arguments or () if flag.is_flag and flag.about)
            parser.usage = f"%(prog)s RUN [key=value ...] {flags}"
        else:
            parser.add_argument(*argument.names, help=argument.about or SUPPRESS, **argument.options)
