"""What a job asks Slurm for and what it runs, as a value; its batch script is made of it and not read back.

The value lies beside the script as `request.json`. A script that somebody has edited, or that was written before there
was a record, is the only one that is parsed: what it says holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slurm_train.assets import read_template
from slurm_train.errors import ConfigError
from slurm_train.slurm.flags import Flags, check_env_value, flag_word
from slurm_train.trust import read_text

_SUPERVISED = re.compile(r"^exec (?P<python>.+) -m slurm_train supervise (?P<run>.+) -- \\$", re.MULTILINE)
_PACK = re.compile(r"^pack=([0-9]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job as it is submitted."""

    components: tuple[Flags, ...]
    """Flags of sbatch by their long names; more than one for a heterogeneous job."""
    title: str = ""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Variables that the job exports before the ranks start."""
    setup: tuple[str, ...] = ()
    """Lines of bash that come before the ranks."""
    python: str = ""
    """Interpreter of the supervisor."""
    run: str = ""
    """Directory of the run that is supervised."""
    srun: Flags = field(default_factory=dict)
    """Flags of the ranks' step."""
    container: Mapping[str, str] = field(default_factory=dict)
    """Flags of the step that are about its container: these may be longer than the others."""
    worker: tuple[str, ...] = ()
    """Command of each task."""
    pack: int = 1
    """Runs that share the allocation."""
    script: str | None = None
    """The text as it is on disk, or of an array; None: it is made of the other values."""

    @property
    def flags(self) -> Flags:
        """The flags of the job, or of its first component."""
        return self.components[0]

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.flags.get("job-name", ""))

    def text(self) -> str:
        """Returns the batch script.

        Raises:
            ConfigError: a value that cannot reach sbatch or bash unchanged, with the flag or variable that it is of.
        """
        if self.script is not None:
            return self.script
        exports = (
            f"export {name}={guarded(f'export {name}', check_env_value, value)}" for name, value in self.exports.items()
        )
        srun = (guarded(f"srun --{name}", flag_word, name, value) for name, value in self.srun.items())
        container = (f"--{name}={quoted(value)}" for name, value in self.container.items())
        return read_template("run.sh").format(
            title=self.title,
            sbatch=directives(self.components),
            exports="\n".join(exports),
            setup="\n".join(self.setup),
            python=shlex.quote(self.python),
            run=shlex.quote(self.run),
            srun=" ".join(["srun", *srun, *container]),
            worker=" ".join(map(quoted, self.worker)),
        )

    def to_json(self) -> str:
        """Returns the text of `request.json`, which lies beside the script."""
        record = asdict(self)
        del record["script"]
        return json.dumps({**record, "script_sha256": _sha256(self.text())}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, script: str) -> JobRequest:
        """Returns the request of a record.

        Args:
            text: what `to_json` has returned.
            script: the text of its script.

        Raises:
            ValueError: it is no such record, or that of another script.
        """
        try:
            record: dict[str, Any] = json.loads(text)
            if record.pop("script_sha256") != _sha256(script):
                raise ValueError("the script has changed since")
            lists = {name: tuple(record[name]) for name in ("components", "setup", "worker")}
            return cls(**{**record, **lists}, script=script)
        except (TypeError, KeyError) as err:
            raise ValueError(f"no request of a job: {err!r}") from err

    @classmethod
    def of_script(cls, script: str) -> JobRequest:
        """Returns what a batch script asks for, as far as its text says: one edited by hand, or without a record."""
        components: list[Flags] = [{}]
        for line in script.splitlines():
            if not line.startswith("#SBATCH "):
                continue
            flag = ""
            for word in _words(line.removeprefix("#SBATCH ")):
                name, equals, value = word.removeprefix("--").partition("=")
                if word == "hetjob":
                    components.append({})
                elif word.startswith("-"):
                    flag = name
                    components[-1][flag] = value if equals else True
                elif flag:
                    components[-1][flag] = word
        supervised = _SUPERVISED.search(script)
        pack = _PACK.search(script)
        return cls(
            components=tuple(components),
            python="" if supervised is None else shlex.split(supervised["python"])[0],
            run="" if supervised is None else shlex.split(supervised["run"])[0],
            pack=1 if pack is None else int(pack[1]),
            script=script,
        )

    @classmethod
    def read(cls, script: Path) -> JobRequest:
        """Returns the request of a script on disk, with its text as it is there.

        Args:
            script: the path of `submit.sh`, beside which lies the record.

        Raises:
            OSError: there is no script.
            SlurmTrainError: others may have written it.
        """
        text = read_text(script)
        with contextlib.suppress(OSError, ValueError):
            return cls.from_json(read_text(record_of(script)), script=text)
        return cls.of_script(text)


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def record_of(script: Path) -> Path:
    """Returns the path of the request beside a script."""
    return script.with_name("request.json")


def directives(components: Iterable[Flags]) -> str:
    """Returns the `#SBATCH` lines of a job.

    Raises:
        ConfigError: as `JobRequest.text`.
    """
    texts = []
    for flags in components:
        words = (guarded(f"--{name}", _directive, name, value) for name, value in flags.items())
        texts.append("\n".join(f"#SBATCH {word}" for word in words))
    return "\n#SBATCH hetjob\n".join(texts)


def _directive(name: str, value: str | bool) -> str:
    # Only a script that was edited by hand has options of one letter.
    return f"{name} {shlex.quote(str(value))}" if name.startswith("-") else flag_word(name, value)


def guarded(name: str, guard: Callable[..., str], *values: Any) -> str:
    """Returns the text that a guard makes of a value; puts the name of the flag or variable in front of its errors."""
    try:
        return guard(*values)
    except ConfigError as err:
        shown = name if name.isprintable() else repr(name)
        raise ConfigError(f"{shown}: {err.message}", hint=err.hint) from err


def quoted(word: str) -> str:
    """Returns a word as bash reads it.

    Raises:
        ConfigError: it has a character that cannot be printed.
    """
    if not word.isprintable():
        raise ConfigError(f"{word!r} cannot be a word of the batch script", hint="remove what cannot be printed")
    return shlex.quote(word)
