"""Messages about a run: to a real HTTP server and a real command, once, in bounded time, without secrets."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm_train.config.schema import RequeueSection
from slurm_train.config.secrets import refuse_secrets
from slurm_train.errors import ConfigError
from slurm_train.rundir.attempts import open_attempt
from slurm_train.rundir.ledger import Action, Reason, Start
from slurm_train.rundir.paths import RunDirectory
from slurm_train.supervise import notify as module
from slurm_train.supervise.actions import Decision
from slurm_train.supervise.best_effort import BestEffort
from slurm_train.supervise.job import Job
from slurm_train.supervise.notify import Notifier
from slurm_train.supervise.step import Step
from slurm_train.supervise.supervisor import Supervisor
from tests.support.command_line import Person, new_project
from tests.support.ledgers import close_attempt
from tests.support.waiting import wait_for


class Server(ThreadingHTTPServer):
    """Keeps what is posted; answers with a code, or not before it is let go."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posted: list[tuple[str, str, bytes]] = []
        self.code = 200
        self.answers = threading.Event()
        self.answers.set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/services/T0/secret-part"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posted.append((self.path, self.headers["Content-Type"], body))
        self.server.answers.wait(60)
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.answers.set()
        server.shutdown()


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs" / "gpt" / "0c544ce3d843")
    run.path.mkdir(parents=True)
    return run


def notifier(run: RunDirectory, *entries: str, said: list[str] | None = None, **env: str) -> Notifier:
    return Notifier(run, entries, env={**os.environ, **env}, say=(said if said is not None else []).append)


NOTE = {"note": "rank 1 on node2 failed: token=abcdefgh12345678", "job_id": "17", "attempt": 2}


def test_a_webhook_gets_the_fields_that_slack_and_discord_read(run: RunDirectory, server: Server) -> None:
    notifier(run, "env:HOOK", HOOK=server.address)("failed", once="attempt 2", **NOTE)
    ((path, kind, body),) = server.posted
    sent = json.loads(body)
    assert (path, kind) == ("/services/T0/secret-part", "application/json")
    assert (
        sent["text"]
        == sent["content"]
        == ("gpt/0c544ce3d843 failed\nrank 1 on node2 failed: token=[redacted]\n" + f"job 17, attempt 2, {run.path}")
    )
    assert (sent["event"], sent["job"], sent["attempt"]) == ("failed", "17", "2")
    assert b"abcdefgh" not in body


def test_the_address_may_be_in_a_file_and_ntfy_gets_text(
    run: RunDirectory, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "address").write_text(server.address + "\n")
    monkeypatch.setattr(module, "urlsplit", lambda _: type("Parts", (), {"hostname": "ntfy.example.org"}))
    notifier(run, f"file:{tmp_path / 'address'}")("finished", once="", **NOTE)
    ((_, kind, body),) = server.posted
    assert kind.startswith("text/plain") and body.startswith(b"gpt/0c544ce3d843 finished\n")


def test_a_command_gets_the_text_and_the_values(run: RunDirectory, tmp_path: Path) -> None:
    program = "import os, sys; open(sys.argv[1], 'w').write(os.environ['NOTIFY_EVENT'] + ' ' + sys.stdin.read())"
    notifier(run, f'{sys.executable} -c "{program}" {tmp_path / "got"}')("hung", once="attempt 2", **NOTE)
    assert (tmp_path / "got").read_text().startswith("hung gpt/0c544ce3d843 hung\n")


def test_each_message_is_sent_once_whoever_sends_it(run: RunDirectory, server: Server) -> None:
    for _ in range(2):
        # Another supervisor, on another node.
        tell = notifier(run, "env:HOOK", HOOK=server.address)
        tell("failed", once="attempt 2", **NOTE)
        tell("failed", once="attempt 3", **NOTE)
        tell("requeued", once="", **NOTE)
    events = [json.loads(body)["event"] for _, _, body in server.posted]
    assert events == ["failed", "failed", "requeued"]
    assert sorted(path.name for path in run.notified("any").parent.iterdir()) == [
        "failed_attempt_2",
        "failed_attempt_3",
        "requeued",
    ]


def test_what_does_not_answer_is_left_behind(
    run: RunDirectory, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WITHIN_S", 3.0)
    server.answers.clear()
    pid, said = tmp_path / "pid", list[str]()
    command = f"{sys.executable} -c \"import os, time; open('{pid}', 'w').write(str(os.getpid())); time.sleep(600)\""
    began_s = time.monotonic()
    notifier(run, "env:HOOK", command, said=said, HOOK=server.address)("finished", once="", **NOTE)
    assert time.monotonic() - began_s < 60
    assert not wait_for(lambda: pid.exists(), within_s=1, what="the command") or not _runs(int(pid.read_text() or 0))
    wait_for(lambda: len(said) >= 2, within_s=60, what="both are said")
    assert "secret-part" not in " ".join(said)


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("env:HOOK", "notify: env:HOOK: HTTPError; see docs/notifications.md"),
        ("env:NOT_SET", "notify: env:NOT_SET: LookupError; see docs/notifications.md"),
        ("no-such-program --flag", "notify: no-such-program: FileNotFoundError; see docs/notifications.md"),
        (
            f"{sys.executable} -c 'import sys; sys.exit(\"no mail here\")'",
            f"{sys.executable} ended with code 1: no mail here",
        ),
    ],
)
def test_what_fails_is_said_without_the_address(run: RunDirectory, server: Server, entry: str, line: str) -> None:
    server.code, said = 404, list[str]()
    notifier(run, entry, said=said, HOOK=server.address)("finished", once="", **NOTE)
    assert len(said) == 1 and said[0].endswith(line)


def test_a_run_directory_that_cannot_be_written_sends_nothing(run: RunDirectory, server: Server) -> None:
    run.notified("any").parent.write_text("a file in the way")
    notifier(run, "env:HOOK", HOOK=server.address)("finished", once="", **NOTE)
    assert not server.posted


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("https://hooks.slack.com/services/T0/B0/abc", "notify holds the address of a webhook"),
        ("mail -s 'unfinished", "which is no command"),
        ("  ", "notify has an empty entry"),
    ],
)
def test_an_entry_that_cannot_be_used_is_refused(entry: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        refuse_secrets({"notify": [entry]})
    assert "abc" not in str(refused.value)
    refuse_secrets({"notify": ["file:~/.notify_url", "env:NOTIFY_URL", "mail -s done me@example.org"]})


@pytest.mark.parametrize(("ending", "events"), [("", ["finished"]), ("raise SystemExit(3)", ["failed"])])
def test_a_run_tells_how_it_has_ended(ending: str, events: list[str], tmp_path: Path) -> None:
    person = Person(new_project(tmp_path / "project"))
    (person.folder / "program.py").write_text(f"print('begun')\n{ending}\n")
    (person.folder / "told.py").write_text("import os\nopen('told', 'a').write(os.environ['NOTIFY_EVENT'] + chr(10))\n")
    told = f'notify=["{sys.executable} {person.folder / "told.py"}"]'
    for _ in range(2):
        # What is finished already, or is started again by hand, is not told as if it were new.
        person.types("run.processes=1", "script=[program.py]", told)
    lines = (person.folder / "told").read_text().split()
    assert lines == events * (2 if ending else 1)


def test_nobody_is_told_of_a_run_that_was_stopped_or_comes_back_for_the_first_time(run: RunDirectory) -> None:
    told: list[tuple[str, str]] = []

    class Recorder(Notifier):
        def __call__(self, event: str, *, once: str, **_: Any) -> None:  # type: ignore[override]
            told.append((event, once))

    def ends(action: str, reason: str, *, is_hung: bool = False) -> None:
        supervisor = Supervisor(
            run,
            Job({}),
            Step(Start(job_id=None, restart_count=0, nodes=("here",), world_size=1)),
            RequeueSection(notify_after=2),
            notify=Recorder(run, ["true"], env={}, say=told.append),  # type: ignore[arg-type]
        )
        attempt = open_attempt(run, supervisor._start())
        close_attempt(run, attempt, {"reason": reason, "action": action})
        end = SimpleNamespace(number=attempt, hang={"sentence": "it waits"} if is_hung else {})
        decision = Decision(Reason(reason), Action(action), "a note")
        supervisor._notify_of_end(end, decision, BestEffort())  # type: ignore[arg-type]

    ends("stop", "cancelled")
    ends("stop", "stopped")
    ends("requeue", "preempted")
    ends("requeue", "preempted")
    assert told == []
    ends("requeue", "time_limit")
    ends("relaunch", "failed", is_hung=True)
    ends("stop", "failed", is_hung=True)
    assert told == [("requeued", ""), ("hung", "attempt 5"), ("hung", "attempt 6"), ("failed", "attempt 6")]
