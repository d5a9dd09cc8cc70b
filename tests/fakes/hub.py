"""The Hugging Face Hub on 127.0.0.1: answers what huggingface_hub asks about models and their files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKENS_MODULE = """
import os, pathlib, torch

class Tokens(torch.utils.data.Dataset):
    def __init__(self, split="train"):
        pathlib.Path("offline").write_text(os.environ.get("HF_HUB_OFFLINE", "unset"))
    def __len__(self):
        return 64
    def __getitem__(self, index):
        tokens = torch.arange(index, index + 9) % 64
        return tokens[:-1], tokens[1:]
"""
"""A person's data set of 64 token ids; notes in the file "offline" what a rank's own environment says of the Hub."""


@dataclass(slots=True)
class Repository:
    """Commits, and the branches and tags that lead to them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False

    def commit(self, files: Mapping[str, bytes], *, to: str = "main") -> str:
        """Adds a commit, moves a branch or tag to it, and returns its hash."""
        sha = hashlib.sha1(b"".join(files.values()) + bytes(len(self.commits))).hexdigest()
        self.commits[sha] = dict(files)
        self.references[to] = sha
        return sha

    def find(self, revision: str) -> str | None:
        """Returns the hash that a branch, a tag or a hash stands for."""
        return self.references.get(revision, revision if revision in self.commits else None)


class Hub:
    """Repositories by name, and what was asked for them: "HEAD /lab/tiny/resolve/..."."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.tokens: set[str] = set()
        self.status: int | None = None
        """What is answered to everything, if it is set."""

    @property
    def fetched(self) -> list[str]:
        """Names of the files that were sent."""
        return [line.rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/resolve/" in line]

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body."""
        words = [unquote(word) for word in path.strip("/").split("/")]
        is_api = words[:2] == ["api", "models"]
        name, rest = "/".join(words[2:4] if is_api else words[:2]), words[4:] if is_api else words[2:]
        repository = self.repositories.get(name)
        if self.status is not None:
            return self.status, {}, b""
        if repository is None:
            # The Hub hides private repositories from who is not logged in.
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        if is_api and rest[:1] != ["auth-check"]:
            sha = repository.find(rest[1] if rest else "main")
            if sha is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            of_tree = rest[:1] == ["tree"]
            return 200, {"Content-Type": "application/json"}, self._listing(name, sha, repository, of_tree=of_tree)
        if repository.is_gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if is_api:
            return 200, {}, b"{}"
        sha = repository.find(rest[1])
        body = repository.commits[sha].get(rest[2]) if sha else None
        if sha is None or body is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": sha}, body

    def _listing(self, name: str, sha: str, repository: Repository, *, of_tree: bool) -> bytes:
        files = {path: (len(body), hashlib.sha256(body).hexdigest()) for path, body in repository.commits[sha].items()}
        if of_tree:
            rows = [{"type": "file", "path": path, "size": size, "oid": oid} for path, (size, oid) in files.items()]
            return json.dumps(rows).encode()
        siblings = [{"rfilename": path, "size": size, "blobId": oid} for path, (size, oid) in files.items()]
        gated = "manual" if repository.is_gated else False
        return json.dumps({"id": name, "sha": sha, "gated": gated, "siblings": siblings}).encode()


@contextmanager
def serving() -> Iterator[Hub]:
    """Runs the server while the body runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._respond(has_body=False)

        def do_GET(self) -> None:
            self._respond(has_body=True)

        def _respond(self, *, has_body: bool) -> None:
            path = urlsplit(self.path).path
            hub.asked.append(f"{self.command} {path}")
            if token := self.headers.get("Authorization"):
                hub.tokens.add(token)
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *_words: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
