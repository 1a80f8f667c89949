"""A neural reward model: a sequence classification model with one logit, batched over all waiting answers.

Imported only where REWARD_FN names ``reward_model``, since it brings torch.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.protocol import RewardItem
from services.reward_server.functions import UnscorableError

log = get_logger(__name__)


class RewardModel:
    """Scores answers in batches, in a thread of its own; on the GPU where there is one."""

    def __init__(self, name: str, *, batch_size: int, max_tokens: int) -> None:
        """Loads the model.

        Raises:
            ConfigurationError: it cannot be had, or has not exactly one logit.
        """
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=False)
        # What these raise depends on the hub client, the network and the files.
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigurationError(
                f"REWARD_MODEL {name!r} cannot be loaded as a sequence classification model: {lines[0][:300]}; check "
                f"the name and the network, or give a directory"
            ) from error
        if model.config.num_labels != 1:
            raise ConfigurationError(
                f"REWARD_MODEL {name!r} has {model.config.num_labels} logits; a reward model with one is needed"
            )
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # Models that find the last token by the padding id need to know which one it is.
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(self.device).eval()
        self._waiting: asyncio.Queue[tuple[list[int], asyncio.Future[float]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "reward-model")
        self._task: asyncio.Task[None] | None = None
        log.info("reward model loaded", model=name, device=str(self.device))

    def start(self) -> None:
        """Begins to serve; called in the event loop."""
        self._task = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        """Stops serving."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def score(self, item: RewardItem) -> float:
        """The logit of prompt and response.

        Raises:
            UnscorableError: the conversation is too long, or the model failed on its batch.
        """
        ids = self._encode(item)
        if len(ids) > self._max_tokens:
            raise UnscorableError(f"the conversation has {len(ids)} tokens; allowed are {self._max_tokens}")
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((ids, done))
        return await done

    def _encode(self, item: RewardItem) -> list[int]:
        if self._tokenizer.chat_template:
            turns = [{"role": "user", "content": item.prompt}, {"role": "assistant", "content": item.response}]
            text = self._tokenizer.apply_chat_template(turns, tokenize=False)
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids
        paired: list[int] = self._tokenizer(item.prompt, item.response)["input_ids"]
        return paired

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self._batch_size and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            try:
                scores = await loop.run_in_executor(self._thread, self._forward, [ids for ids, _ in batch])
            # Out of memory, or an input that the model cannot take: it costs this batch, which is told so.
            except RuntimeError as error:
                for _, done in batch:
                    if not done.done():
                        done.set_exception(UnscorableError(f"the reward model failed: {error}"))
                continue
            for (_, done), score in zip(batch, scores, strict=True):
                if not done.done():
                    done.set_result(score)

    @torch.inference_mode()
    def _forward(self, batch: list[list[int]]) -> list[float]:
        padded = self._tokenizer.pad({"input_ids": batch}, padding=True, return_tensors="pt").to(self.device)
        logits = self._model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits
        values: list[float] = logits[:, 0].float().tolist()
        return values
