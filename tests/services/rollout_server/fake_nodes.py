"""Rollout nodes with the real launcher and router around engines without a model; traffic that checks every token."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

from services.clients.rollout import RolloutClient, SamplingParams
from services.core.errors import DependencyLostError
from services.engines.engine import WorkerRefusedError, from_directory
from services.engines.router import RouterAdmin
from services.protocol.groups import TokenSequence
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.waiting import IDLE_SECONDS, wait_until

FAKE_ENGINE = Path(__file__).with_name("fake_engine")
GROUP_SIZE = 4
REGISTERED = "worker registered"
"""A launcher's line about a worker that has the newest version and gets requests."""
# About 0.3 s of a fake engine's time.
PARAMS = SamplingParams(max_new_tokens=30)


def fake_nodes(directory: Path, count: int = 1, **environment: str) -> FakeNodes:
    """Nodes that are not started yet, below ``directory``."""
    interpreter = directory / "python-with-fake-engine"
    interpreter.write_text(f'#!/bin/sh\nexport PYTHONPATH="{FAKE_ENGINE}"\nexec "{sys.executable}" "$@"\n')
    interpreter.chmod(0o755)
    model = directory / "model"
    model.mkdir()
    (model / "weights.txt").write_text("0")
    defaults = {"SGLANG_PYTHON": str(interpreter), "ROUTER_EXTRA_FLAGS": "--health-check-interval-secs 1"}
    return FakeNodes(directory, model, count, "sglang", defaults | environment)


class FakeNodes(Nodes):
    """Nodes whose version v has the weights v."""

    def publish(self, version: int, model: Path | None = None) -> Path:
        """Publishes as a trainer does: a worker that does not take the version leaves the routing."""
        (self.store.begin(version) / "weights.txt").write_text(str(version))
        path = self.store.commit(version)
        asyncio.run(self._update_workers(path, version))
        return path

    def fault(self, rank: int, engine: int = 0, **fault: Any) -> None:
        """Makes a node's engine go wrong, as fake_engine/sglang/launch_server.py says; without any, not any more."""
        assert self.post(self.worker(rank, engine), "/fault", fault).status_code == 200

    @contextmanager
    def registered_anew(self, rank: int) -> Iterator[None]:
        """Wait at the end of the context until a worker of a node was registered since its beginning.

        The router lists a worker that is lost until it notices or is told, so its list alone may show what was before.
        """
        before = self.log(rank).count(REGISTERED)
        yield
        self.wait_until(lambda: self.log(rank).count(REGISTERED) > before, "the worker is registered anew")

    def all_processes(self) -> list[psutil.Process]:
        """The launchers and everything below them."""
        launchers = [psutil.Process(node.process.pid) for node in self.nodes.values() if node.process.poll() is None]
        return launchers + [child for launcher in launchers for child in launcher.children(recursive=True)]

    def log(self, rank: int) -> str:
        return self.nodes[rank].log.read_text()

    async def _update_workers(self, path: Path, version: int) -> None:
        async with RouterAdmin(self.router, TOKEN) as router:
            for worker in await router.workers():
                async with worker.engine(TOKEN, timeout=IDLE_SECONDS) as engine:
                    try:
                        await engine.serve(from_directory(version, path), "finish")
                    except (WorkerRefusedError, DependencyLostError):
                        await router.remove(worker.url)


def unlike_prompts(number: int, turn: int) -> list[int]:
    """Return a prompt without a common beginning with others, so that the router has no reason to prefer a worker."""
    return [number, turn % 1000, 1, 2, 3]


class Traffic(AbstractContextManager["Traffic"]):
    """Asks for groups through the router, several at once, until its block ends; then all must be complete."""

    def __init__(
        self,
        nodes: Nodes,
        prompt: Callable[[int, int], list[int]] = unlike_prompts,
        *,
        concurrency: int = 6,
        params: SamplingParams = PARAMS,
        lora_path: str | None = None,
    ) -> None:
        self.answers: list[tuple[list[int], list[TokenSequence]]] = []
        self.errors: list[BaseException] = []
        self._nodes, self._prompt, self._concurrency, self._params = nodes, prompt, concurrency, params
        self._lora_path = lora_path
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    @property
    def groups(self) -> list[list[TokenSequence]]:
        return [group for _, group in self.answers]

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for_groups(self._concurrency)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        if kind is None:
            self.check()

    def wait_for_groups(self, count: int) -> None:
        """Waits until ``count`` more groups have come."""
        wanted = len(self.answers) + count
        wait_until(
            lambda: len(self.answers) >= wanted or self.errors,
            "groups",
            progress=lambda: len(self.answers),
            told=self._nodes.logs,
        )

    def check(self) -> None:
        """Every group is complete; a fake engine's tokens come from the version that they are said to be of."""
        assert not self.errors, f"{self.errors}\n{self._nodes.logs()}"
        for group in self.groups:
            assert len(group) == GROUP_SIZE
            for completion in group if isinstance(self._nodes, FakeNodes) else []:
                assert len(completion.completion_ids) == PARAMS.max_new_tokens
                assert completion.completion_ids.tolist() == completion.policy_versions.tolist()

    def versions(self, since: int = 0) -> set[int]:
        """The versions that made the tokens of the groups after the first ``since``."""
        return {token for group in self.groups[since:] for one in group for token in one.policy_versions.tolist()}

    async def _run(self) -> None:
        vocab_size = 1000 if isinstance(self._nodes, FakeNodes) else 17
        options = {"vocab_size": vocab_size, "deadline_seconds": IDLE_SECONDS, "lora_path": self._lora_path}
        async with RolloutClient(self._nodes.router, TOKEN, **options) as client:
            await asyncio.gather(*(self._ask(client, number) for number in range(self._concurrency)))

    async def _ask(self, client: RolloutClient, number: int) -> None:
        for turn in itertools.count(1):
            prompt = self._prompt(number, turn)
            try:
                self.answers.append((prompt, await client.generate(prompt, self._params, n=GROUP_SIZE)))
            except Exception as error:  # noqa: BLE001  # `check` shows it
                self.errors.append(error)
                return
            if self._stopping.is_set():
                return
