"""grpo push: the model of a run and its card, against a stand-in of the hub that loses a connection."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from scripts.push import main
from services.core.errors import ConfigurationError
from tests.waiting import IDLE_SECONDS
from trainer.reporting.model_card import write_card

TOKEN = "hf_a-token-that-is-a-secret"
WEIGHTS = {"model-00001-of-00002.safetensors": b"one" * 1000, "model-00002-of-00002.safetensors": b"two" * 1000}
SUMMARY = {
    "status": "succeeded",
    "steps": 2,
    "seconds": 61.0,
    "reward_first": 0.25,
    "reward_last": 0.75,
    "reward_steps": 1,
    "accuracy_before": 0.1,
    "accuracy_before_low": 0.05,
    "accuracy_before_high": 0.2,
    "accuracy_after": 0.9,
    "accuracy_after_low": 0.8,
    "accuracy_after_high": 0.95,
    "accuracy_after_prompts": 20,
    "model": "team/base",
    "dataset": "/home/somebody/rows|of.jsonl",
    "rows": 1234,
    "rows_left_out": {"no answer": 3},
    "device": "cpu",
    "compute_type": "float32",
    "ranks": 2,
}
TRAINER = {
    "settings": {
        "advantage": "grpo",
        "loss": "cispo",
        "jobgroup_token": "**********",
        "run_id": "mine",
        "learning_rate": 2e-5,
    },
    "changed": ["loss", "jobgroup_token", "run_id", "learning_rate"],
    "packages": {"torch": "2.13.0"},
    "commit": "abc123",
}


class Hub(ThreadingHTTPServer):
    """A stand-in for the hub, as far as uploads ask it; it refuses the uploads whose numbers ``lost`` has."""

    daemon_threads = True

    def __init__(self, lost: set[int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stored: dict[str, bytes] = {}
        """The contents of large files, by their digest."""
        self.uploads = 0
        self.lost = lost
        self.commits: list[dict[str, bytes]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _reply(self, content: object, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and "lfs" not in self.path:
            self._reply({"error": "Invalid username or password."}, 401)
        elif self.path.startswith("/api/repos/create"):
            self._reply({"url": f"{self.server.url}/org/mine"})
        elif self.path.startswith("/api/validate-yaml"):
            self._reply({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            large = {file["path"] for file in files if file["path"].endswith(".safetensors")}
            modes = {name: "lfs" if name in large else "regular" for name in (file["path"] for file in files)}
            told = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            self._reply({"files": told})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._reply({"transfer": "basic", "objects": [self._object(o) for o in json.loads(body)["objects"]]})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                line["value"]["path"]: base64.b64decode(line["value"]["content"])
                if line["key"] == "file"
                else self.server.stored[line["value"]["oid"]]
                for line in lines
                if line["key"] != "header"
            }
            self.server.commits.append(files)
            self._reply({"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.server.url}/org/mine/commit/1"})
        else:
            self._reply({"error": self.path}, 404)

    def _object(self, wanted: dict[str, object]) -> dict[str, object]:
        if wanted["oid"] in self.server.stored:
            return wanted
        return wanted | {"actions": {"upload": {"href": f"{self.server.url}/large/{wanted['oid']}"}}}

    def do_PUT(self) -> None:
        self.server.uploads += 1
        if self.server.uploads in self.server.lost:
            self._reply({"error": "no room"}, 507)
            return
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.stored[self.path.rsplit("/", 1)[1]] = content
        self._reply({})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(lost={2}) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(IDLE_SECONDS)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with a finished run."""
    run = tmp_path / "mine"
    (run / "model").mkdir(parents=True)
    for name, content in {**WEIGHTS, "config.json": b"{}"}.items():
        (run / "model" / name).write_bytes(content)
    (run / "reward.png").write_bytes(b"a picture")
    (run / "nodes.json").write_text("{}")
    (run / "summary.json").write_text(json.dumps(SUMMARY))
    (run / "config.json").write_text(json.dumps({"components": {"ppo-trainer": TRAINER}}))
    lines = [{"step": step, "completions": 16, "completion_tokens": 1000.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def push(hub: Hub, runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(runs),
        "HF_HUB_OFFLINE": "0",
        # The stand-in has the older protocol for large files.
        "HF_HUB_DISABLE_XET": "1",
    }
    command = [sys.executable, "-m", "scripts.grpo", "push", *arguments, "--runs", str(runs)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_an_interrupted_upload_commits_nothing_and_the_next_sends_the_rest(hub: Hub, runs: Path) -> None:
    first = push(hub, runs, "mine", "org/mine")
    assert first.returncode == 78, first.stderr
    assert "Traceback" not in first.stderr
    assert hub.commits == []
    assert len(hub.stored) == 1
    second = push(hub, runs, "mine", "org/mine")
    assert second.returncode == 0, second.stderr
    assert f"{hub.url}/org/mine/commit/1" in second.stdout
    assert hub.uploads == 3, "one lost, and each file once"
    [files] = hub.commits
    assert {name: files[name] for name in WEIGHTS} == WEIGHTS
    assert files.keys() == {*WEIGHTS, "config.json", "README.md", "reward.png"}
    assert files["README.md"].startswith(b"---\nbase_model: team/base\n")


def test_the_card_has_results_with_intervals_and_neither_secrets_nor_paths(runs: Path) -> None:
    card = write_card(runs / "mine").read_text()
    assert card.startswith("---\nbase_model: team/base\n")
    assert "| accuracy, greedy, 20 held-out prompts | 0.100 (0.050 to 0.200) | 0.900 (0.800 to 0.950) |" in card
    assert "| tokens generated | 2,000 |" in card
    assert "| rows | 1,234, 3 left out |" in card
    assert "| ppo-trainer | `LOSS` | `cispo` |" in card
    for hidden in ("********", "/home", "RUN_ID"):
        assert hidden not in card


def test_what_cannot_be_pushed_is_refused_with_the_remedy(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Api(HfApi):
        """A hub that does not take the token."""

        def create_repo(self, *_: Any, **__: Any) -> Any:
            raise LocalTokenNotFoundError

    with pytest.raises(ConfigurationError, match="no name of a repository"):
        main("mine", "no name", below=runs)
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    with pytest.raises(ConfigurationError, match="HF_TOKEN"):
        main("mine", "org/mine", below=runs)
    with pytest.raises(ConfigurationError, match="other"):
        main("other", "org/mine", below=runs)
    for file in (runs / "mine" / "model").iterdir():
        file.unlink()
    with pytest.raises(ConfigurationError, match="no trained model"):
        main("mine", "org/mine", below=runs)
