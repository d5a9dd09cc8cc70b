"""The shape of the house: layers, circles, length, who talks to whom, the torch-free half, the wheel's content.

Every rule is a function of a source tree, so that the last tests can hand it a small tree that breaks the rule and see
it found. Loosening a rule needs a reason in the commit.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import zipfile
from pathlib import Path

import pytest

from tests.support.source_tree import (
    PACKAGE,
    REPOSITORY,
    Rule,
    Tree,
    conditions_in,
    package_tree,
    room_of,
    small_tree,
    uses,
)

LAYERS = [
    {"formatting", "mounts", "processes"},
    {"errors", "assets", "__init__"},
    {"trust", "explained"},
    {"config"},
    {"slurm"},
    {"rundir"},
    {"status", "code", "distributed"},
    {"models", "data", "checkpoint", "metrics"},
    {"plan", "session"},
    {"request"},
    {"start", "supervise", "train", "adapters"},
    {"evaluation"},
    {"verbs"},
    {"tools"},
    {"worker"},
    {"cli"},
    {"__main__"},
]

# Modules that import torch as soon as they are imported are left out by name; all others of the login half are tried.
TORCH_FREE_ROOMS = (
    *("config", "slurm", "rundir", "status", "code", "plan", "request", "start", "supervise", "worker", "cli"),
    *("tools", "session"),
    *(
        "tools.devcluster",
        "tools.doctor",
        "tools.report",
        "tools.rehearsal",
        "tools.scaling",
        "tools.site",
        "tools.completion",
    ),
)
TORCH_FREE_MODULES = (
    "errors",
    "assets",
    "explained",
    "formatting",
    "mounts",
    "processes",
    "verbs",
    "__main__",
    "data.check",
    "data.prepare",
    "data.shards",
    "checkpoint.choice",
    "checkpoint.verify",
    "checkpoint.manifest",
    "checkpoint.commit",
    "checkpoint.filling",
    "checkpoint.resumption",
    "metrics",
    "tools.trackers.adapters",
    "tools.trackers.follow",
)

SUBMITIT = {"request.submission"}
SLURM_COMMANDS = ("squeue", "sacct", "scontrol", "scancel", "sinfo", "sbatch", "srun", "sacctmgr", "salloc")
# Only these may hold a Slurm command as a word of a command line.
COMMAND_WORDS = {
    # srun there reads its flags and its help, and runs nothing.
    "slurm.commands": {"squeue", "sacct", "scontrol", "scancel", "sinfo", "sbatch", "sacctmgr", "srun"},
    "request.submission": {"sbatch"},
    "slurm.job_request": {"srun"},
    "request.acceptance": {"salloc"},
    "supervise.asking": {"srun"},
    # A value of cluster.launcher.
    "config.schema": {"srun"},
    # Names of sections: cluster.sbatch and cluster.srun.
    "config.yaml_files": {"sbatch", "srun"},
}
# The one-machine cluster starts, configures and asks its own daemons.
OWN_CLUSTER = "tools.devcluster."
# The ranks' stop flag; those that outlive the ranks, which are the supervisor, the local launch, a sweep on this
# machine and whoever waits in an allocation; loader workers, which are made deaf; a tracker's process, whose
# stdin ends with the run; ssh, which leaves Ctrl-C to the command that has started it.
SIGNAL_HANDLERS = {
    *("session.signals", "supervise.supervisor", "cli.on"),
    *("tools.trackers.follow", "data.mapstyle"),
}
# A script's runner is a program of its own, started by its path.
# `session.join` is where a user's own program enters.
ENVIRONMENT_READERS = ("cli.", "worker.", "verbs", "__main__", "session.client")
# cuBLAS reads its workspace setting from the process alone, so deterministic mode has to put it there. Words that were
# sent by ssh run in the process that has received them.
ENVIRONMENT_WRITERS = {"train.context", "cli.on"}
MESH_MAKERS = {"distributed.parallelize"}
# Of the supervisor; each reading of all ranks takes a file per node.
HEARTBEAT_READERS = {"supervise.look"}
# A file of a run has one record, and one module that reads and writes it.
RECORDS = {"attempts": "rundir.ledger", "plan": "rundir.plan_record"}
# Names that only lines of the ledger have.
LEDGER_KEYS = {"restart_count", "first_committed", "last_committed", "step_before", "failed_on", "left_out", "grow_to"}
FILE_READERS = ("read_json", "read_record", "read_lines", "last_lines", "read_text", "read_bytes", "read_tail")
# Where a run and its root lie is known here.
PLACES = "rundir.paths"
# A job is a value beside its script; only here is a script's text made, and parsed where there is no such value.
SCRIPT_PARSER = "slurm.job_request"
# The table of kinds, and the decoder of notes that earlier versions have written.
CAUSE_READERS = {"rundir.cause"}
TEXT_OF_CAUSE = re.compile(r"\bcause\b(?!\.(?:ranks|kind|node)\b)|\bnote\b|\bmark\.message\b")
# From what an attempt leaves to what is done about it; a `Kind` is a row of the table.
VALUES_OF_AN_END = {"Traces", "Cause", "Kind", "Decision"}
MODULES_OF_AN_END = ("supervise.evidence", "supervise.actions", "supervise.decision", "rundir.cause")
# The table; and what several ranks that ended alike say together. Rules about nodes have findings.
JUDGES_OF_CAUSES = ("rundir.cause", "supervise.evidence", "tools.doctor.")
# A start; the arrays that it asks for; the job that takes over from one that ends.
RUN_STARTERS = {"start.start", "request.arrays", "request.submission", "supervise.continuation"}
# `RunConfig.uses_cluster`, `.slurm` and `.is_submitted` answer it; who composes has a mapping yet.
MOST_ASKING_FOR_CLUSTER = 2
# Where a `Program` is made, where two of them are refused, and where ranks run one.
MOST_ASKING_WHAT_RUNS = 3
# To be lowered; never raised.
MOST_FLOORS = 12
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}
# Lines of code: docstrings, comments and blank lines do not count.
MOST_LINES = 60
MOST_ATTRIBUTES = 15
# A docstring with such a sentence says why a function or a class is larger.
LENGTH_REASON = "Long because "
WIDTH_REASON = "Wide because "
LAYOUT_TOKENS = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def level_of(room: str) -> int | None:
    return next((level for level, rooms in enumerate(LAYERS) if room.split(".")[0] in rooms), None)


def wrong_layers(tree: Tree) -> list[str]:
    """Imports that go up or sideways, and rooms that the plan does not know."""
    found = [f"{room_of(module)} is in no layer" for module in tree.paths if level_of(room_of(module)) is None]
    for module in tree.paths:
        for other in tree.imports(module):
            mine, theirs = level_of(room_of(module)), level_of(room_of(other))
            if room_of(module) == room_of(other) or mine is None or theirs is None:
                continue
            if theirs >= mine:
                found.append(f"{module} imports {other}")
    return found


def circles(tree: Tree) -> list[str]:
    """Modules that import each other, directly or by way of others: at any time, and for type checkers, too."""
    edges = {module: sorted(set(tree.imports(module)) - {module, "__init__"}) for module in tree.paths}
    findings: list[str] = []
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            findings.append(" -> ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for other in edges[module]:
                visit(other, (*path, module))
            done.add(module)

    for module in edges:
        visit(module, ())
    return findings


def long_functions(tree: Tree) -> list[str]:
    """Functions of more lines of code than `MOST_LINES` whose docstring gives no reason."""
    findings = []
    for module, parsed in tree.parsed.items():
        code = lines_of_code(tree, module)
        for node in ast.walk(parsed):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            assert node.end_lineno is not None
            num_lines = len(code & set(range(node.lineno, node.end_lineno + 1)))
            if num_lines > MOST_LINES and LENGTH_REASON not in (ast.get_docstring(node) or ""):
                findings.append(f"{module}.{node.name} has {num_lines} lines")
    return findings


def lines_of_code(tree: Tree, module: str) -> set[int]:
    """Returns the numbers of a module's lines that have code: no docstrings, comments or blank lines."""
    docstrings: set[int] = set()
    for node in ast.walk(tree.parsed[module]):
        is_text = (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        if is_text:
            assert node.end_lineno is not None
            docstrings |= set(range(node.lineno, node.end_lineno + 1))
    text = tree.paths[module].read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0] for token in tokens if token.type not in LAYOUT_TOKENS} - docstrings


def wide_classes(tree: Tree) -> list[str]:
    """Classes outside `config` of more attributes than `MOST_ATTRIBUTES` whose docstring gives no reason."""
    findings = []
    for module, parsed in tree.parsed.items():
        for node in ast.walk(parsed):
            if not isinstance(node, ast.ClassDef) or room_of(module) == "config":
                continue
            num_attributes = len(attributes_of(node))
            if num_attributes > MOST_ATTRIBUTES and WIDTH_REASON not in (ast.get_docstring(node) or ""):
                findings.append(f"{module}.{node.name} has {num_attributes} attributes")
    return findings


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Returns the names of a class's fields, and of what its methods set on `self`."""
    names = set()
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            names.add(field.target.id)
    for inner in ast.walk(node):
        is_set = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if is_set and isinstance(inner.value, ast.Name) and inner.value.id == "self":
            names.add(inner.attr)
    return names


def submitit_imports(tree: Tree) -> list[str]:
    found = []
    for module, parsed in tree.parsed.items():
        for node in ast.walk(parsed):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{module} imports {name}" for name in names if name.split(".")[0] == "submitit"]
    return [text for text in found if text.split()[0] not in SUBMITIT]


def slurm_command_words(tree: Tree) -> list[str]:
    """Command lines with a Slurm command as their first word: a list or tuple that starts with its bare name."""
    found = []
    for module, parsed in tree.parsed.items():
        if module.startswith(OWN_CLUSTER):
            continue
        for node in ast.walk(parsed):
            word = _first_command_word(node)
            if word is not None and word not in COMMAND_WORDS.get(module, set()):
                found.append(f"{module} runs {word}")
    return found


def _first_command_word(node: ast.AST) -> str | None:
    """Returns the Slurm command that an argument list begins with, or holds after a wrapper like env."""
    if not isinstance(node, (ast.List, ast.Tuple)):
        return None
    texts = [item.value for item in node.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return next((text for text in texts[:3] if text in SLURM_COMMANDS), None)


def signal_handlers(tree: Tree) -> list[str]:
    calls = uses(tree, lambda node: isinstance(node, ast.Call) and ast.unparse(node.func) == "signal.signal")
    return [text for text in calls if text not in SIGNAL_HANDLERS]


def environment_readers(tree: Tree) -> list[str]:
    words = ("os.environ", "os.getenv", "os.environb", "os.putenv")
    readers = uses(tree, lambda node: isinstance(node, ast.Attribute) and ast.unparse(node) in words)
    return [
        module for module in readers if not module.startswith(ENVIRONMENT_READERS) and module not in ENVIRONMENT_WRITERS
    ]


def mesh_makers(tree: Tree) -> list[str]:
    """Modules that make a device mesh; others may name its type."""
    words = ("init_device_mesh", "DeviceMesh")

    def makes(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in words

    return [module for module in uses(tree, makes) if module not in MESH_MAKERS]


def heartbeat_readers(tree: Tree) -> list[str]:
    """Modules of the supervisor that read heartbeats, beside the one that makes a `Look` for all judges."""

    def reads(node: ast.AST) -> bool:
        return isinstance(node, ast.ImportFrom) and any(alias.name == "read_beats" for alias in node.names)

    modules = [module for module in uses(tree, reads) if room_of(module) == "supervise"]
    return [module for module in modules if module not in HEARTBEAT_READERS]


def removals_of_trees(tree: Tree) -> list[str]:
    """Uses of `shutil.rmtree` and its like, beside `rundir.removal`, which follows no link."""
    names = ("rmtree", "removedirs")
    return uses(tree, lambda node: isinstance(node, ast.Attribute) and node.attr in names)


def shells(tree: Tree) -> list[str]:
    def is_shell(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        return ast.unparse(node.func) in ("os.system", "os.popen") or any(
            word.arg == "shell" and getattr(word.value, "value", True) for word in node.keywords
        )

    return uses(tree, is_shell)


def errors_without_hint(tree: Tree) -> list[str]:
    """Errors of the tree in errors.py that are made without a next step: no hint, or one that may be empty.

    A class of its own constructor may give the hint there, to all that are made of it.
    """
    classes = _error_classes(tree)
    with_constructor = {name for name, node in classes.items() if _constructor(node) and name != "SlurmTrainError"}
    found = []
    for module, parsed in tree.parsed.items():
        of_super = {
            id(call)
            for node in ast.walk(parsed)
            if isinstance(node, ast.ClassDef) and node.name in with_constructor
            for call in ast.walk(node)
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__"
        }
        for node in ast.walk(parsed):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            is_error = (name in classes and name not in with_constructor) or id(node) in of_super
            hint = next((word.value for word in node.keywords if word.arg == "hint"), None)
            if is_error and (hint is None or _may_be_empty(hint)):
                found.append(f"{module}:{node.lineno} makes an error without a hint")
    return found


def _error_classes(tree: Tree) -> dict[str, ast.ClassDef]:
    """Returns all classes that derive from SlurmTrainError, and itself, wherever they are defined."""
    all_classes = {"SlurmTrainError": ast.ClassDef("SlurmTrainError", [], [], [], [])} | {
        node.name: node
        for parsed in tree.parsed.values()
        for node in ast.walk(parsed)
        if isinstance(node, ast.ClassDef)
    }
    names = {"SlurmTrainError"}
    while more := {name for name, node in all_classes.items() if names & set(map(ast.unparse, node.bases))} - names:
        names |= more
    return {name: all_classes[name] for name in names}


def _constructor(node: ast.ClassDef) -> bool:
    return any(isinstance(inner, ast.FunctionDef) and inner.name == "__init__" for inner in node.body)


def _may_be_empty(hint: ast.expr) -> bool:
    if isinstance(hint, ast.IfExp):
        return _may_be_empty(hint.body) or _may_be_empty(hint.orelse)
    return isinstance(hint, ast.Constant) and not hint.value


def script_readers(tree: Tree) -> list[str]:
    """Functions that read a batch script's text, or know its lines, beside the one that makes and parses it."""

    def knows_its_lines(node: ast.AST) -> bool:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        return is_text and ("#SBATCH -" in node.value or "slurm_train supervise " in node.value)

    return [
        module
        for module in uses(tree, lambda node: _file_read(node) in ("submit_script", "script") or knows_its_lines(node))
        if module != SCRIPT_PARSER
    ]


def _file_read(node: ast.AST) -> str:
    """Returns the file of a run that a call reads, by its name there; "" for no such call."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in FILE_READERS:
        return ""
    places = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    return next((place.attr for place in places if isinstance(place, ast.Attribute)), "")


def record_readers(tree: Tree) -> list[str]:
    """Reads of a record's file, or of a value in it by name, beside its module; ways from a run up to its root."""
    found = []
    for module, parsed in tree.parsed.items():
        for node in ast.walk(parsed):
            file = _file_read(node)
            keys: list[ast.expr] = []
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".get"):
                keys = node.args[:1]
            elif isinstance(node, ast.Subscript):
                keys = [node.slice]
            is_key = any(isinstance(key, ast.Constant) and key.value in LEDGER_KEYS for key in keys)
            if file in RECORDS and module != RECORDS[file]:
                found.append(f"{module}:{node.lineno} reads {file}")
            if is_key and module != RECORDS["attempts"]:
                found.append(f"{module}:{node.lineno} reads {ast.unparse(node)}")
            if (
                isinstance(node, ast.Attribute)
                and module != PLACES
                and ast.unparse(node).endswith("path.parent.parent")
            ):
                found.append(f"{module}:{node.lineno} has {ast.unparse(node)}")
    return found


def causes_read_as_text(tree: Tree) -> list[str]:
    """Tests of what a cause, a note or a mark says: what follows from the words of an end stands in one table."""
    methods = {"search", "match", "fullmatch", "findall", "finditer", "startswith", "endswith", "partition", "split"}
    methods |= {"rpartition", "removeprefix", "removesuffix", "find", "index"}
    found = []
    for module, parsed in tree.parsed.items():
        if module in CAUSE_READERS:
            continue
        for node in ast.walk(parsed):
            texts: list[ast.expr] = []
            if isinstance(node, ast.Compare) and any(isinstance(one, (ast.In, ast.NotIn)) for one in node.ops):
                texts = node.comparators
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
                texts = [node.func.value, *node.args]
            if any(TEXT_OF_CAUSE.search(ast.unparse(text)) for text in texts):
                found.append(f"{module}:{node.lineno} reads {ast.unparse(node)}")
    return found


def other_values_of_an_end(tree: Tree) -> list[str]:
    """Classes between an exit code and a decision, beside the traces, the cause and the decision."""
    return [
        f"{module} has {node.name}"
        for module in MODULES_OF_AN_END
        for node in ast.walk(tree.parsed.get(module, ast.Module([], [])))
        if isinstance(node, ast.ClassDef) and node.name not in VALUES_OF_AN_END
    ]


def other_judges_of_causes(tree: Tree) -> list[str]:
    """Lines that decide whether an end would come again, or blames its node, beside the one table."""
    found = []
    for module, parsed in tree.parsed.items():
        if module.startswith(JUDGES_OF_CAUSES):
            continue
        for node in ast.walk(parsed):
            is_word = isinstance(node, ast.keyword) and node.arg in ("lasting", "blames_node")
            if is_word and isinstance(node.value, ast.Constant):
                found.append(f"{module}:{node.lineno} says {ast.unparse(node)}")
    return found


def floors(tree: Tree) -> list[str]:
    """The longest chain of rooms that import each other, lowest first; a tool counts as its room's.

    What may import what follows from `LAYERS`; this is what does.
    """
    below: dict[str, set[str]] = {}
    for module in tree.paths:
        room = level_name(module)
        below.setdefault(room, set()).update(map(level_name, tree.imports(module)))
    chains: dict[str, list[str]] = {"__init__": ["__init__"]}

    def chain_of(room: str) -> list[str]:
        if room not in chains:
            longest = max((chain_of(other) for other in below.get(room, set()) - {room}), key=len, default=[])
            chains[room] = [*longest, room]
        return chains[room]

    return max(map(chain_of, below), key=len)


def level_name(module: str) -> str:
    return room_of(module).split(".")[0]


def too_many_floors(tree: Tree) -> list[str]:
    """The rooms of the longest chain of imports, if it has more floors than `MOST_FLOORS`."""
    chain = floors(tree)
    return chain if len(chain) > MOST_FLOORS else []


def run_starters(tree: Tree) -> list[str]:
    """Modules that write or submit runs, beside the one order of every start."""
    words = ("write_run", "submit_run", "submit_request", "submit_arrays")

    def starts(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) in words

    return [module for module in uses(tree, starts) if module not in RUN_STARTERS]


def questions_for_the_program(tree: Tree) -> list[str]:
    """More modules than `MOST_ASKING_WHAT_RUNS` that ask whether the trainer, a task or a script runs."""

    def asks(node: ast.AST) -> bool:
        return any(
            isinstance(condition, ast.Attribute)
            and condition.attr in ("trains", "task", "script")
            and ast.unparse(condition.value).split(".")[-1] == "config"
            for condition in conditions_in(node)
        )

    modules = uses(tree, asks)
    return modules if len(modules) > MOST_ASKING_WHAT_RUNS else []


def questions_for_the_cluster(tree: Tree) -> list[str]:
    """More modules than `MOST_ASKING_FOR_CLUSTER` that ask whether a run has a cluster."""

    def asks(node: ast.AST) -> bool:
        if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            return False
        return ast.unparse(node.left).split(".")[-1] == "cluster" and ast.unparse(node.comparators[0]) == "None"

    modules = uses(tree, asks)
    return modules if len(modules) > MOST_ASKING_FOR_CLUSTER else []


def vague_names(tree: Tree) -> list[str]:
    return [module for module in tree.paths if VAGUE_NAMES & set(module.split("."))]


RULES: dict[str, Rule] = {
    "imports go down only": wrong_layers,
    "no import circles": circles,
    "a long function says why": long_functions,
    "a wide class says why": wide_classes,
    "one module imports submitit": submitit_imports,
    "one module runs Slurm's commands": slurm_command_words,
    "one module installs the ranks' signal handlers": signal_handlers,
    "the environment is read at the entry points": environment_readers,
    "no command goes through a shell": shells,
    "every error says what to do": errors_without_hint,
    "one module makes meshes": mesh_makers,
    "one module of the supervisor reads heartbeats": heartbeat_readers,
    "one module removes folders": removals_of_trees,
    "one module knows the text of a batch script": script_readers,
    "one module reads a record": record_readers,
    "causes are values": causes_read_as_text,
    "three values lead to a decision": other_values_of_an_end,
    "one table judges causes": other_judges_of_causes,
    "every run is started in one order": run_starters,
    "no more floors": too_many_floors,
    "few modules ask for the cluster": questions_for_the_cluster,
    "no more modules ask what runs": questions_for_the_program,
    "no vague names": vague_names,
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_rule_holds(rule: Rule) -> None:
    assert rule(package_tree()) == []


def test_the_login_half_imports_no_torch() -> None:
    tree = package_tree()
    rooms = [module for module in tree.paths if room_of(module) in TORCH_FREE_ROOMS]
    missing = [module for module in TORCH_FREE_MODULES if module not in tree.paths]
    assert missing == []
    names = [f"{PACKAGE}.{module}" for module in (*rooms, *TORCH_FREE_MODULES)]
    assert imported_heavy(names) == []


def imported_heavy(names: list[str]) -> list[str]:
    """Imports the modules one after the other in a process of their own; returns those that brought torch along."""
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        print(name); break\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    return done.stdout.split()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names of the files in the wheel that this checkout builds."""
    builder = pytest.importorskip("hatchling.builders.wheel")
    folder = tmp_path_factory.mktemp("wheel")
    (path,) = builder.WheelBuilder(str(REPOSITORY)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_package_its_configurations_and_templates(wheel: list[str]) -> None:
    tree = package_tree()
    assert {f"{PACKAGE}/{path.relative_to(tree.root)}" for path in tree.paths.values()} <= set(wheel)
    for folder in ("conf", "sbatch_templates"):
        files = [path for path in (REPOSITORY / folder).rglob("*") if path.is_file()]
        assert files
        assert {f"{PACKAGE}/{path.relative_to(REPOSITORY)}" for path in files} <= set(wheel)
    page = [path for path in (tree.root / "tools" / "report" / "page").iterdir() if path.is_file()]
    assert {path.suffix for path in page} == {".html", ".css", ".js", ".txt"}
    assert {f"{PACKAGE}/{path.relative_to(tree.root)}" for path in page} <= set(wheel)


def test_the_wheel_holds_nothing_else(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    assert tops - {PACKAGE} == {name for name in tops if name.endswith(".dist-info")}
    endings = {Path(name).suffix for name in wheel if name.startswith(f"{PACKAGE}/")}
    assert endings <= {".py", ".yaml", ".json", ".sh", ".typed", ".html", ".css", ".js", ".txt"}
    assert not [name for name in wheel if "test" in name.lower() or "__pycache__" in name]


# What each rule must find in a tree that breaks it: file, text, and the finding.
BREACHES = [
    ("imports go down only", "plan/a.py", "from slurm_train.train import loop\n", "plan.a imports train"),
    ("imports go down only", "config/a.py", "def f():\n    from slurm_train import cli\n", "config.a imports cli"),
    ("imports go down only", "slurm/a.py", "from slurm_train.rundir import paths\n", "slurm.a imports rundir"),
    (
        "imports go down only",
        "errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from slurm_train.config import x\n",
        "errors imports config",
    ),
    ("imports go down only", "train/a.py", "from slurm_train.tools.doctor import x\n", "train.a imports tools.doctor"),
    ("imports go down only", "tools/a/b.py", "from slurm_train.tools.doctor import x\n", "tools.a.b imports tools"),
    ("imports go down only", "novelty/a.py", "", "novelty is in no layer"),
    ("no import circles", "config/x.py", "from slurm_train.config import y\n", "config.x -> config.y -> config.x"),
    (
        "no import circles",
        "config/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from slurm_train.config import y\n",
        "config.x -> config.y -> config.x",
    ),
    (
        "no import circles",
        "config/x.py",
        "def f():\n    from slurm_train.config import y\n",
        "config.x -> config.y -> config.x",
    ),
    (
        "a long function says why",
        "train/a.py",
        'def f():\n    """Long, and\n    no reason."""\n' + "    # why\n    x = 1\n" * 60,
        "train.a.f has 61 lines",
    ),
    (
        "a wide class says why",
        "train/a.py",
        "class A:\n    first: int\n    def f(self):\n" + "".join(f"        self.a{n} = 1\n" for n in range(15)),
        "train.a.A has 16 attributes",
    ),
    ("one module imports submitit", "cli/a.py", "def f():\n    import submitit\n", "cli.a imports submitit"),
    ("one module runs Slurm's commands", "cli/a.py", "run(['squeue', '-j', x])\n", "cli.a runs squeue"),
    (
        "one module runs Slurm's commands",
        "supervise/ranks.py",
        "c = ['env', 'sbatch']\n",
        "supervise.ranks runs sbatch",
    ),
    (
        "one module of the supervisor reads heartbeats",
        "supervise/a.py",
        "from slurm_train.rundir.heartbeat import Beat, read_beats\n",
        "supervise.a",
    ),
    ("one module installs the ranks' signal handlers", "train/a.py", "import signal\nsignal.signal(1, f)\n", "train.a"),
    ("the environment is read at the entry points", "plan/a.py", "import os\nx = os.environ['A']\n", "plan.a"),
    ("no command goes through a shell", "slurm/a.py", "run('x', shell=True)\n", "slurm.a"),
    ("no command goes through a shell", "slurm/a.py", "import os\nos.system('x')\n", "slurm.a"),
    (
        "every error says what to do",
        "plan/a.py",
        "class E(SlurmTrainError): pass\nclass F(E): pass\ndef f(): raise F('x')\n",
        "plan.a:3 makes an error without a hint",
    ),
    (
        "every error says what to do",
        "plan/a.py",
        "class E(SlurmTrainError):\n    def __init__(self):\n        super().__init__('x')\n",
        "plan.a:3 makes an error without a hint",
    ),
    (
        "every error says what to do",
        "plan/a.py",
        "def f(x): return SlurmTrainError('x', hint='y' if x else '')\n",
        "plan.a:1 makes an error without a hint",
    ),
    ("one module makes meshes", "train/a.py", "m = init_device_mesh('cpu', (2,))\n", "train.a"),
    ("one module removes folders", "plan/a.py", "import shutil\nshutil.rmtree('x')\n", "plan.a"),
    (
        "one module knows the text of a batch script",
        "cli/a.py",
        "def f(run): return read_text(run.submit_script)\n",
        "cli.a",
    ),
    ("one module reads a record", "cli/a.py", "x = (read_json(run.plan) or {}).get('batch')\n", "cli.a:1 reads plan"),
    ("one module reads a record", "cli/a.py", "x = list(read_lines(run.attempts))\n", "cli.a:1 reads attempts"),
    ("one module reads a record", "cli/a.py", "x = entry.get('restart_count')\n", "cli.a:1 reads entry.get"),
    ("one module reads a record", "cli/a.py", "x = entry['failed_on']\n", "cli.a:1 reads entry["),
    ("one module reads a record", "cli/a.py", "x = run.path.parent.parent / 'a'\n", "cli.a:1 has run.path.parent"),
    ("one module knows the text of a batch script", "cli/a.py", "x = run.submit_script.read_text()\n", "cli.a"),
    ("one module knows the text of a batch script", "cli/a.py", "x = re.search('^#SBATCH --array', y)\n", "cli.a"),
    ("causes are values", "supervise/a.py", "x = cause.startswith('node failure')\n", "supervise.a:1"),
    ("causes are values", "status/a.py", "found = PATTERN.search(end.note)\n", "status.a:1"),
    ("causes are values", "cli/a.py", "is_killed = 'Killed' in str(end.cause)\n", "cli.a:1"),
    ("causes are values", "cli/a.py", "text = mark.message.partition(': ')[2]\n", "cli.a:1"),
    (
        "three values lead to a decision",
        "supervise/evidence.py",
        "class Course: pass\n",
        "supervise.evidence has Course",
    ),
    ("one table judges causes", "worker/a.py", "m = f(lasting=False)\n", "worker.a:1 says lasting=False"),
    ("every run is started in one order", "cli/a.py", "def f(plan): write_run(plan, None, request=None)\n", "cli.a"),
    ("no vague names", "train/utils.py", "", "train.utils"),
]


@pytest.mark.parametrize(
    ("rule", "file", "text", "finding"), BREACHES, ids=[f"{rule}: {file}" for rule, file, _, _ in BREACHES]
)
def test_a_breach_is_found(rule: str, file: str, text: str, finding: str, tmp_path: Path) -> None:
    # A package may be named by its folder alone.
    folders = ("cli", "train", "config", "slurm", "rundir", "tools/doctor")
    files = {f"{folder}/__init__.py": "" for folder in folders}
    files |= {"__init__.py": "", "config/y.py": "def f(): pass\nfrom slurm_train.config import x\n"}
    found = RULES[rule](small_tree(tmp_path, {**files, file: text}))
    assert any(text.startswith(finding) for text in found), found


def test_a_clean_small_tree_has_no_breach(tmp_path: Path) -> None:
    long_function = 'def f():\n    """Returns 1.\n\n    Long because it is a table.\n    """\n' + "    x = 1\n" * 90
    wide_class = 'class A:\n    """Wide because it is a record."""\n' + "".join(f"    a{n}: int\n" for n in range(16))
    files = {
        "errors.py": "class E(Exception):\n    pass\n",
        "slurm/large.py": long_function + wide_class,
        "slurm/commands.py": "from slurm_train.errors import E\nargv = ['squeue', '-h']\n",
        "cli/a.py": "import os\nfrom slurm_train.slurm import commands\nx = os.environ\n",
    }
    tree = small_tree(tmp_path, files)
    assert {name: rule(tree) for name, rule in RULES.items()} == {name: [] for name in RULES}


def test_a_floor_too_many_is_found(tmp_path: Path) -> None:
    files = {"r0/a.py": ""}
    for number in range(1, MOST_FLOORS + 1):
        assert too_many_floors(small_tree(tmp_path, files)) == []
        files[f"r{number}/a.py"] = f"from slurm_train.r{number - 1} import a\n"
    assert len(too_many_floors(small_tree(tmp_path, files))) == MOST_FLOORS + 1


def test_a_module_that_brings_torch_along_is_found() -> None:
    names = [f"{PACKAGE}.errors", f"{PACKAGE}.models.gpt", f"{PACKAGE}.assets"]
    assert imported_heavy(names) == [f"{PACKAGE}.models.gpt"]


@pytest.mark.parametrize(
    ("questions", "most", "question"),
    [
        (questions_for_the_cluster, MOST_ASKING_FOR_CLUSTER, "config.cluster is not None"),
        (questions_for_the_program, MOST_ASKING_WHAT_RUNS, "config.trains"),
        (questions_for_the_program, MOST_ASKING_WHAT_RUNS, "plan.config.script is not None"),
    ],
)
def test_one_module_too_many_that_asks_is_found(questions: Rule, most: int, question: str, tmp_path: Path) -> None:
    text = f"def f(config): return 1 if {question} else 0\n"
    files = {f"plan/m{number}.py": text for number in range(most + 1)}
    assert len(questions(small_tree(tmp_path, files))) == most + 1
    files.popitem()
    assert questions(small_tree(tmp_path / "fewer", files)) == []
