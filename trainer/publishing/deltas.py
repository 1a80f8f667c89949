"""Versions as what they change (PUBLISH_DELTA): written by rank 0, and loaded from the copy that each node keeps.

A delta is relative to the version before, because that is the fewest bytes: relative to the anchor it would have the
changes of every step since. A node that follows reads each delta once. One that comes late reads the anchor and all
deltas since, so there is a new anchor as soon as these have more bytes than a whole version: nobody ever reads more
than two whole versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from services.core.errors import ConfigurationError, DependencyLostError
from services.core.files import CHANGES_FILE, RECORD_FILE, atomic_write
from services.engines.engine import Engine, WorkerRefusedError
from services.engines.versions import Form
from services.http.client import HttpClient
from services.weights.deltas import VALUES, Words, changes, checksums
from services.weights.policy_store import DeltaRecord, PolicyStore
from trainer.model.saving import follow_umask

MOST_DELTAS = 100
"""Deltas after which there is a new anchor although they are small, so that a late node reads few files."""
ANSWER_SECONDS = 30.0
"""Time for a launcher's answer besides that of its work, so that the reason for a failure is the launcher's own."""
TAKE_BACK_SECONDS = 60.0
"""Longest time for a launcher to take its copy back, which it does by itself a while after it has lent the copy."""


class DeltaWriter:
    """The writer of versions as anchors and deltas, on rank 0. It keeps the words of the version that it wrote last."""

    def __init__(self, store: PolicyStore) -> None:
        self.metrics: dict[str, float] = {}
        """The metrics of that version."""
        self._store = store
        self._words: dict[str, Words] = {}
        self._chain: list[tuple[int, str]] = []
        self._delta_bytes = 0
        """Bytes of the deltas in its chain."""

    def write(
        self,
        write: Callable[[Callable[[Path], None]], None],
        version: int,
        state: Mapping[str, Tensor],
        save_whole: Callable[[Path], object],
    ) -> None:
        """Write a version: as a delta if the volume has the version before and an anchor is not due.

        Args:
            write: has a function fill the version's directory, and makes it visible.
            version: the version.
            state: its whole tensors on the CPU, which nobody changes later.
            save_whole: fills a directory with the whole version.

        Raises:
            DiskFullError: the disk is full. The next version then follows the version that was written last.
        """
        words = {name: _words(value) for name, value in state.items()}
        sums = checksums(words)
        identity = hashlib.blake2b(json.dumps(sums).encode(), digest_size=16).hexdigest()
        # A version that is written again is written whole, because readers may have found its delta damaged.
        is_next = bool(self._chain) and self._chain[-1][0] < version
        has_base = is_next and all(self._store.path(link).is_dir() for link, _ in self._chain)
        arrays = changes(self._words, words) if has_base else {}
        delta, whole = _size(arrays), _size(words)
        is_whole = not has_base or self._delta_bytes + delta > whole or len(self._chain) > MOST_DELTAS
        chain = [*([] if is_whole else self._chain), (version, identity)]

        def save(directory: Path) -> None:
            if is_whole:
                save_whole(directory)
            else:
                save_file(arrays, directory / CHANGES_FILE)
            atomic_write(directory / RECORD_FILE, DeltaRecord(chain=chain, sums=sums).model_dump_json())
            follow_umask(directory, RECORD_FILE)

        write(save)
        # Only now, because readers follow what is on the volume.
        self._words, self._chain, self._delta_bytes = words, chain, 0 if is_whole else self._delta_bytes + delta
        self.metrics = {"publish_bytes": float(whole if is_whole else delta), "publish_whole_bytes": float(whole)}
        if has_base:
            changed = sum(array.size for name, array in arrays.items() if name.endswith(VALUES))
            self.metrics["publish_changed"] = changed / sum(array.size for array in words.values())


@dataclass(frozen=True)
class NodesCopy(Form):
    """A version in the copy of the newest version that each node's launcher keeps."""

    version: int
    token: str | None
    seconds: float
    """Longest time that a launcher takes until its copy is the version."""
    paths: dict[str, str] = field(default_factory=dict)
    """The copy's directory by a worker's URL."""
    launchers: set[str] = field(default_factory=set)
    """The launchers that were asked for the version, which may have lent their copy."""

    async def fetch(self, worker: Engine) -> None:
        """See Form: the launcher reads what has changed, while its engines generate.

        Raises:
            ConfigurationError: the worker's launcher keeps no copy.
            WorkerRefusedError: the launcher cannot make its copy the version, or does not answer.
        """
        if not worker.launcher:
            raise ConfigurationError(
                f"PUBLISH_DELTA is set, but the launcher of worker {worker.url} keeps no copy of the weights; give "
                "rollout-server the same PUBLISH_DELTA as ppo-trainer"
            )
        self.launchers.add(worker.launcher)
        seconds = self.seconds + ANSWER_SECONDS
        try:
            reply = await self._ask(worker.launcher, "POST", f"/versions/{self.version}", seconds)
        except DependencyLostError as error:
            raise WorkerRefusedError(
                f"{error}; a rollout-server's launcher brings its node's copy of the weights up to date there "
                "(PUBLISH_DELTA): see its log, and let ppo-trainer reach this port, or unset PUBLISH_DELTA"
            ) from error
        if reply.status_code != 200:
            raise WorkerRefusedError(f"launcher {worker.launcher}: {reply.status_code} {reply.text[:500]}")
        self.paths[worker.url] = reply.json()["path"]

    async def load(self, worker: Engine) -> None:
        """See Form."""
        await worker.load_model(self.paths[worker.url], self.version)

    async def close(self) -> None:
        """See Form: the copies may become other versions. One whose launcher does not answer may in a while."""

        async def take_back(launcher: str) -> None:
            with contextlib.suppress(DependencyLostError):
                await self._ask(launcher, "DELETE", "/versions", TAKE_BACK_SECONDS)

        await asyncio.gather(*map(take_back, self.launchers))

    async def _ask(self, launcher: str, method: str, path: str, seconds: float) -> httpx.Response:
        async with HttpClient(launcher, token=self.token, service="launcher", timeout=seconds) as client:
            return await client.send_once(method, path, seconds=seconds)


def _words(value: Tensor) -> Words:
    words: Words = value.flatten().view(torch.uint8).numpy().view(np.uint16)
    return words


def _size(arrays: Mapping[str, Words]) -> int:
    return sum(array.nbytes for array in arrays.values())
