"""Sends messages about a run by a command or a webhook: finished, failed for good, hung, requeued again and again.

Each message is sent at most once per run, whichever job or node sends it: the sender first creates a file exclusively.
Sending is given up after a few seconds, since Slurm may end this process, and a failure to send does not affect the
run. A message has the run's name, its job, and the sentence of the ledger, without anything that looks like a secret.
The address of a webhook is often a secret itself, so a configuration may hold only the place where the address is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from slurm_train.config.secrets import redact
from slurm_train.rundir.files import make_folder, open_file
from slurm_train.rundir.paths import RunDirectory

Event = Literal["finished", "failed", "hung", "requeued"]
_WITHIN_S = 8.0
"""Time limit for all messages of an event together: less than the grace time of a preemption."""
_PLACES = re.compile(r"(?P<kind>env|file):(?P<place>.+)", re.DOTALL)
# Discord refuses more than 2000 characters, ntfy makes an attachment of more than 4096 bytes.
_MOST_CHARACTERS = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The content of a message."""

    event: Event
    run: str
    """Name and id, e.g. "gpt/0c544ce3d843"."""
    job_id: str
    """"" without Slurm."""
    attempt: int
    note: str
    """The ledger's sentence."""
    path: str
    """The run directory."""

    @property
    def title(self) -> str:
        """One line, e.g. "gpt/0c544ce3d843 finished"."""
        return f"{self.run} {'was requeued again and again' if self.event == 'requeued' else self.event}"

    @property
    def text(self) -> str:
        """The whole message."""
        job = f"job {self.job_id}, " if self.job_id else ""
        return redact(f"{self.title}\n{self.note}\n{job}attempt {self.attempt}, {self.path}")[:_MOST_CHARACTERS]

    def as_variables(self) -> dict[str, str]:
        """Returns the variables that a command has in its environment."""
        values = {
            "EVENT": self.event,
            "RUN": self.run,
            "JOB": self.job_id,
            "ATTEMPT": str(self.attempt),
            "NOTE": redact(self.note),
            "PATH": self.path,
            "TITLE": self.title,
        }
        return {f"NOTIFY_{name}": value for name, value in values.items()}


class Notifier:
    """Sends the messages of one run.

    Args:
        run: the run.
        entries: `notify` of the configuration.
        env: environment of the commands.
        say: prints a line for the person.
    """

    def __init__(
        self, run: RunDirectory, entries: Sequence[str], *, env: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self._run = run
        self._entries = tuple(entries)
        self._env = env
        self._say = say

    def __call__(self, event: Event, *, note: str, job_id: str | None, attempt: int, once: str) -> None:
        """Sends a message to all entries; returns when it is sent, or after a few seconds.

        Args:
            event: what has happened.
            note: the same in a sentence.
            job_id: the job, None without Slurm.
            attempt: number of the attempt.
            once: the scope in which the event has only one message, e.g. "attempt 3"; "" for the whole run.
        """
        if not self._entries or not self._claim(event, once):
            return
        run = f"{self._run.name}/{self._run.run_id}"
        message = Message(
            event=event, run=run, job_id=job_id or "", attempt=attempt, note=note, path=str(self._run.path)
        )
        deadline_s = time.monotonic() + _WITHIN_S
        threads = [
            threading.Thread(target=self._send, args=(entry, message), name="notify", daemon=True)
            for entry in self._entries
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            self._say(f"notify: a message about {event} was not sent within {_WITHIN_S:.0f} s; the run goes on")

    def _claim(self, event: Event, once: str) -> bool:
        """Returns whether this message was never sent before; False also where that cannot be known."""
        name = f"{event} {once}".strip().replace(" ", "_")
        path = self._run.notified(name)
        with contextlib.suppress(OSError):  # it is there
            make_folder(path.parent, within=self._run.path)
            os.close(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
            return True
        return False

    def _send(self, entry: str, message: Message) -> None:
        try:
            place = _PLACES.fullmatch(entry)
            if place is None:
                self._run_command(shlex.split(entry), message)
            else:
                _post(_address(place["kind"], place["place"], self._env), message)
        except Exception as err:  # a message that cannot be sent must not end the run
            # An error of urllib may have the address in it.
            self._say(f"notify: {_name(entry)}: {type(err).__name__}; see docs/notifications.md")

    def _run_command(self, words: Sequence[str], message: Message) -> None:
        with subprocess.Popen(
            words,
            env={**self._env, **message.as_variables()},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            try:
                _, errors = process.communicate(message.text.encode(), timeout=_WITHIN_S - 1.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            lines = redact(errors.decode(errors="replace")).strip().splitlines()
            problem = f": {lines[-1]}" if lines else ""
            self._say(f"notify: {words[0]} ended with code {process.returncode}{problem}")


def _name(entry: str) -> str:
    return entry if _PLACES.fullmatch(entry) else shlex.split(entry)[0]


def _address(kind: str, place: str, env: Mapping[str, str]) -> str:
    text = env.get(place, "") if kind == "env" else Path(place).expanduser().read_text(encoding="utf-8")
    if not re.match(r"https?://", text.strip()):
        raise LookupError(f"no address of a webhook in {place}")
    return text.strip()


def _post(address: str, message: Message) -> None:
    """Posts a message: as text to ntfy, else as JSON with the fields for Slack-compatible services and Discord."""
    if "ntfy" in (urlsplit(address).hostname or ""):
        body = message.text.encode()
        kind = "text/plain; charset=utf-8"
    else:
        variables = {name.removeprefix("NOTIFY_").lower(): text for name, text in message.as_variables().items()}
        fields = {**variables, "text": message.text, "content": message.text}
        body = json.dumps(fields).encode()
        kind = "application/json"
    headers = {"Content-Type": kind, "User-Agent": "slurm_train"}
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")  # http(s) only
    with urllib.request.urlopen(request, timeout=_WITHIN_S - 1.0):  # likewise
        pass
