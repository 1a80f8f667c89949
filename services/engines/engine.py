"""An engine, a process that generates tokens with the model, as launchers, trainer and clients see it.

``Engine`` is SGLang. Another engine is a subclass that overrides what differs, in the table of engines; the embedded
engine has the same routes. docs/architecture.md says more.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import orjson
from pydantic import ValidationError

from services.core.endpoints import Endpoint
from services.core.errors import DependencyLostError
from services.core.processes import Command
from services.engines import placement
from services.engines.placement import Config, EnginePlace, SizeFacts, Split
from services.engines.settings import EMBEDDED_MAX_TOTAL_TOKENS, EngineKind, RolloutSettings
from services.engines.sglang_command import check_installed, check_sglang_installed, listen_flags, sglang_command
from services.http.client import HttpClient
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason
from services.weights.policy_store import ADAPTER_NAME

Requests = Literal["finish", "continue", "abort"]
"""The fate of the requests in flight while an engine is held; see ``Engine.hold``."""
PauseMode = Literal["abort", "retract"]

ASLEEP = " asleep"
"""The end of the version that a sleeping engine reports. The engine's own process keeps this mark, so an engine that
restarts has lost it."""


class WorkerRefusedError(Exception):
    """A worker refused or failed a request; the message has its URL, the route and its answer."""


Check = Callable[["Engine"], Awaitable[None]]
"""Raises WorkerRefusedError if an engine has not got what it should."""


@dataclass(frozen=True)
class Delivery:
    """A policy version on its way to engines."""

    version: int
    load: Callable[[Engine], Awaitable[None]]
    """Has an engine, which generates nothing now, load the version."""
    is_adapter: bool = False
    """The version is a LoRA adapter, which engines compute with in addition to their weights."""
    check: Check | None = None
    """Proves what the engine has loaded before it generates again."""


def from_directory(version: int, path: Path | str, *, is_adapter: bool = False) -> Delivery:
    """Return a version that engines read from a directory, or by a name on the hub, of a model or a LoRA adapter."""
    if is_adapter:
        return Delivery(version, lambda engine: engine.load_adapter(path, version), is_adapter=True)
    return Delivery(version, lambda engine: engine.load_model(path, version))


class Engine(HttpClient):
    """An SGLang server at its URL. An async context manager.

    No request is retried: an engine that failed must catch up, which its launcher takes care of. Every coroutine raises
    WorkerRefusedError when the engine answers with an error, and DependencyLostError when it does not answer within
    ``timeout`` seconds.
    """

    kind: ClassVar[EngineKind] = EngineKind.SGLANG
    generate_path: ClassVar[str] = "/generate"
    """The route of completions, at the engine and at the router."""
    default_tokens: ClassVar[int] = 0
    """Tokens with keys and values where ENGINE_MAX_TOTAL_TOKENS is unset, or the context length if it is longer; 0 if
    the engine takes all memory that it finds."""
    keeps_weights_asleep: ClassVar[bool] = False
    """Its weights stay on the GPU while it sleeps."""
    continues_with_new_adapter: ClassVar[bool] = False
    """Requests for the LoRA adapter stay while another one takes its place."""
    hashes_checkpoint: ClassVar[bool] = False
    """Its checksums are the digests of the checkpoint's tensors, by their names there."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float) -> None:
        super().__init__(url, token=token, service="worker", timeout=timeout)
        self.gpus: tuple[str, ...] = ()
        """The GPU of each tensor-parallel rank, as CUDA_VISIBLE_DEVICES names it. Its launcher knows them; empty where
        there are none, or several for a rank."""
        self.nccl: str | None = None
        """The version of NCCL with which it joins broadcast groups, as far as its launcher knows it."""

    # The launcher's part: how many engines a node has, and how one is started and watched.

    @classmethod
    def check_installed(cls, settings: RolloutSettings, n_gpus: int) -> None:
        """Check that this node has the engine's packages, and with GPUs the tools with which it compiles kernels.

        Raises:
            ConfigurationError: a package or a tool is not installed.
        """
        check_sglang_installed(settings.sglang_python, on_gpus=n_gpus > 0)

    @classmethod
    def python(cls, settings: RolloutSettings) -> str | None:
        """Return the interpreter of the engine's process; None is the launcher's own."""
        return settings.sglang_python

    @classmethod
    def check_sizes(cls, settings: RolloutSettings, n_gpus: int, config: Config | None) -> int:
        """Check the parallel sizes of the settings; return the most engines that a node can have with them.

        Args:
            settings: the rollout node's settings.
            n_gpus: GPUs of the node, at least one.
            config: the model's configuration; None if it is not known.

        Raises:
            ConfigurationError: a size divides the GPUs or the model's attention heads with a remainder.
        """
        placement.check_sizes(settings, n_gpus, config)
        return max(1, n_gpus // (settings.sglang_tp_size or 1))

    @classmethod
    def split(cls, settings: RolloutSettings, n_gpus: int, ask: Callable[[], SizeFacts]) -> Split:
        """Return the engines of a node with ``n_gpus`` GPUs; ``ask`` returns the sizes of model and GPUs.

        Without GPUs, such as for tests, that is one engine with the tensor parallel size of the settings.

        Raises:
            ConfigurationError: an engine needs more GPUs or memory than the node has.
        """
        return placement.split_node(settings, n_gpus, ask)

    @classmethod
    def command(cls, settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> Command:
        """Return the command of an engine, which listens on ``address`` and sees the GPUs of its place only."""
        return sglang_command(settings, address, place)

    async def scheduler_answers(self, seconds: float) -> bool:
        """Return whether the scheduler behind /health can generate, or is paused.

        SGLang's HTTP process answers /health by itself, also when the scheduler or its GPU hangs.

        An engine that loads weights need not answer within ``seconds``.
        """
        # A paused engine keeps the token waiting, but its scheduler describes its state.
        for path, limit in (("/health_generate", seconds), ("/server_info", seconds / 6)):
            with contextlib.suppress(DependencyLostError):
                if (await self.send_once("GET", path, seconds=limit)).status_code == HTTPStatus.OK:
                    return True
        return False

    # The clients' part: a request for completions and its answer, the same at the router.

    @classmethod
    def generate_body(
        cls,
        input_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        lora_path: str | None = None,
        rid: str | None = None,
    ) -> dict[str, Any]:
        """Return the body of a request for completions with log-probabilities, for ``generate_path``.

        Args:
            input_ids: token ids of the whole prompt.
            sampling: the fields of ``SamplingParams``, ``n`` and ``sampling_seed``.
            lora_path: name of the LoRA adapter to generate with; None: the model alone.
            rid: the request's id.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": dict(sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            "return_text_in_logprobs": False,
        }
        options = {"lora_path": lora_path, "rid": rid}
        return body | {name: value for name, value in options.items() if value}

    @classmethod
    def read_completions(cls, url: str, reply: bytes) -> list[TokenSequence]:
        """Return the completions of ``url``'s reply, with a log-probability and a policy version for each token.

        The reply is one record or a list of records.

        Raises:
            DependencyLostError: the reply is something else.
        """
        try:
            body = orjson.loads(reply)
            return [_completion(record) for record in (body if isinstance(body, list) else [body])]
        except (KeyError, TypeError, ValueError, OverflowError, ValidationError) as error:
            raise DependencyLostError(f"{url} answered with something else than completions: {error}") from error

    async def rescore(self, token_ids: Sequence[int], lora_path: str | None = None) -> list[float]:
        """Return the log-probabilities of ``token_ids[1:]``, each given the tokens before it.

        ``lora_path`` names the LoRA adapter to compute with; None: the model alone.

        Raises:
            WorkerRefusedError: it gave none, or not all, as an engine does that ends or aborts the request.
            DependencyLostError: it did not answer.
        """
        body = self.score_body({"input_ids": list(token_ids)}, 1, lora_path=lora_path)
        scores: list[float] = []
        with contextlib.suppress(KeyError, IndexError, TypeError):
            scores = self.read_scores(await self._ask("POST", self.generate_path, body))[1]
        if len(scores) != len(token_ids) - 1:
            given = f"{len(scores)} of {len(token_ids) - 1} input logprobs"
            raise WorkerRefusedError(f"worker {self.url}{self.generate_path} answered with {given}")
        return scores

    @classmethod
    def score_body(cls, prompt: Mapping[str, Any], start: int, *, lora_path: str | None = None) -> dict[str, Any]:
        """Return the body of a request, for ``generate_path``, for log-probabilities of a prompt's tokens.

        SGLang computes the logits from the token before ``start`` on, and has a cache for the others.

        Args:
            prompt: ``{"input_ids": [...]}`` or ``{"text": ...}``.
            start: the first token whose log-probability is wanted, at least 1.
            lora_path: name of the LoRA adapter to compute with; None: the model alone.
        """
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        body = cls.generate_body([], sampling, lora_path=lora_path) | {"logprob_start_len": start - 1}
        del body["input_ids"]
        return body | dict(prompt)

    @classmethod
    def read_scores(cls, reply: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Return a reply's token ids from ``start - 1`` on, and the log-probabilities of those from ``start`` on.

        Raises:
            KeyError, IndexError, TypeError, ValueError: the reply is something else.
        """
        entries = reply["meta_info"]["input_token_logprobs"]
        # The first token has no logprob: its logits are those of the token before, which is not computed.
        return [int(token) for _, token, *_ in entries], [float(logprob) for logprob, *_ in entries[1:]]

    # The part of whoever changes the policy version: the trainer, with every registered worker at once, and a launcher,
    # with an engine of its own that starts or has missed a version.

    async def serve(self, delivery: Delivery, requests: Requests, seconds: float | None = None) -> float:
        """Have the engine serve a version; return the seconds for which it generated nothing.

        After a failure it stays paused, because its weights may be of two versions. It must leave the routing then.

        Args:
            delivery: the version to serve.
            requests: the fate of the requests in flight.
            seconds: longest time for the pause to begin, and again for the load.

        Raises:
            WorkerRefusedError: the engine refused a step, or serves another version afterwards.
            DependencyLostError: the engine did not answer.
            TimeoutError: the steps took longer than ``seconds``.
        """
        started = time.perf_counter()
        async with asyncio.timeout(seconds):
            await self.hold(requests, for_adapter=delivery.is_adapter)
        async with asyncio.timeout(seconds):
            await delivery.load(self)
            return await self.resume_with(delivery.version, started, delivery.check)

    async def resume_with(self, version: int, started: float, check: Check | None = None) -> float:
        """Generate again with a version that is loaded; return the seconds since ``started``, when the pause began.

        Raises:
            WorkerRefusedError: the engine refused a step, serves another version, or fails the ``check``.
            DependencyLostError: the engine did not answer.
        """
        if check is not None:
            await check(self)
        await self.resume()
        pause = time.perf_counter() - started
        served = await self.version()
        if served != version:
            raise WorkerRefusedError(f"worker {self.url} loaded policy version {version} but says it serves {served}")
        return pause

    async def version(self) -> int | None:
        """Return the policy version that the engine serves, or will serve once it wakes; None for other names.

        The version changes together with the weights, so that each token is of the version that the engine reports.
        """
        text = (await self._version_text()).removesuffix(ASLEEP)
        return int(text) if text.isdecimal() else None

    async def hold(self, requests: Requests, *, for_adapter: bool = False) -> None:
        """Stop generation for a change of weights. A sleeping engine wakes first.

        Requests in flight end first (``finish``), continue after ``resume`` (``continue``), or are aborted (``abort``),
        as they must be where the weights may be of two versions; their clients send aborted ones again, elsewhere.

        Continued requests are computed anew up to where they stopped, so that later tokens depend on the new weights
        alone. An engine may abort requests instead of continuing them before a change of the LoRA adapter
        (``for_adapter``).

        Without a hold, an update starts when the requests have ended, but SGLang then fails to flush its cache if new
        requests have come. SGLang unloads an adapter only when no request refers to it.
        """
        await self.wake()
        if requests == "finish":
            await self.drain()
            # Requests that came since are aborted, and their client sends them again.
            await self.pause("abort")
        elif requests == "abort":
            # They are retracted first, because SGLang never aborts requests that are paused in place.
            await self.pause("retract")
            await self.pause("abort")
            # SGLang refuses an update while a broadcast is open, which a trainer that died may have left.
            with contextlib.suppress(WorkerRefusedError):
                await self.end_update()
        elif for_adapter and not self.continues_with_new_adapter:
            await self.pause("abort")
        else:
            await self.pause("retract")

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation: ``retract`` keeps requests without their caches, ``abort`` ends requests."""
        await self._ask("POST", "/pause_generation", {"mode": mode})

    async def drain(self) -> None:
        """Wait until the requests in flight have ended; new requests wait meanwhile."""
        # No route does this, but an update waits for the requests, and an update without tensors changes nothing.
        await self.begin_update()
        await self.end_update()

    async def resume(self) -> None:
        """Continue to generate."""
        await self._ask("POST", "/continue_generation", {})

    async def load_model(self, path: Path | str, version: int) -> None:
        """Load a model directory, or a model of the hub, as ``version``; see ``hold``.

        Requests in flight end first, unless generation is paused.
        """
        await self._ask("POST", "/update_weights_from_disk", _update(version, model_path=str(path)))

    async def load_adapter(self, path: Path | str, version: int) -> None:
        """Load the LoRA adapter in a directory as ``version``, in place of the one before; see ``hold``."""
        # The generation is paused: for a request that names an unloaded adapter, SGLang would load the old one again.
        if await self.adapter_path() is not None:
            await self._ask("POST", "/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
        await self._ask("POST", "/load_lora_adapter", {"lora_name": ADAPTER_NAME, "lora_path": str(path)})
        if (loaded := await self.adapter_path()) != str(path):
            raise WorkerRefusedError(f"worker {self.url} lists the adapter {loaded} after that of version {version}")
        await self._set_version(str(version))

    async def adapter_path(self) -> str | None:
        """Return the directory of the LoRA adapter that the engine lists; None when it has none."""
        models = (await self._ask("GET", "/v1/models")).get("data", [])
        return next((str(model.get("root")) for model in models if model.get("id") == ADAPTER_NAME), None)

    async def tensor_parallel_size(self) -> int:
        """Return the number of ranks that the engine is spread over; each joins a broadcast group by itself."""
        return int((await self._ask("GET", "/server_info")).get("tp_size", 1))

    async def join_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a broadcast group whose rank 0 is the trainer; wait until all its members have joined."""
        payload = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._ask("POST", "/init_weights_update_group", payload)

    async def leave_group(self, group_name: str) -> None:
        """Leave a broadcast group."""
        await self._ask("POST", "/destroy_weights_update_group", {"group_name": group_name})

    async def begin_update(self) -> None:
        """Begin a weight update by broadcast or a shared GPU. Requests in flight end first, except in a pause."""
        await self._ask("POST", "/begin_weight_update", {"selector": "all"})

    async def receive_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: int | None,
        *,
        is_flattened: bool = False,
    ) -> None:
        """Receive tensors by broadcast in the order of ``names``; return when all have come.

        An update of several calls passes its ``version`` with the last call and None with the others. The tensors come
        one by one, or with ``is_flattened`` in one broadcast of all their bytes.
        """
        update = _update(
            version,
            names=list(names),
            dtypes=list(dtypes),
            shapes=[list(shape) for shape in shapes],
            group_name=group_name,
            load_format="flattened_bucket" if is_flattened else None,
        )
        await self._ask("POST", "/update_weights_from_distributed", update)

    async def receive_shared(self, buckets: Sequence[str], version: int | None) -> None:
        """Copy tensors out of the memory of GPUs that the engine shares with the trainer.

        Args:
            buckets: the text of ``pack_bucket`` for each tensor-parallel rank.
            version: the policy version with the last call of an update, None with the others.
        """
        bucket = {"serialized_named_tensors": list(buckets), "load_format": "flattened_bucket"}
        await self._ask("POST", "/update_weights_from_tensor", _update(version, **bucket))

    async def end_update(self) -> None:
        """End a weight update by broadcast or a shared GPU."""
        await self._ask("POST", "/end_weight_update", {})

    async def checksums(self) -> dict[str, dict[str, str]]:
        """Return the checksums of the tensors that the engine computes with, by rank and name.

        A rank is named by its places in the parallel groups. SGLang's tensors are those of its own layout, whole or a
        rank's shard, with adapters left out.
        """
        ranks = (await self._ask("POST", "/weights_checker", {"action": "checksum"})).get("ranks")
        if not isinstance(ranks, list) or not ranks:
            raise WorkerRefusedError(f"worker {self.url}/weights_checker answered without checksums")
        places = ("tp_rank", "dp_rank", "pp_rank")
        by_rank = {}
        for number, rank in enumerate(ranks):
            info = rank.get("parallelism_info") or {}
            name = " ".join(f"{place} {info[place]}" for place in places if place in info) or f"rank {number}"
            by_rank[name] = dict(rank["checksums"])
        return by_rank

    async def is_quantized(self) -> bool:
        """Return whether the engine computes in a type that not every change of a weight reaches."""
        return (await self._ask("GET", "/server_info")).get("quantization") is not None

    # The part of ENGINE_SLEEPS.

    async def is_asleep(self) -> bool:
        """Return whether the engine has given its memory away; see ``sleep``."""
        return (await self._version_text()).endswith(ASLEEP)

    async def sleep(self) -> None:
        """Have the engine give the GPU's memory away until ``wake``. Requests are aborted, and new ones wait."""
        if await self.is_asleep():
            return
        version = await self._version_text()
        # SGLang's scheduler dies of a release while requests run, and of a wake without a sleep before.
        await self.pause("retract")
        await self.pause("abort")
        await self._set_version(version + ASLEEP)
        await self._ask("POST", "/release_memory_occupation", {})

    async def wake(self) -> None:
        """Have a sleeping engine take its memory back; generation stays paused. Nothing happens to others."""
        version = await self._version_text()
        if version.endswith(ASLEEP):
            await self._ask("POST", "/resume_memory_occupation", {})
            await self._set_version(version.removesuffix(ASLEEP))

    # The part of PROFILE_STEPS.

    async def begin_profile(self, directory: Path) -> None:
        """Begin to record what processor and GPU do, for traces in a directory of its own in ``directory``.

        Each tensor-parallel rank writes one.
        """
        name = "engine-" + re.sub(r"[^0-9A-Za-z.]+", "-", self.url.split("//")[-1])
        await self._ask("POST", "/start_profile", {"output_dir": str(directory / name)})

    async def end_profile(self) -> None:
        """End the recording, and write the traces."""
        await self._ask("POST", "/stop_profile")

    async def _version_text(self) -> str:
        return str((await self._ask("GET", "/model_info")).get("weight_version"))

    async def _set_version(self, text: str) -> None:
        await self._ask("POST", "/update_weight_version", {"new_version": text, "abort_all_requests": False})

    async def _ask(self, method: str, path: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        response = await self.send_once(method, path, payload, seconds=self.timeout)
        body: Any = None
        # Some routes answer with a line of text.
        with contextlib.suppress(ValueError):
            body = response.json()
        reply: dict[str, Any] = body if isinstance(body, dict) else {}
        if response.status_code >= 400 or reply.get("success") is False:
            raise WorkerRefusedError(f"worker {self.url}{path}: {response.status_code} {response.text[:500]}")
        return reply


class Embedded(Engine):
    """The embedded engine, with the routes of SGLang, one process for each node.

    It reads its settings from the environment.
    """

    kind = EngineKind.EMBEDDED
    default_tokens = EMBEDDED_MAX_TOTAL_TOKENS
    keeps_weights_asleep = True
    continues_with_new_adapter = True
    hashes_checkpoint = True

    @classmethod
    def check_installed(cls, settings: RolloutSettings, n_gpus: int) -> None:
        """See Engine."""
        check_installed("torch", "rollout")
        check_installed("transformers", "rollout")

    @classmethod
    def python(cls, settings: RolloutSettings) -> None:
        """See Engine."""

    @classmethod
    def check_sizes(cls, settings: RolloutSettings, n_gpus: int, config: Config | None) -> int:
        """See Engine; there are no sizes."""
        return 1

    @classmethod
    def split(cls, settings: RolloutSettings, n_gpus: int, ask: Callable[[], SizeFacts]) -> Split:
        """See Engine."""
        return Split(engines=1, tensor_parallel=1, gpus_each=0)

    @classmethod
    def command(cls, settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> Command:
        """See Engine."""
        return Command(place.name, sys.executable, "services.embedded_engine", listen_flags(address))

    async def scheduler_answers(self, seconds: float) -> bool:
        """See Engine; its /health says all."""
        return True


ENGINES: dict[EngineKind, type[Engine]] = {EngineKind.SGLANG: Engine, EngineKind.EMBEDDED: Embedded}

ROUTED = Engine
"""The engine whose requests and answers clients use, because the router forwards them unchanged: all engines behind it
share them. It is also the engine of a worker that was registered without a label, by somebody else than a launcher."""


def choose_engine(settings: RolloutSettings, n_gpus: int) -> type[Engine]:
    """Return the engine of ROLLOUT_ENGINE for a node with ``n_gpus`` GPUs."""
    kind = settings.rollout_engine
    if kind is EngineKind.AUTO:
        kind = EngineKind.SGLANG if n_gpus > 0 else EngineKind.EMBEDDED
    return ENGINES[kind]


def _update(version: int | None, **weights: Any) -> dict[str, Any]:
    """Return the body of a call that changes weights, after which the engine serves ``version`` unless it is None."""
    return {**weights, "flush_cache": True, "weight_version": None if version is None else str(version)}


def _completion(record: dict[str, Any]) -> TokenSequence:
    meta = record["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    ids = [pair[1] for pair in pairs]
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]
    place = 0
    for span in spans:
        if span["start"] != place or span["end"] < place:
            raise ValueError(f"weight_versions must cover the completion without gaps, broken at token {place}")
        place = span["end"]
    return TokenSequence(
        completion=record.get("text") or "",
        completion_ids=ids,
        logprobs=[pair[0] for pair in pairs],
        policy_versions=np.repeat(
            np.array([int(span["version"]) for span in spans], np.int64),
            [span["end"] - span["start"] for span in spans],
        ),
        finish_reason=FinishReason(meta["finish_reason"]["type"]),
    )
