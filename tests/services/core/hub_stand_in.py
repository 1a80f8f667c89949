"""A stand-in for the Hugging Face hub: one model over HTTP, with a count of what was asked for."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson

from tests.waiting import IDLE_SECONDS

MODEL = "team/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves a directory as ``team/tiny``; its address is for HF_ENDPOINT."""

    daemon_threads = True

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.fetched: Counter[str] = Counter()
        """Whole files that were sent, by name."""
        self.listings = 0
        self.held: dict[str, threading.Event] = {}
        """Files that are sent by half, until their event is set."""
        self.refused: set[str] = set()
        """Files that are listed and not sent."""
        self.half_sent = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(directory: Path, cache: Path) -> Iterator[tuple[Hub, dict[str, str]]]:
    """Serve a directory; yield the hub, and the variables with which a process asks it and keeps files in ``cache``."""
    with Hub(directory) as hub:
        thread = threading.Thread(target=hub.serve_forever)
        thread.start()
        variables = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache)}
        yield hub, variables | {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}
        for event in hub.held.values():
            event.set()
        hub.shutdown()
        thread.join(IDLE_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{MODEL}/tree/"):
            files = sorted(self.server.directory.iterdir())
            listed = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _etag(f.read_bytes())} for f in files
            ]
            self._send(orjson.dumps(listed), {"Content-Type": "application/json"}, with_body=with_body)
        elif path.startswith(f"/api/models/{MODEL}"):
            self.server.listings += 1
            body = orjson.dumps({"id": MODEL, "sha": COMMIT, "siblings": []})
            self._send(body, {"Content-Type": "application/json"}, with_body=with_body)
        elif path.startswith(f"/{MODEL}/resolve/") and (file := self.server.directory / path.split("/")[-1]).is_file():
            self._send_file(file, with_body=with_body)
        elif path.startswith("/api/"):
            # As the hub answers whoever has no token, so that nobody learns of private ones.
            self.send_response(401)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.send_error(404)

    def _send_file(self, file: Path, *, with_body: bool) -> None:
        content, hub = file.read_bytes(), self.server
        if with_body and file.name in hub.refused:
            self.send_error(403)
            return
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": COMMIT}
        if not with_body or file.name not in hub.held or hub.held[file.name].is_set():
            self._send(content, headers, with_body=with_body)
            if with_body:
                hub.fetched[file.name] += 1
            return
        self._send(content, headers, with_body=False)
        self.wfile.write(content[: len(content) // 2])
        self.wfile.flush()
        hub.half_sent.set()
        hub.held[file.name].wait()
        self.wfile.write(content[len(content) // 2 :])
        hub.fetched[file.name] += 1

    def _send(self, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
