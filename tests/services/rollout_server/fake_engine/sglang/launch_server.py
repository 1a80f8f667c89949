"""An engine without a model, which speaks the routes of SGLang that a launcher, a trainer and clients use.

Its weights are one number, read from ``weights.txt`` of the model directory, and every token that it generates is that
number: whoever reads a completion sees which weights made it, whatever version it is said to be of. POST /fault makes
it go wrong. A broadcast brings the number in tensors, by a process group that each tensor-parallel rank joins by
itself, as SGLang's weight_updater.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN_SECONDS = 0.01
HEALTH_SECONDS = 1.0


def read_weights(path: str) -> int:
    return int((Path(path) / "weights.txt").read_text())


class Engine:
    def __init__(self, path: str, version: str, tensor_parallel: int = 1) -> None:
        self.path = path
        self.weights = read_weights(path)
        self.version = version
        self.paused = False
        self.aborts = 0
        self.running = 0
        self.updating = False
        self.update_is_open = False
        self.fault: dict[str, Any] = {}
        self.changed = threading.Condition()
        self.tensor_parallel = tensor_parallel
        self.groups: dict[str, list[Any]] = {}
        self.left: list[Any] = []
        self.group_ranks: list[int] = []

    def generate(self, request: dict[str, Any]) -> Any:
        if self.fault.get("generate_status"):
            return self.fault["generate_status"], {"error": {"message": "a fault of the tests"}}
        sampling = request["sampling_params"]
        if any(token >= 1000 for token in request["input_ids"]):
            return 400, {"error": {"message": "a token out of the vocabulary"}}
        self.wait_for_scheduler()
        with self.changed:
            # As SGLang has it: what comes to a paused engine waits at the door and is not among those that are aborted.
            self.changed.wait_for(lambda: not self.updating and not self.paused)
            self.running += 1
            aborts = self.aborts
        try:
            ids, versions = self._tokens(sampling["max_new_tokens"], aborts)
        finally:
            with self.changed:
                self.running -= 1
                self.changed.notify_all()
        kind = "length" if len(ids) == sampling["max_new_tokens"] else "abort"
        replies = [self._reply(request, ids, versions, kind) for _ in range(sampling.get("n", 1))]
        return 200, replies if len(replies) > 1 else replies[0]

    def _tokens(self, count: int, aborts: int) -> tuple[list[int], list[str]]:
        ids: list[int] = []
        versions: list[str] = []
        while len(ids) < count:
            time.sleep(TOKEN_SECONDS)
            with self.changed:
                self.changed.wait_for(lambda: not self.paused or self.aborts > aborts)
                if self.aborts > aborts:
                    break
                ids.append(self.weights)
                versions.append(self.version)
        return ids, versions

    def _reply(self, request: dict[str, Any], ids: list[int], versions: list[str], kind: str) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for place, version in enumerate(versions):
            if not spans or spans[-1]["version"] != version:
                spans.append({"version": version, "start": place, "end": place})
            spans[-1]["end"] = place + 1
        meta = {
            "id": "fake",
            "finish_reason": {"type": kind},
            "prompt_tokens": len(request["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "weight_versions": spans,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def pause(self, request: dict[str, Any]) -> Any:
        with self.changed:
            self.paused = True
            if request["mode"] == "abort":
                self.aborts += 1
            self.changed.notify_all()
            if request["mode"] == "abort":
                self.changed.wait_for(lambda: self.running == 0)
        return 200, {"success": True}

    def resume(self, _request: dict[str, Any]) -> Any:
        with self.changed:
            self.paused = False
            self.changed.notify_all()
        return 200, {"success": True}

    def begin_update(self, _request: dict[str, Any]) -> Any:
        with self.changed:
            if self.update_is_open:
                return 400, {"success": False, "message": "a weight-update session is already open"}
            self.updating = True
            self.changed.wait_for(lambda: self.paused or self.running == 0)
            self.update_is_open, self.updating = True, False
            self.changed.notify_all()
        return 200, {"success": True}

    def end_update(self, _request: dict[str, Any]) -> Any:
        with self.changed:
            was_open, self.update_is_open = self.update_is_open, False
        return (200 if was_open else 400), {"success": was_open}

    def update(self, request: dict[str, Any]) -> Any:
        with self.changed:
            self.changed.wait_for(lambda: not self.updating)
            self.updating = True
            self.changed.wait_for(lambda: self.paused or self.running == 0)
        try:
            weights = read_weights(request["model_path"])
            self.weights = weights
            if self.fault.pop("half_way", None):
                return 400, {"success": False, "message": "failed half-way: a fault of the tests"}
            self.path, self.version = request["model_path"], request["weight_version"]
            return 200, {"success": True, "message": "updated", "num_paused_requests": 0}
        except OSError as error:
            return 400, {"success": False, "message": str(error)}
        finally:
            with self.changed:
                self.updating = False
                self.changed.notify_all()

    def join_group(self, request: dict[str, Any]) -> Any:
        if request["group_name"] in self.groups:
            return 400, {"success": False, "message": "a group of that name exists"}
        self.group_ranks = [request["rank_offset"] + rank for rank in range(self.tensor_parallel)]
        self.groups[request["group_name"]] = in_threads(lambda rank: join(request, rank), self.group_ranks)
        return 200, {"success": True}

    def leave_group(self, request: dict[str, Any]) -> Any:
        groups = self.groups.pop(request["group_name"], None)
        # Kept, because a group's end would wait for a broadcast that never ends.
        self.left.append(groups)
        return (400 if groups is None else 200), {"success": groups is not None}

    def receive(self, request: dict[str, Any]) -> Any:
        """All ranks receive all tensors, unless the group is left; weights change if all have the same number."""
        import torch

        name = request["group_name"]

        def receive(group: Any) -> set[float]:
            found: set[float] = set()
            for dtype, shape in zip(request["dtypes"], request["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                work = group.broadcast(tensor, 0)
                while not work.is_completed():
                    time.sleep(TOKEN_SECONDS)
                    if name not in self.groups:
                        return set()
                found |= set(tensor.flatten().tolist())
            return found

        found = set[float]().union(*in_threads(receive, self.groups[name]))
        if len(found) != 1 or not self.update_is_open:
            return 400, {"success": False, "message": f"received {found}, update is open: {self.update_is_open}"}
        self.weights = int(found.pop())
        self.version = request["weight_version"] or self.version
        return 200, {"success": True}

    def check_health(self) -> Any:
        """As SGLang does: a paused engine keeps the health check's token waiting, and one that generates is well."""
        self.wait_for_scheduler()
        with self.changed:
            is_well = self.changed.wait_for(lambda: not self.paused and not self.updating, HEALTH_SECONDS)
        return (200 if is_well else 503), {}

    def wait_for_scheduler(self) -> None:
        """Waits while weights are loaded."""
        with self.changed:
            self.changed.wait_for(lambda: not self.updating)

    def information(self) -> dict[str, Any]:
        return {
            "model_path": self.path,
            "served_model_name": self.path,
            "tokenizer_path": self.path,
            "is_generation": True,
            "weight_version": self.version,
            "dp_size": 1,
            "tp_size": self.tensor_parallel,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "group_ranks": self.group_ranks,
        }


def join(request: dict[str, Any], rank: int) -> Any:
    """Joins as torch's _new_process_group_helper does, which allows one rank of a group in a process."""
    from datetime import timedelta

    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

    limit = timedelta(seconds=600)
    name, size = request["group_name"], request["world_size"]
    store = TCPStore(request["master_address"], request["master_port"], size, is_master=False, timeout=limit)
    return ProcessGroupGloo(PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store))), rank, size, limit)


def in_threads(work: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(items)) as threads:
        return list(threads.map(work, items))


def handler(engine: Engine, api_key: str | None) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path == "/health":
                self._answer(200, {})
            elif not self._is_allowed():
                self._answer(401, {"error": "Unauthorized"})
            elif path == "/health_generate":
                self._answer(*engine.check_health())
            elif path == "/metrics":
                self._answer_text("# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs 1\n")
            elif path == "/server_info":
                engine.wait_for_scheduler()
                self._answer(200, engine.information())
            elif path in ("/model_info", "/get_model_info", "/get_server_info"):
                self._answer(200, engine.information())
            else:
                self._answer(404, {"error": f"no {path}"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            routes = {
                "/generate": engine.generate,
                "/pause_generation": engine.pause,
                "/continue_generation": engine.resume,
                "/update_weights_from_disk": engine.update,
                "/begin_weight_update": engine.begin_update,
                "/end_weight_update": engine.end_update,
                "/init_weights_update_group": engine.join_group,
                "/destroy_weights_update_group": engine.leave_group,
                "/update_weights_from_distributed": engine.receive,
                "/fault": self._set_fault,
            }
            if not self._is_allowed():
                self._answer(401, {"error": "Unauthorized"})
            elif self.path in routes:
                self._answer(*routes[self.path](json.loads(body or b"{}")))
            else:
                self._answer(404, {"error": f"no {self.path}"})

        def _set_fault(self, request: dict[str, Any]) -> Any:
            engine.fault = request
            return 200, {"success": True}

        def _is_allowed(self) -> bool:
            return api_key is None or self.headers.get("Authorization") == f"Bearer {api_key}"

        def _answer(self, status: int, content: Any) -> None:
            self._send(status, "application/json", json.dumps(content).encode())

        def _answer_text(self, text: str) -> None:
            self._send(200, "text/plain; version=0.0.4", text.encode())

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, *_: Any) -> None:
        """A client that left is no news."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--weight-version", required=True)
    parser.add_argument("--api-key")
    parser.add_argument("--tp-size", type=int, default=1)
    given, _ = parser.parse_known_args()
    if code := os.environ.get("FAKE_ENGINE_EXIT"):
        print("error: the fake engine refuses its model", file=sys.stderr, flush=True)
        sys.exit(int(code))
    engine = Engine(given.model_path, given.weight_version, given.tp_size)
    Server((given.host, given.port), handler(engine, given.api_key)).serve_forever()


if __name__ == "__main__":
    main()
