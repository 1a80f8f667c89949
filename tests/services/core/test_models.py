"""A model is downloaded once, whoever else wants it and whoever is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig

from services.core import models
from services.core.errors import ConfigurationError
from services.core.models import vocabulary_size
from tests.services.core.hub_stand_in import COMMIT, MODEL, Hub, serving
from tests.waiting import IDLE_SECONDS, wait_until

FILES = {"config.json": b"{}", "tokenizer.json": b"[]", "model.safetensors": bytes(range(256)) * 1000}
PROGRAM = """
import os, socket
from services.core import logs, models
if name := os.environ.get("NODE"):
    socket.gethostname = lambda: name
models.LEASE_SECONDS, models.POLL_SECONDS, models.REPORT_SECONDS = float(os.environ["LEASE"]), 0.05, 0.2
logs.configure("test")
models.download_model(os.environ["MODEL"])
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Hub, dict[str, str]]]:
    """The hub, with one model, and the variables with which processes ask it; all share a cache."""
    directory = tmp_path / "hub"
    directory.mkdir()
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    (directory / "pytorch_model.bin").write_bytes(b"what nobody reads")
    with serving(directory, tmp_path / "cache") as found:
        yield found


@pytest.fixture
def served(hub: tuple[Hub, dict[str, str]]) -> Hub:
    return hub[0]


@pytest.fixture
def start(hub: tuple[Hub, dict[str, str]]) -> Iterator[object]:
    """Start a process that wants the model."""
    started = []

    def process(model: str = MODEL, *, node: str = "", lease: float = 60.0, **variables: str) -> subprocess.Popen[str]:
        environment = os.environ | hub[1] | {"MODEL": model, "NODE": node, "LEASE": str(lease), **variables}
        started.append(
            subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stderr=subprocess.PIPE, text=True)
        )
        return started[-1]

    yield process
    for one in started:
        one.kill()
        one.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and log of a process."""
    _, log = process.communicate(timeout=IDLE_SECONDS)
    return process.returncode, log


def snapshot(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "cache" / "models--team--tiny" / "snapshots" / COMMIT
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_complete_model_is_not_asked_for_again(served, start):
    assert ended(start())[0] == 0
    listings = served.listings
    assert ended(start())[0] == 0
    assert (served.listings, served.fetched) == (listings, dict.fromkeys(FILES, 1))


def test_other_processes_wait_until_the_model_is_complete_and_log_it(served, start, tmp_path):
    served.held["model.safetensors"] = threading.Event()
    first = start()
    wait_until(served.half_sent.is_set, "half of the weights are sent")
    second = start()
    lines = [second.stderr.readline() for _ in range(2)]
    assert all("waiting for the model: another process downloads it" in line for line in lines), lines
    assert second.poll() is None
    assert "downloading the model" in first.stderr.readline()
    served.held["model.safetensors"].set()
    assert [ended(one)[0] for one in (first, second)] == [0, 0]
    assert served.fetched == dict.fromkeys(FILES, 1)


@pytest.mark.parametrize(
    ("other_node", "lease"),
    [("", 60.0), ("another-node", 1.0)],
    ids=["on its node at once", "on another node after the lease"],
)
def test_after_a_killed_downloader_another_fetches_what_is_missing(served, start, tmp_path, other_node, lease):
    served.held["model.safetensors"] = threading.Event()
    killed = start(lease=lease)
    small = {name: 1 for name in FILES if name != "model.safetensors"}
    wait_until(lambda: served.half_sent.is_set() and served.fetched == small, "all but the weights are there")
    cached = tmp_path / "cache" / "models--team--tiny" / "snapshots" / COMMIT
    wait_until(lambda: len(list(cached.glob("*"))) == len(small), "the small files are in place")
    waiting = start(node=other_node, lease=lease)
    killed.kill()
    killed.wait(IDLE_SECONDS)
    wait_until(lambda: served.listings == 2, "another process takes over")
    served.held["model.safetensors"].set()
    assert ended(waiting)[0] == 0
    assert snapshot(tmp_path) == FILES
    assert {name: served.fetched[name] for name in small} == small


def test_a_broken_download_names_model_and_cache(served, start):
    served.refused.add("model.safetensors")
    code, log = ended(start())
    assert code == 1
    assert "MODEL_NAME=team/tiny: the download to" in log, log


@pytest.mark.parametrize(("model", "offline"), [(".", "0"), ("not a name", "0"), (MODEL, "1")])
def test_directories_and_impossible_names_ask_nobody_and_nothing_is_asked_for_offline(
    served, monkeypatch, tmp_path, model, offline
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline == "1")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", served.url)
    models.download_model(model)
    assert served.listings == 0


def test_a_models_vocabulary_is_what_transformers_says(tiny_model):
    assert vocabulary_size(str(tiny_model), "MODEL_NAME") == AutoConfig.from_pretrained(tiny_model).vocab_size == 17


def test_the_vocabulary_of_a_multimodal_model_is_that_of_its_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 5}, "vision_config": {}}))
    assert vocabulary_size(str(tmp_path), "MODEL_NAME") == 5
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 6, "text_config": None}))
    assert vocabulary_size(str(tmp_path), "MODEL_NAME") == 6


@pytest.mark.parametrize(
    ("text", "message"), [(None, "No such file"), ("{", "Expecting"), ("{}", "has no vocab_size"), ("[]", "list")]
)
def test_a_model_whose_configuration_lacks_a_number_is_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigurationError, match=f"MODEL_NAME .*{message}"):
        vocabulary_size(str(tmp_path), "MODEL_NAME")
