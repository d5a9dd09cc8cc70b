"""Runs a user's script as `__main__`, and ends the process as `session.ending` does.

Started by path, with the run directory before the script and its arguments.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import re
import runpy
import sys
import traceback
from types import ModuleType, TracebackType

_RUN_AGAIN = 75
"""EXIT_REQUEUE of slurm_train.errors: the run has saved, and must be started again."""


def main() -> None:
    """Runs the script named by the second argument, or the module after "-m"; never returns."""
    sys.argv = sys.argv[1:]
    run_directory = sys.argv.pop(0)
    import_from_copy(run_directory)
    from slurm_train.session.ending import end_process
    from slurm_train.session.loader_workers import tell_of_loader_workers
    from slurm_train.session.signals import received_signals
    from slurm_train.worker.apart import ApartWatch
    from slurm_train.worker.own_resume import note_opened_checkpoints
    from slurm_train.worker.watched import answer_watcher

    answer_watcher(os.environ)
    tell_of_loader_workers()
    apart = ApartWatch(os.environ, run_directory)
    note_opened_checkpoints(run_directory, os.environ)
    signals = received_signals()
    is_module = sys.argv[0] == "-m"
    if is_module:
        # It is found by PYTHONPATH, which begins with the copy of the code.
        del sys.argv[0]
    else:
        sys.path.insert(0, os.path.dirname(sys.argv[0]))  # noqa: PTH120  # sys.path holds strings
    rank = os.getpid()
    folder = os.getcwd()  # noqa: PTH109  # strings, as of sys.path
    code, words, place, lasting = run(sys.argv[0], is_module=is_module)
    beside = not_copied(words, copy=os.path.join(run_directory, "code"), folder=folder)  # noqa: PTH118
    if beside and os.getpid() == rank:
        print(
            f"slurm_train: {beside} exists, and the run's copy of the code, where the program looks by `__file__`, does"
            " not have it (git ignores it, or it is no source): give the program an absolute path, or one relative to"
            f" {folder}",
            file=sys.stderr,
        )
    # What the script has forked may come here, too.
    if words and "RANK" in os.environ and os.getpid() == rank:
        leave_failure_mark(run_directory, code, words, place=place, lasting=lasting, left_out=beside)
    if code == 0 and os.getpid() == rank:
        apart.end()
        note_stop_signal(run_directory, signals.newest_stop)
    end_process(code, places=[os.path.join(run_directory, "code"), folder, sys.path[0]])  # noqa: PTH118


def import_from_copy(run_directory: str) -> None:
    """Makes the script import the user's packages from the run's copy of the code, as the worker has printed before."""
    # The first entry is the folder of this file; the package itself is found from its parent, wherever that is.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    from slurm_train.code.imports import import_from_snapshot, import_from_stage

    del sys.path[0]
    stage = os.environ.get("SLURM_TRAIN_STAGE")
    if stage:
        import_from_stage(stage)  # the worker has printed a refusal already
    import_from_snapshot(run_directory, python_path="")


def run(script: str, *, is_module: bool = False) -> tuple[int, str, str, bool]:
    """Runs a script, or a module by its name, to its end; an exception is printed as Python would.

    Returns:
        The exit code; how it failed in a few words, "" where it did not; where it raised, as `place_of`
        says it; and whether the same is to be expected again.
    """
    from slurm_train.session.signals import ignore_ends_of_children

    # It stays until the process ends: threads and exit functions may look for it.
    program = ModuleType("__main__")
    sys.modules["__main__"] = program
    try:
        if is_module:
            # What `python -m` calls; `run_module` would take the module away at its end.
            runpy._run_module_as_main(script)  # type: ignore[attr-defined]  # private, as old as `-m`
        else:
            program.__file__ = script
            program.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
            with io.open_code(script) as file:
                code = compile(file.read(), script, "exec", dont_inherit=True)
            exec(code, vars(program))
    except SystemExit as end:
        exit_code, words = _exit_code(end)
        if words:
            # What runs at exit does not wait for ranks that have not failed.
            sys.last_value = end
        return exit_code, words, "", True
    except BaseException as err:
        ignore_ends_of_children()
        traceback.print_exception(type(err), err, _from_script(err.__traceback__))
        # As the interpreter does: what runs at exit can tell that the program has failed.
        sys.last_type, sys.last_value, sys.last_traceback = type(err), err, err.__traceback__
        return _code_of(err), *_told_by(err)
    return 0, "", "", True


def not_copied(words: str, *, copy: str, folder: str) -> str:
    """Returns the file or folder beside the user's code that an error did not find in the copy of it, "" for none.

    Args:
        words: the error, e.g. "FileNotFoundError: [Errno 2] No such file or directory: '/runs/a/1f/code/data/x.bin'".
        copy: the folder of the copy.
        folder: the one that was copied.
    """
    match = re.search(re.escape(copy) + r"(/[^\s'\":,;)]+)", words)
    if match is None and words:
        # What downloads the data that it does not find names an address, and leaves an empty folder.
        return _emptied(copy, folder)
    if match is None or os.path.exists(copy + match[1]):  # noqa: PTH110
        return ""
    beside = os.path.normpath(folder + match[1])
    return beside if os.path.exists(beside) else ""  # noqa: PTH110


def _emptied(copy: str, folder: str) -> str:
    """Returns the first folder that has files, and none in the copy, though it is there; "" for none."""

    def has_files(place: str) -> bool:
        return any(files for _, _, files in os.walk(place))

    for name in sorted(os.listdir(copy)) if os.path.isdir(copy) else []:  # noqa: PTH112,PTH208
        beside = os.path.join(folder, name)  # noqa: PTH118
        if os.path.isdir(beside) and has_files(beside) and not has_files(os.path.join(copy, name)):  # noqa: PTH112,PTH118
            return beside
    return ""


def leave_failure_mark(
    run_directory: str, code: int, words: str, *, place: str = "", lasting: bool = True, left_out: str = ""
) -> None:
    """Leaves the mark that names this rank, its exit code and its error, as ranks of the trainer do."""
    from pathlib import Path

    from slurm_train.rundir.events import FailureMark, leave_mark
    from slurm_train.rundir.paths import RunDirectory
    from slurm_train.slurm.job_variables import node_name

    env = os.environ
    message = words.split("\n")[0]
    mark = FailureMark(
        rank=int(env["RANK"]),
        host=node_name(env),
        exit_code=code,
        message=message,
        place=place,
        lasting=lasting,
        left_out=left_out,
    )
    leave_mark(RunDirectory(Path(run_directory)), int(env.get("SLURM_TRAIN_ATTEMPT", "0")), mark)


def note_stop_signal(run_directory: str, name: str) -> None:
    """Records for the supervisor that the program got a stop signal and ended with 0; one rank of each node does.

    Args:
        run_directory: of the run.
        name: of the newest one, e.g. "TERM"; "" for none.
    """
    env = os.environ
    if not name or env.get("LOCAL_RANK", "0") != "0":
        return
    from pathlib import Path

    from slurm_train.rundir.events import note_signal
    from slurm_train.rundir.paths import RunDirectory

    note_signal(RunDirectory(Path(run_directory)), int(env.get("SLURM_TRAIN_ATTEMPT", "0")), name)


def _code_of(err: BaseException) -> int:
    """Returns the exit code of an exception: a wrong use of the session is one of the run, which is not tried again."""
    from slurm_train.errors import SlurmTrainError

    if isinstance(err, SlurmTrainError):
        return err.exit_code
    return 130 if isinstance(err, KeyboardInterrupt) else 1


def _told_by(err: BaseException) -> tuple[str, str, bool]:
    from slurm_train.rundir.events import message_of, place_of, would_last

    return message_of(err), place_of(err), would_last(err)


def _exit_code(end: SystemExit) -> tuple[int, str]:
    if end.code is None or isinstance(end.code, int):
        # After `import_from_copy`.
        from slurm_train.errors import exit_status

        code = exit_status(end.code or 0)
        return code, f"the script ended with code {code}" if code not in (0, _RUN_AGAIN) else ""
    print(end.code, file=sys.stderr)
    return 1, str(end.code)


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """Returns the part of a traceback that begins in the script, without the frames of this module."""
    before = {__file__, "<frozen runpy>", runpy.__file__}
    while trace is not None and trace.tb_frame.f_code.co_filename in before:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
