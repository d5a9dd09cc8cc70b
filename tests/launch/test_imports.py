"""The copies come before what is edited, and what is said of them is what Python would do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from slurm_train.launch.imports import CopiedFolder, Taken, child_path, in_words, read_copies, take_snapshot


def test_the_copy_of_each_place_takes_its_place(tmp_path: Path) -> None:
    code = "import sys; from slurm_train.launch.imports import take_snapshot; import json;\n"
    code += "imports = take_snapshot(sys.argv[1], python_path=sys.argv[2])\n"
    code += "import packed, plain; print(json.dumps([packed.__file__, plain.__file__, imports.child_path]))"
    live, run = tmp_path / "live", tmp_path / "live" / "runs" / "a" / "1"
    for root in (live, run / "code"):
        for name in ("src/packed/__init__.py", "plain.py"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
    (run / "plan.json").write_text(json.dumps({"directory": str(live)}))
    toolkit = str(Path(__file__).resolve().parents[2])
    path = f"{live}/src:{live}:{toolkit}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), path],
        env={"PYTHONPATH": path},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    packed, plain, child = json.loads(done.stdout)
    assert (packed, plain) == (f"{run}/code/src/packed/__init__.py", f"{run}/code/plain.py")
    assert child == f"{run}/code:{run}/code/src:{path}"


def test_without_a_copy_nothing_changes(tmp_path: Path) -> None:
    before = list(sys.path)
    assert take_snapshot(str(tmp_path), python_path="/a:/b").child_path == "/a:/b"
    assert sys.path == before


def test_a_record_says_which_folders_were_copied(tmp_path: Path) -> None:
    record = {"folders": {"": "/home/ada/project", ".folders/lib": "/home/ada/lib"}, "roots": ["src"], "files": {}}
    copies, roots = read_copies(str(tmp_path), record, folder="/elsewhere")
    assert copies == [
        CopiedFolder("/home/ada/project", str(tmp_path)),
        CopiedFolder("/home/ada/lib", f"{tmp_path}/.folders/lib"),
    ]
    assert roots == ["src"]
    assert read_copies(str(tmp_path), None, folder="/home/ada/old") == (
        [CopiedFolder("/home/ada/old", str(tmp_path))],
        [],
    )


def test_a_neighbour_whose_name_begins_alike_is_not_the_folder() -> None:
    folder = CopiedFolder("/home/ada/project", "/run/code")
    assert folder.copy_of("/home/ada/project2/x.py") is None
    assert folder.copy_of("/home/ada/project/src/x.py") == "/run/code/src/x.py"


def test_children_get_the_copies_first_and_once() -> None:
    copies = [CopiedFolder("/live", "/run/code")]
    paths = ["/run/code", "/run/code/src", "/live", "/usr/lib"]
    assert child_path(paths, copies, "/run/code:/live:") == "/run/code:/run/code/src:/live"


def test_what_is_said() -> None:
    assert in_words(Taken()) == []
    copied = {"mine": "/run/code/mine/__init__.py", "more": "/run/code/more.py"}
    assert in_words(Taken(copied, {"late": "/live/late.py"})) == [
        "imported from the run's copy of the code: mine, more",
        "warning: late is imported from where it is edited, not from the run's copy of the code: /live/late.py",
    ]
