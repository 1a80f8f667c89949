"""The prompts that a collector has taken, on disk, so that a killed collector's prompts are not lost."""

from __future__ import annotations

import uuid
from pathlib import Path

from pydantic import BaseModel

from services.clients.data import DataClient
from services.core.files import atomic_write
from services.core.logs import get_logger
from services.protocol.prompts import Cursor, Prompt

log = get_logger(__name__)


class _Record(BaseModel):
    """The file's content."""

    request_id: str | None = None
    """The request for prompts that was sent and whose reply is not among ``open`` yet."""
    size: int = 0
    """The number of prompts that the request asked for."""
    open: list[tuple[int, int]] = []
    """Epoch and position of each prompt whose group is not in the queue."""


class TakenPrompts:
    """The prompts that a collector has taken and whose groups are not in the queue yet.

    The data-server gives each prompt once an epoch. So a collector that was killed in between finds its prompts here
    when it is restarted, and makes their groups anew. A group that was in the queue already has the same id, and the
    replay-buffer leaves the second one out.
    """

    def __init__(self, data: DataClient, consumer: str, file: Path) -> None:
        """Read the prompts of an earlier process from ``file``, or create it; ``consumer`` is the data-server's."""
        self._data = data
        self._consumer = consumer
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self._record = _Record.model_validate_json(file.read_bytes()) if file.exists() else _Record()

    async def left_behind(self) -> list[Prompt]:
        """Return the prompts that an earlier process took and did not finish."""
        prompts = []
        for epoch, position in self._record.open:
            cursor = Cursor(epoch=epoch, position=position)
            prompts += (await self._data.prompts(1, cursor=cursor)).prompts
        if self._record.request_id is not None:
            prompts += await self._ask()
        if prompts:
            log.warning("groups of an earlier collector are made anew", prompts=len(prompts))
        return prompts

    async def take(self, size: int) -> list[Prompt]:
        """Take the next prompts, ``size`` at most."""
        self._record.request_id, self._record.size = uuid.uuid4().hex, size
        self._save()
        return await self._ask()

    def finish(self, prompt: Prompt) -> None:
        """Note that a prompt's group is in the queue, or that there is none to expect."""
        self._record.open.remove((prompt.epoch, prompt.position))
        self._save()

    async def _ask(self) -> list[Prompt]:
        """Send the request, perhaps once more, which gives the same prompts."""
        record = self._record
        batch = await self._data.prompts(record.size, consumer=self._consumer, request_id=record.request_id)
        record.open += [(prompt.epoch, prompt.position) for prompt in batch.prompts]
        record.request_id = None
        self._save()
        return batch.prompts

    def _save(self) -> None:
        atomic_write(self._file, self._record.model_dump_json())
