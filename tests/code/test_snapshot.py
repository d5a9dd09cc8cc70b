from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from slurm_train.code import snapshot
from slurm_train.code.git import SourceState, is_secret_file, read_git, run_git
from slurm_train.code.snapshot import (
    Code,
    Source,
    compare_code,
    digest_code,
    index_code,
    names_own_code,
    own_snapshot,
    plan_files,
    read_source,
    require_sealed,
    share_snapshot,
    source_notes,
    write_snapshot,
)
from slurm_train.errors import ConfigError, RunError
from slurm_train.rundir.paths import RunDirectory
from tests.support.plans import make_plan
from tests.support.refusals import refusal

IDENTITY = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def git(folder: Path, *words: str) -> None:
    env = {**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": "/dev/null"}
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, env=env)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a tracked, a modified, a deleted, an untracked and an ignored file, and runs of its own."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    write(folder, train_py="tracked", model_py="old", gone_py="x", lib__deep_py="deep")
    (folder / ".gitignore").write_text("*.log\ndata/\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")
    write(folder, model_py="modified", new_py="untracked", data__big_py="ignored", runs__a__b__config_py="a run")
    (folder / "x.log").write_text("ignored")
    (folder / "gone.py").unlink()
    return folder


def snapshot_of(folder: Path, **changes: object) -> list[str]:
    state = read_git(folder, os.environ)
    arguments = {"limit_mb": 1, "exclude": folder / "runs", **changes}
    return plan_files(folder, state, **arguments)[0]  # type: ignore[arg-type]


def copy(folder: Path, names: list[str], target: Path) -> dict[str, str]:
    """Copies files as a snapshot and returns what is there then."""
    source = Source({"": folder}, {name: folder / name for name in names})
    write_snapshot(source, target, index=target.with_name("code.json"))
    return {str(path.relative_to(target)): path.read_text() for path in target.rglob("*") if path.is_file()}


def test_what_git_does_not_ignore_is_the_code(project: Path, tmp_path: Path) -> None:
    assert snapshot_of(project) == [".gitignore", "lib/deep.py", "model.py", "new.py", "train.py"]
    assert snapshot_of(project / "lib") == ["deep.py"]
    state = read_git(project, os.environ)
    assert state.commit is not None and len(state.commit) == 40
    assert "+modified" in state.difference and "-old" in state.difference
    assert "new.py" in state.untracked and "train.py" not in state.untracked
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "env").symlink_to("/usr/bin/env")
    without_git = read_git(project, {"PATH": str(tmp_path / "bin")})
    assert without_git.files is None and "git" in without_git.problem


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_repository_of_another_person_is_read_if_the_folder_is_theirs(project: Path) -> None:
    expected = read_git(project, os.environ)
    for path in (project, *project.rglob("*")):
        os.chown(path, 4321, -1, follow_symlinks=False)
    assert subprocess.run(["git", "-C", project, "status"], capture_output=True).returncode != 0, (
        "git by itself refuses"
    )
    assert read_git(project, os.environ) == expected
    assert read_git(project / "lib", os.environ).commit == expected.commit
    # A repository above a folder of one's own says nothing about its code.
    os.chown(project / "lib", 0, -1)
    state = read_git(project / "lib", os.environ)
    assert state.files is None and "dubious ownership" in state.problem
    (note,) = source_notes(Source({"": project / "lib"}, states={"": state}))
    assert str(project / "lib") in note and state.problem in note


def test_a_file_that_holds_secrets_by_custom_is_neither_copied_nor_quoted(project: Path) -> None:
    names = [".env", "prod.env", "deploy.pem", "id_rsa", "Secrets.YAML"]
    assert all(map(is_secret_file, names)) and not is_secret_file(".env.example")
    write(project, **{f"lib__{name}": "KEY=old\n" for name in names})
    git(project, "add", "-f", "-A")
    git(project, "commit", "-q", "-m", "two")
    for name in (*names, ".env.example"):
        (project / "lib" / name).write_text("KEY=canary\n")
    copied = snapshot_of(project)
    assert "lib/.env.example" in copied and not any(f"lib/{name}" in copied for name in names)
    for folder in (project, project / "lib"):
        assert read_git(folder, os.environ).difference.count("canary") == 0


def test_the_copy_is_what_was_on_disk_and_replaces_an_older_one(project: Path, tmp_path: Path) -> None:
    target = tmp_path / "run" / "code"
    target.parent.mkdir(parents=True)
    (project / "stale.py").write_text("of an earlier submission")
    copy(project, ["stale.py", "model.py"], target)
    (project / "stale.py").unlink()
    (project / "train.py").chmod(0o755)
    assert copy(project, snapshot_of(project), target) == {
        ".gitignore": "*.log\ndata/\n",
        "lib/deep.py": "deep",
        "model.py": "modified",
        "new.py": "untracked",
        "train.py": "tracked",
    }
    assert {path.stat().st_mode & 0o777 for path in target.iterdir() if path.is_file()} == {0o400, 0o500}
    assert sorted(path.name for path in target.parent.iterdir()) == ["code", "code.json"]


def test_names_that_are_not_text_are_carried(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    assert read_git(tmp_path, os.environ) == SourceState((), None, ""), "without a commit"
    name = os.fsdecode(b"caf\xe9 \n.py")
    (tmp_path / name).write_text("x")
    assert snapshot_of(tmp_path) == [name]
    (tmp_path / "run").mkdir()
    assert copy(tmp_path, [name], tmp_path / "run" / "code") == {name: "x"}


def test_outside_git_the_code_is_told_by_its_ending(tmp_path: Path) -> None:
    write(tmp_path, train_py="x", pkg__a_py="x", venv__lib__b_py="x", dot__c_py="x", cache__d_py="x")
    (tmp_path / "cache").rename(tmp_path / "pkg" / "__pycache__")
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    (tmp_path / "dot").rename(tmp_path / ".hidden")
    for name in ("settings.yaml", "weights.pt", "image.png"):
        (tmp_path / name).write_text("x")
    state = read_git(tmp_path, os.environ)
    assert state == SourceState()
    names, _ = plan_files(tmp_path, state, limit_mb=1, exclude=tmp_path / "runs")
    assert sorted(names) == ["pkg/a.py", "settings.yaml", "train.py"]


def test_too_much_code_is_refused_naming_the_largest(project: Path) -> None:
    (project / "big.bin").write_bytes(b"x" * (3 << 20))
    (project / "small.bin").write_bytes(b"x" * (1 << 20))
    error = refusal(ConfigError, snapshot_of, project, limit_mb=2)
    assert error.message == (
        f"the code in {project} is 4.0 MiB, more than run.snapshot_limit_mb=2; largest: big.bin (3.0 MiB), "
        "small.bin (1.0 MiB)"
    )


def test_a_home_folder_is_not_searched_for_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_MAX_ENTRIES", 5)
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("")
    with pytest.raises(ConfigError, match="holds more than 5 files: which are the code"):
        plan_files(tmp_path, SourceState(), limit_mb=1, exclude=tmp_path / "runs")


def booby_trapped(folder: Path, canaries: Path) -> None:
    """Makes a repository whose own configuration names a program for everything that git can be told to run."""
    canaries.mkdir()
    hooks = canaries.with_name(f"{canaries.name}_hooks")
    hooks.mkdir()

    def trap(name: str, then: str = "cat") -> str:
        program = canaries.with_name(f"{canaries.name}_{name}")
        program.write_text(f"#!/bin/sh\ntouch {canaries}/{name}\n{then}\n")
        program.chmod(0o755)
        return str(program)

    for hook in ("post-index-change", "reference-transaction", "fsmonitor-watchman", "post-checkout"):
        (hooks / hook).symlink_to(trap(f"hook_{hook}", "exit 0"))
    settings = {
        "core.fsmonitor": trap("fsmonitor", "exit 0"),
        "core.hooksPath": str(hooks),
        "core.pager": trap("pager"),
        "core.editor": trap("editor"),
        "core.sshCommand": trap("ssh", "exit 1"),
        "core.alternateRefsCommand": trap("alternates", "exit 0"),
        "credential.helper": trap("credential", "exit 0"),
        "diff.external": trap("external", "exit 0"),
        "diff.spy.textconv": trap("textconv", 'cat "$1"'),
        "diff.spy.command": trap("driver", "exit 0"),
        "filter.spy.clean": trap("clean"),
        "filter.spy.smudge": trap("smudge"),
        "filter.spy.required": "true",
        "filter.proc.process": trap("process", "exit 1"),
        "filter.proc.required": "true",
        "alias.ls-files": f"!{trap('alias', 'exit 0')}",
        "remote.origin.url": f"ext::{trap('transport', 'exit 1')}",
        "remote.origin.promisor": "true",
        "remote.origin.partialclonefilter": "blob:none",
        "extensions.partialClone": "origin",
        "protocol.ext.allow": "always",
        "status.submoduleSummary": "true",
        "diff.submodule": "log",
    }
    for key, value in settings.items():
        git(folder, "config", key, value)
    (folder / ".gitattributes").write_text("*.py diff=spy filter=spy\n*.sh filter=proc\n")
    for path in folder.glob("[a-z]*.*"):
        # The same size and another time: git has to look into it, and so would run the filter.
        path.write_text(path.read_text()[::-1])
    for path in canaries.iterdir():
        path.unlink()


def test_no_program_of_the_folders_git_configuration_is_run(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    write(folder, train_py="tracked", model_py="older")
    (folder / "run.sh").write_text("echo")
    (folder / "settings.yaml").write_text("ab")
    (folder / "notes.txt").write_text("not here")
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    write(other, lib_py="library")
    git(other, "add", "-A")
    git(other, "commit", "-q", "-m", "one")
    git(folder, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "lib")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "one")
    places = (tmp_path / "of_the_submodule", tmp_path / "canaries")
    booby_trapped(folder / "lib", places[0])
    booby_trapped(folder, places[1])
    blob = subprocess.check_output(["git", "-C", str(folder), "rev-parse", "HEAD:notes.txt"], text=True).strip()
    (folder / ".git" / "objects" / blob[:2] / blob[2:]).unlink()

    state = read_git(folder, os.environ)
    words = ("status", "--porcelain", "--ignore-submodules=dirty", "--", ".")
    assert state.commit is not None and "train.py" in (state.files or ())
    assert run_git(folder, *words, compares=True), "it has changes"
    assert [path.name for place in places for path in place.iterdir()] == []

    for name in ("", "model.py", "run.sh", "settings.yaml", "notes.txt"):
        subprocess.run(["git", "-C", str(folder), "diff", "HEAD", *name.split()], capture_output=True, check=False)
    subprocess.run(["git", "-C", str(folder / "lib"), "status"], capture_output=True, check=False)
    run_by_plain_git = {"fsmonitor", "hook_post-index-change", "clean", "process", "external", "driver", "transport"}
    assert run_by_plain_git <= {path.name for place in places for path in place.iterdir()}, "the traps work"


def add_submodule(folder: Path, name: str, source: Path) -> None:
    git(folder, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(source), name)


def test_submodules_are_part_of_the_code_with_what_is_not_committed_in_them(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("inner", "lib", "project")]
    for folder in folders:
        folder.mkdir()
        git(folder, "init", "-q")
        write(folder, **{f"{folder.name}_py": "committed"})
    inner, lib, project = folders
    for folder, below in ((inner, None), (lib, inner), (project, lib)):
        (folder / ".gitignore").write_text("*.log\n")
        if below is not None:
            add_submodule(folder, f"deps/{below.name}", below)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", "one")
    git(project, "-c", "protocol.file.allow=always", "submodule", "update", "-q", "--init", "--recursive")
    changed = project / "deps" / "lib" / "deps" / "inner"
    write(changed, inner_py="changed", new_py="untracked", x_log="ignored")
    (changed / "x_log").rename(changed / "x.log")
    (project / "clone").mkdir()
    git(project / "clone", "init", "-q")
    write(project / "clone", tool_py="a repository that was cloned into the project")

    state = read_git(project, os.environ)
    assert "--- a/deps/lib/deps/inner/inner.py" in state.difference and "+changed" in state.difference
    assert state.untracked == {"clone/tool.py", "deps/lib/deps/inner/new.py"}
    files, left_out = plan_files(project, state, limit_mb=1, exclude=project / "runs")
    python = [name for name in files if name.endswith(".py")]
    deps = ["deps/lib/deps/inner/inner.py", "deps/lib/deps/inner/new.py", "deps/lib/lib.py"]
    assert python == ["clone/tool.py", *deps, "project.py"] and left_out == []
    assert not [name for name in files if name.endswith(".log")]

    git(project, "submodule", "deinit", "-q", "-f", "deps/lib")
    files, left_out = plan_files(project, read_git(project, os.environ), limit_mb=1, exclude=project / "runs")
    assert left_out == ["deps/lib (a submodule that is not checked out)"]


@pytest.mark.parametrize("is_repository", [True, False])
def test_a_linked_folder_is_copied_where_it_is_part_of_the_code_and_else_named(
    tmp_path: Path, *, is_repository: bool
) -> None:
    project, data = tmp_path / "project", tmp_path / "data"
    data.mkdir()
    write(project, src__pkg__a_py="a", src__pkg__sub__b_py="b", train_py="t")
    (data / "big.py").write_text("x")
    (project / "pkg").symlink_to("src/pkg")
    (project / "data").symlink_to(data)
    (project / "empty").mkdir()
    (project / "nothing").symlink_to("empty")
    (project / "again").symlink_to(".")
    if is_repository:
        git(project, "init", "-q")
    state = read_git(project, os.environ)
    files, left_out = plan_files(project, state, limit_mb=1, exclude=project / "runs")
    code = ["src/pkg/a.py", "src/pkg/sub/b.py", "train.py"]
    assert sorted(files) == sorted([*code, "pkg/a.py", "pkg/sub/b.py", *(f"again/{name}" for name in code)])
    assert sorted(left_out) == [
        f"data (a link to {data})",
        f"nothing (a link to {project}/empty, where there is no code)",
    ]
    assert copy(project, files, tmp_path / "code")["pkg/sub/b.py"] == "b"
    assert not any(path.is_symlink() for path in (tmp_path / "code").rglob("*"))


# --- what is copied for a run ---


def source_of(project: Path, state: SourceState | None = None, **sections: Any) -> Source:
    plan = make_plan(project, **sections)
    return read_source(plan.run, plan.config, project, state, env=os.environ)


@pytest.mark.parametrize(
    ("sections", "own"),
    [
        ({}, False),
        ({"task": {"_target_": "my.main"}}, True),
        ({"callbacks": [{"_target_": "my.Callback"}]}, True),
        ({"callbacks": [{"_target_": "slurm_train.train.callbacks.EMA"}]}, False),
        ({"data": {"_target_": "slurm_train.data.mix.build", "sources": {"a": {"_target_": "my.Data"}}}}, True),
        ({"optim": {"_target_": "torch.optim.SGD"}}, False),
        ({"optim": {"schedule": {"_target_": "my.schedule"}}}, True),
        ({"optim": {"groups": [{"_target_": "my.Lion"}]}}, True),
    ],
)
def test_outside_git_code_is_copied_only_where_a_job_needs_it(
    sections: dict[str, Any], own: bool, tmp_path: Path
) -> None:
    (tmp_path / "any.py").write_text("")
    assert names_own_code(make_plan(tmp_path, **sections).config) is own
    assert list(source_of(tmp_path, **sections).files) == (["any.py"] if own else [])


@pytest.mark.parametrize("root", ["runs", ".", ".."])
def test_inside_git_the_code_is_always_kept_and_the_run_never(root: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    inside = make_plan(project, run={"root": root}).run.config
    for path in (project / "any.py", inside):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    state = SourceState(("any.py", os.path.relpath(inside, project)))
    assert list(source_of(project, state, run={"root": root}).files) == ["any.py"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A project, and folders with code outside of it."""
    for name in ("project/train.py", "library/src/lib/__init__.py", "more/library/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path / "library"


def test_further_folders_have_a_place_of_their_own(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(library / "src"))
    monkeypatch.syspath_prepend("")
    project = library.parent / "project"
    alone = source_of(project, script=["train.py"])
    assert (alone.roots, list(alone.elsewhere)) == ([], [str(library / "src")])
    assert list(source_of(project, SourceState(("train.py",))).elsewhere) == [], "shipped code imports nothing of it"
    folders = ["../library", str(library.parent / "more" / "library")]
    source = source_of(project, script=["train.py"], run={"snapshot_folders": folders})
    assert (source.roots, list(source.elsewhere)) == ([".folders/library/src"], [])
    assert {name: path.read_text() for name, path in source.files.items()} == {
        "train.py": "project/train.py",
        ".folders/library/src/lib/__init__.py": "library/src/lib/__init__.py",
        ".folders/library-2/other.py": "more/library/other.py",
    }
    target = library.parent / "code"
    write_snapshot(source, target, index=library.parent / "code.json")
    assert index_code(target.joinpath, source.files) == source.code().index


@pytest.mark.parametrize(
    ("folder", "text"), [("../none", "is not a folder"), ("../project/inner", "which is copied anyway")]
)
def test_a_folder_that_cannot_be_a_further_one_is_refused(folder: str, text: str, library: Path) -> None:
    project = library.parent / "project"
    (project / "inner").mkdir()
    with pytest.raises(ConfigError, match=f"run.snapshot_folders: {folder} .*{text}"):
        source_of(project, script=["train.py"], run={"snapshot_folders": [folder]})


# --- what a copy is compared by ---

NAMES = ["pkg/model.py", "train.py", "README.md"]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with a copy of the files in tmp_path/live."""
    run, live = RunDirectory(tmp_path / "run"), tmp_path / "live"
    run.path.mkdir()
    (live / "pkg").mkdir(parents=True)
    for name in NAMES:
        (live / name).write_text(f"{name}\none\ntwo\n")
    copy(live, NAMES, run.code)
    return run


def edit(run: RunDirectory) -> None:
    path = run.code / "train.py"
    path.chmod(0o600)
    path.write_text("other")


def shadow_a_package(run: RunDirectory) -> None:
    (run.code / "yaml").mkdir()
    (run.code / "yaml" / "__init__.py").write_text("shadows another package")


TOUCHED: dict[str, Callable[[RunDirectory], object]] = {
    "train.py: changed": edit,
    "pkg/model.py: gone, changed": lambda run: (run.code / "pkg" / "model.py").unlink(),
    "pkg/json.py: new, .1 -0": lambda run: (run.code / "pkg" / "json.py").write_text("shadows another module"),
    "yaml/__init__.py: new, .1 -0": shadow_a_package,
    "yaml: new, changed": lambda run: (run.code / "yaml").symlink_to(run.path.parent / "live" / "pkg"),
}


@pytest.mark.parametrize("text", TOUCHED)
def test_whatever_touches_a_copy_is_found_and_named(text: str, run: RunDirectory) -> None:
    TOUCHED[text](run)
    with pytest.raises(RunError, match=f"is not what was submitted: {text}") as caught:
        require_sealed(run)
    assert f"`resume {run.run_id} --accept code`" in caught.value.hint


@pytest.mark.parametrize("text", TOUCHED)
def test_a_touched_copy_that_is_accepted_is_sealed_again(text: str, run: RunDirectory) -> None:
    TOUCHED[text](run)
    copy(run.path.parent / "live", NAMES, run.code)
    require_sealed(run)


def test_pythons_cache_does_not_touch_a_copy_and_it_can_be_removed(run: RunDirectory) -> None:
    (run.code / "__pycache__").mkdir()
    (run.code / "__pycache__" / "train.cpython-311.pyc").write_bytes(b"")
    require_sealed(run)
    shutil.rmtree(run.code)


def write_beside(code: Path) -> dict[str, str]:
    """Writes what programs write beside their own file, and returns the content of the files by name."""
    texts = {"out/last.ckpt": "40", "best.pth": "weights", "log.csv": "1", "out/backup/train.py": "a backup"}
    write(code, **{name.replace("/", "__"): text for name, text in texts.items()})
    (code / "latest").symlink_to("out")
    return texts


def contents(code: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: (code / name).read_text() for name in names}


def test_what_a_program_writes_beside_its_code_stays_and_is_no_change_of_it(run: RunDirectory) -> None:
    texts = write_beside(run.code)
    require_sealed(run)
    live = run.path.parent / "live"
    write(live, train_py="new code", out__last_py="a new file in a folder of the program")
    (live / "log.csv").write_text("now of the code")
    edit(run)
    (run.code / "shadow.py").write_text("of the program, and in the way of others")
    names = ["train.py", "out/last.py", "log.csv"]
    source = Source({"": live}, {name: live / name for name in names})
    renamed = write_snapshot(source, run.code, index=run.code_index, keep=run.path / "before")
    require_sealed(run)
    kept = {name: text for name, text in texts.items() if name != "log.csv"}
    assert contents(run.code, kept) == kept
    assert contents(run.code, renamed) == {
        "shadow.py.aside": "of the program, and in the way of others",
        "log.csv.aside": "1",
        "train.py.aside": "other",
    }
    assert contents(run.code, names) == contents(live, names)
    unchanged = sorted(path.name for path in (run.path / "before").iterdir())
    assert unchanged == ["README.md", "pkg"]


def test_a_folder_of_the_code_is_never_filled_through_a_link(run: RunDirectory) -> None:
    elsewhere = run.path.parent / "elsewhere"
    write(elsewhere, train_py="of the person")
    (run.code / "lib").symlink_to(elsewhere)
    live = run.path.parent / "live"
    write(live, lib__train_py="new code")
    copy(live, ["lib/train.py"], run.code)
    assert (elsewhere / "train.py").read_text() == "of the person"
    assert (run.code / "lib" / "train.py").read_text() == "new code"
    assert (run.code / "lib.aside").is_symlink()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[RunDirectory, RunDirectory]:
    """Two runs that share a copy."""
    shared = tmp_path / "sweep" / "000"
    shared.parent.mkdir()
    write(tmp_path / "live", train_py="train", pkg__model_py="model")
    names = ["train.py", "pkg/model.py"]
    write_snapshot(
        Source({"": tmp_path / "live"}, {name: tmp_path / "live" / name for name in names}),
        shared,
        index=shared.with_name("000.files.json"),
    )
    runs = (RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "two"))
    for run in runs:
        run.path.mkdir()
        share_snapshot(run, shared, shared.with_name("000.files.json"))
    return runs


def test_each_run_that_shares_a_copy_writes_beside_its_own(pair: tuple[RunDirectory, RunDirectory]) -> None:
    one, two = pair
    assert one.code.resolve() == two.code.resolve()
    for run in pair:
        own_snapshot(run)
        require_sealed(run)
    texts = write_beside(one.code)
    own_snapshot(one)
    require_sealed(one)
    assert contents(one.code, texts) == texts, "a requeue leaves them"
    assert sorted(path.name for path in two.code.iterdir()) == ["pkg", "train.py"]
    # The same words again, with other code.
    shared = one.path.parent / "sweep" / "001"
    write(one.path.parent / "live", train_py="train better")
    source = Source({"": one.path.parent / "live"}, {"train.py": one.path.parent / "live" / "train.py"})
    write_snapshot(source, shared, index=shared.with_name("001.files.json"))
    share_snapshot(one, shared, shared.with_name("001.files.json"))
    own_snapshot(one)
    require_sealed(one)
    assert contents(one.code, [*texts, "train.py"]) == {**texts, "train.py": "train better"}
    assert not (one.code / "pkg" / "model.py").exists()


def test_an_attempt_that_is_killed_before_its_copy_is_in_place_leaves_it_to_the_next(
    pair: tuple[RunDirectory, RunDirectory],
) -> None:
    run = pair[0]
    run.code.unlink()
    own_snapshot(run)
    require_sealed(run)


@pytest.mark.parametrize(("may_write", "num_links"), [(False, 2), (True, 1)], ids=["a person", "root"])
def test_copies_are_hard_links_unless_a_program_could_write_to_the_shared_files(
    may_write: bool, num_links: int, pair: tuple[RunDirectory, RunDirectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: may_write)
    own_snapshot(pair[0])
    status = (pair[0].code / "train.py").stat()
    assert (status.st_nlink, status.st_mode & 0o222) == (num_links, 0)


def test_changes_are_counted_in_lines_and_documents_do_not_matter(run: RunDirectory) -> None:
    live = run.path.parent / "live"
    (live / "README.md").write_text("other words")
    old, new = index_code(run.code.joinpath, NAMES), index_code(live.joinpath, NAMES)
    assert digest_code(new, is_own_code=True) == digest_code(old, is_own_code=True)
    (live / "train.py").write_text("train.py\nONE\ntwo\nthree\n--x\n")
    (live / "pkg" / "model.py").unlink()
    (live / "new.bin").write_bytes(b"\xff\xfe")
    new = index_code(live.joinpath, [*NAMES, "new.bin"])
    assert digest_code(new, is_own_code=True) != digest_code(old, is_own_code=True)
    assert digest_code(new, is_own_code=False) == digest_code(old, is_own_code=False), "only this package matters"
    changes = compare_code(Code(old, run.code.joinpath), Code(new, live.joinpath))
    assert [str(change) for change in changes] == [
        "README.md: +1 -3",
        "new.bin: new, changed",
        "pkg/model.py: gone, +0 -3",
        "train.py: +3 -1",
    ]


def test_a_file_that_goes_while_the_code_is_copied_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path, train_py="stays", swap_py="goes")
    source = Source({"": tmp_path}, files={name: tmp_path / name for name in ("train.py", "swap.py")})
    (tmp_path / "swap.py").unlink()
    run = tmp_path / "run"
    run.mkdir()
    error = refusal(ConfigError, write_snapshot, source, run / "code", index=run / "code.json")
    assert error.message == f"{tmp_path / 'swap.py'} has gone while the code was copied into the run"
    assert list(run.iterdir()) == []
