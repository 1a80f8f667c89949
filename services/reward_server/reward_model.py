"""A neural reward model: a sequence classification model with one logit, batched over all waiting answers.

Imported only where REWARD_FN names ``reward_model``, because it imports torch.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from services.core import machine
from services.core.errors import ConfigurationError, first_line
from services.core.logs import get_logger
from services.protocol.rewards import RewardItem, RewardStatus
from services.reward_server.pool import Evaluation

log = get_logger(__name__)

BATCH_SIZE = 16
"""Answers that the model scores at once."""
MAX_TOKENS = 32_768
"""Longest conversation that is scored, where the model has as many positions: a batch of longer ones fills a GPU."""
_NOT_FINITE = Evaluation(None, RewardStatus.ERROR, "the reward model gave no finite number")


class RewardModel:
    """A model that scores answers in batches, in a thread; on the GPU where there is one."""

    def __init__(self, name: str) -> None:
        """Load the model ``name``, a hub name or directory; conversations have at most its positions as tokens.

        Raises:
            ConfigurationError: the model cannot be loaded, has more than one logit, or its tokenizer cannot pad.
        """
        machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
        torch.set_num_threads(machine.threads())
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForSequenceClassification.from_pretrained(name, trust_remote_code=False)
        # The error's type depends on the hub client, the network and the files.
        except Exception as error:
            raise ConfigurationError(
                f"REWARD_MODEL {name!r} cannot be loaded as a sequence classification model: {first_line(error)}; "
                f"check the name and the network, or give a directory"
            ) from error
        if model.config.num_labels != 1:
            raise ConfigurationError(
                f"REWARD_MODEL {name!r} has {model.config.num_labels} logits; a reward model with one is needed"
            )
        # Behind its last position a model fails, on a GPU with an error that ends the process's use of it.
        self._max_tokens = min(MAX_TOKENS, getattr(model.config, "max_position_embeddings", None) or MAX_TOKENS)
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        if self._tokenizer.pad_token_id is None:
            raise ConfigurationError(
                f"REWARD_MODEL {name!r} has neither padding nor end token; set pad_token in its tokenizer_config.json"
            )
        # Models that find the last token by the padding id need to know which id it is.
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(self._device).eval()
        self._waiting: asyncio.Queue[tuple[list[int], asyncio.Future[Evaluation]]] = asyncio.Queue()
        log.info("reward model loaded", model=name, device=str(self._device))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Score the waiting answers while the context is open."""
        task = asyncio.create_task(self._serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def score(self, item: RewardItem) -> Evaluation:
        """Return the logit of prompt and response; no value where they are too long or the model failed."""
        ids = self._encode(item)
        if len(ids) > self._max_tokens:
            reason = f"the conversation has {len(ids)} tokens; allowed are {self._max_tokens}"
            return Evaluation(None, RewardStatus.ERROR, reason)
        done: asyncio.Future[Evaluation] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((ids, done))
        return await done

    def _encode(self, item: RewardItem) -> list[int]:
        if not self._tokenizer.chat_template:
            return list(self._tokenizer(item.prompt, item.response)["input_ids"])
        turns = [{"role": "user", "content": item.prompt}, {"role": "assistant", "content": item.response}]
        text = self._tokenizer.apply_chat_template(turns, tokenize=False)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    async def _serve(self) -> None:
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < BATCH_SIZE and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            try:
                scores = await asyncio.to_thread(self._forward, [ids for ids, _ in batch])
                evaluations = [Evaluation(score) if math.isfinite(score) else _NOT_FINITE for score in scores]
            # Out of memory, or any error of a model over its input: only this batch has no reward.
            except Exception as error:  # noqa: BLE001
                failed = Evaluation(None, RewardStatus.ERROR, f"the reward model failed: {error}")
                evaluations = [failed] * len(batch)
            for (_, done), evaluation in zip(batch, evaluations, strict=True):
                if not done.done():
                    done.set_result(evaluation)

    @torch.inference_mode()
    def _forward(self, batch: list[list[int]]) -> list[float]:
        padded = self._tokenizer.pad({"input_ids": batch}, padding=True, return_tensors="pt").to(self._device)
        logits = self._model(input_ids=padded["input_ids"], attention_mask=padded["attention_mask"]).logits
        return list(logits[:, 0].float().tolist())
