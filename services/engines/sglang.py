"""SGLang, and the embedded engine, which has the same routes."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import orjson
from pydantic import ValidationError

from services.core import machine
from services.core.child import API_KEY_FROM_TOKEN
from services.core.endpoints import Endpoint, exempt_from_proxies, num_nodes
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.logs import get_logger
from services.core.machine import ComputeType
from services.core.processes import Command
from services.engines import placement
from services.engines.engine import Engine, Requests, WorkerRefusedError, check_installed, listen_flags
from services.engines.placement import EnginePlace, Split
from services.engines.settings import EMBEDDED_MAX_TOTAL_TOKENS, EngineKind, RolloutSettings
from services.engines.shape import Config, SizeFacts
from services.engines.versions import FIRST_VERSION
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason
from services.weights.policy_store import ADAPTER_NAME

log = get_logger(__name__)

PauseMode = Literal["abort", "retract", "in_place"]

ASLEEP = " asleep"
"""The end of the version that a sleeping engine reports. The engine's own process keeps this mark, so an engine that
restarts has lost it."""

MAX_QUEUED_REQUESTS = 4096
"""Requests that wait in SGLang before it answers 503; as many as wait in the embedded engine."""

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers that the trainer adapts, as SGLang calls them in Llama, Qwen2 and Qwen3."""
LORAS_PER_BATCH = 2
"""The trained adapter, and requests for the model alone, which count as one."""

NCCL_VARIABLES = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Variables of SGLang's processes unless the user has set them. When a broadcast breaks, torch ends an engine that
waits in it, because nothing else frees its GPU; without this variable it does so a minute later, after a dump that
nobody reads. TORCH_NCCL_ASYNC_ERROR_HANDLING=0 would leave the engine hanging until its launcher kills it after ten
minutes, and 2 would let it serve half-received weights as the new version."""

SGLANG_GRAPH_SEQUENCES, MOST_GRAPH_SEQUENCES = 256, 1024
"""Sequences up to which SGLang has CUDA graphs by itself (H100 and H200, tensor parallel size below 4), and up to which
it gets them here: each further one takes 2 MB."""

FLOAT32_HEAD, NO_FLOAT32_HEAD = "--enable-fp32-lm-head", "--no-enable-fp32-lm-head"
"""SGLang's flag, and a launcher's own one to leave it out, because SGLang has no flag for that."""


class SGLang(Engine):
    """An SGLang server."""

    kind = EngineKind.SGLANG
    generate_path = "/generate"
    continues_with_new_adapter: ClassVar[bool] = False
    """Requests for the LoRA adapter stay while another one takes its place."""

    @classmethod
    def check_installed(cls, settings: RolloutSettings) -> None:
        """See Engine."""
        check_installed("sglang", "sglang", settings.sglang_python)
        script = "from importlib.metadata import version; print(version('nvidia-nccl-cu13'))"
        line = [settings.sglang_python or sys.executable, "-c", script]
        found = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        if found.returncode == 0:
            log.info("SGLang's NCCL; broadcasts need the same version in the trainer", version=found.stdout.strip())

    @classmethod
    def check_sizes(cls, settings: RolloutSettings, n_gpus: int, config: Config | None) -> int:
        """See Engine."""
        placement.check_sizes(settings, n_gpus, config)
        return max(1, n_gpus // (settings.sglang_tp_size or 1))

    @classmethod
    def split(cls, settings: RolloutSettings, n_gpus: int, ask: Callable[[], SizeFacts]) -> Split:
        """See Engine; without GPUs, such as for tests, one engine with the tensor parallel size of the settings."""
        return placement.split_node(settings, n_gpus, ask)

    @classmethod
    def command(cls, settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> Command:
        """See Engine."""
        # Otherwise SGLang generates a token for each check of its /health, which takes a second.
        environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        environment |= {name: value for name, value in NCCL_VARIABLES.items() if name not in os.environ}
        # SGLang's first requests go to its own server; a proxy stays for what it fetches from the hub.
        environment |= exempt_from_proxies(address.host)
        if place.devices:
            environment[machine.VISIBLE_GPUS_VARIABLE] = ",".join(place.devices)
        python = settings.sglang_python or sys.executable
        return Command(place.name, python, "sglang.launch_server", _flags(settings, address, place), environment)

    async def scheduler_answers(self, seconds: float) -> bool:
        """See Engine. SGLang's HTTP process answers /health by itself, also when the scheduler or its GPU hangs."""
        # A paused engine keeps the token waiting, but its scheduler describes its state.
        for path, limit in (("/health_generate", seconds), ("/server_info", seconds / 6)):
            with contextlib.suppress(DependencyLostError):
                if (await self.send_once("GET", path, seconds=limit)).status_code == HTTPStatus.OK:
                    return True
        return False

    @classmethod
    def generate_body(
        cls,
        input_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        lora_path: str | None = None,
        rid: str | None = None,
    ) -> dict[str, Any]:
        """See Engine."""
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
        """See Engine; the reply is one record or a list of records."""
        try:
            body = orjson.loads(reply)
            return [_completion(record) for record in (body if isinstance(body, list) else [body])]
        except (KeyError, TypeError, ValueError, OverflowError, ValidationError) as error:
            raise DependencyLostError(f"{url} answered with something else than completions: {error}") from error

    async def rescore(self, token_ids: Sequence[int], lora_path: str | None = None) -> list[float]:
        """See Engine."""
        body = self.score_body({"input_ids": list(token_ids)}, 1, lora_path=lora_path)
        try:
            return self.read_scores(await self._ask("POST", self.generate_path, body))[1]
        except (KeyError, IndexError, TypeError) as error:
            raise WorkerRefusedError(f"worker {self.url}/generate answered without input logprobs") from error

    @classmethod
    def score_body(cls, prompt: Mapping[str, Any], start: int, *, lora_path: str | None = None) -> dict[str, Any]:
        """See Engine. SGLang computes the logits from the token before ``start`` on, and has a cache for the others."""
        sampling = {"max_new_tokens": 0, "temperature": 1.0}
        body = cls.generate_body([], sampling, lora_path=lora_path) | {"logprob_start_len": start - 1}
        del body["input_ids"]
        return body | dict(prompt)

    @classmethod
    def read_scores(cls, reply: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """See Engine."""
        entries = reply["meta_info"]["input_token_logprobs"]
        # The first token has no logprob: its logits are those of the token before, which is not computed.
        return [int(token) for _, token, *_ in entries], [float(logprob) for logprob, *_ in entries[1:]]

    async def version(self) -> int | None:
        """See Engine."""
        text = (await self._version_text()).removesuffix(ASLEEP)
        return int(text) if text.isdecimal() else None

    async def hold(self, requests: Requests, *, for_adapter: bool = False) -> None:
        """See Engine.

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
        """Pause generation.

        ``in_place`` keeps requests and their caches, ``retract`` keeps requests only, ``abort`` ends requests.
        """
        await self._ask("POST", "/pause_generation", {"mode": mode})

    async def drain(self) -> None:
        """Wait until the requests in flight have ended; new requests wait meanwhile."""
        # No route does this, but an update waits for the requests, and an update without tensors changes nothing.
        await self.begin_update()
        await self.end_update()

    async def resume(self) -> None:
        """See Engine."""
        await self._ask("POST", "/continue_generation", {})

    async def load_model(self, path: Path | str, version: int) -> None:
        """See Engine. Requests in flight end first, unless generation is paused."""
        payload = {"model_path": str(path), "weight_version": str(version), "flush_cache": True}
        await self._ask("POST", "/update_weights_from_disk", payload)

    async def load_adapter(self, path: Path | str, version: int) -> None:
        """See Engine."""
        await self._replace_adapter("/load_lora_adapter", {"lora_path": str(path)}, version)

    async def load_adapter_from_tensors(self, config: Mapping[str, Any], tensors: bytes, version: int) -> None:
        """See Engine."""
        # Each tensor-parallel rank reads a copy of its own.
        copies = [base64.b64encode(tensors).decode()] * await self.tensor_parallel_size()
        payload = {"config_dict": dict(config), "serialized_named_tensors": copies}
        await self._replace_adapter("/load_lora_adapter_from_tensors", payload, version)

    async def adapter_path(self) -> str | None:
        """Return the directory of the LoRA adapter that the engine lists; None when it has none."""
        models = (await self._ask("GET", "/v1/models")).get("data", [])
        return next((str(model.get("root")) for model in models if model.get("id") == ADAPTER_NAME), None)

    async def tensor_parallel_size(self) -> int:
        """See Engine."""
        return int((await self._ask("GET", "/server_info")).get("tp_size", 1))

    async def nccl_version(self) -> str | None:
        """See Engine; SGLang does not report it, the embedded engine does."""
        return (await self._ask("GET", "/server_info")).get("nccl_version")

    async def join_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """See Engine."""
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
        """See Engine."""
        await self._ask("POST", "/destroy_weights_update_group", {"group_name": group_name})

    async def begin_update(self) -> None:
        """See Engine."""
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
        """See Engine."""
        payload = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": True,
            "weight_version": None if version is None else str(version),
            "load_format": "flattened_bucket" if is_flattened else None,
        }
        await self._ask("POST", "/update_weights_from_distributed", payload)

    async def receive_shared(self, buckets: Sequence[bytes], version: int | None) -> None:
        """See Engine."""
        payload = {
            "serialized_named_tensors": [base64.b64encode(bucket).decode() for bucket in buckets],
            "load_format": "flattened_bucket",
            "flush_cache": True,
            "weight_version": None if version is None else str(version),
        }
        await self._ask("POST", "/update_weights_from_tensor", payload)

    async def end_update(self) -> None:
        """See Engine."""
        await self._ask("POST", "/end_weight_update", {})

    async def is_asleep(self) -> bool:
        """See Engine."""
        return (await self._version_text()).endswith(ASLEEP)

    async def sleep(self) -> None:
        """See Engine."""
        if await self.is_asleep():
            return
        version = await self._version_text()
        # SGLang's scheduler dies of a release while requests run, and of a wake without a sleep before.
        await self.pause("retract")
        await self.pause("abort")
        await self._set_version(version + ASLEEP)
        await self._ask("POST", "/release_memory_occupation", {})

    async def wake(self) -> None:
        """See Engine."""
        version = await self._version_text()
        if version.endswith(ASLEEP):
            await self._ask("POST", "/resume_memory_occupation", {})
            await self._set_version(version.removesuffix(ASLEEP))

    async def begin_profile(self, directory: Path) -> None:
        """See Engine; each tensor-parallel rank writes a trace."""
        name = "engine-" + re.sub(r"[^0-9A-Za-z.]+", "-", self.url.split("//")[-1])
        await self._ask("POST", "/start_profile", {"output_dir": str(directory / name)})

    async def end_profile(self) -> None:
        """See Engine."""
        await self._ask("POST", "/stop_profile")

    async def _replace_adapter(self, route: str, payload: dict[str, Any], version: int) -> None:
        # The generation is paused: for a request that names an unloaded adapter, SGLang would load the old one again.
        if await self.adapter_path() is not None:
            await self._ask("POST", "/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
        await self._ask("POST", route, {"lora_name": ADAPTER_NAME, **payload})
        loaded = await self.adapter_path()
        if loaded is None or loaded != payload.get("lora_path", loaded):
            raise WorkerRefusedError(f"worker {self.url} lists the adapter {loaded} after {route} of version {version}")
        await self._set_version(str(version))

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


class Embedded(SGLang):
    """The embedded engine, one process for each node. It reads its settings from the environment."""

    kind = EngineKind.EMBEDDED
    default_tokens = EMBEDDED_MAX_TOTAL_TOKENS
    keeps_weights_asleep = True
    continues_with_new_adapter = True

    @classmethod
    def check_installed(cls, settings: RolloutSettings) -> None:
        """See Engine."""
        check_installed("torch", "rollout")
        check_installed("transformers", "rollout")

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


def _flags(settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> list[str]:
    flags = ["--model-path", settings.model_name, *listen_flags(address)]
    flags += ["--weight-version", str(FIRST_VERSION), "--enable-metrics", API_KEY_FROM_TOKEN]
    flags += ["--tp-size", str(place.tensor_parallel)]
    flags += ["--max-queued-requests", str(MAX_QUEUED_REQUESTS)]
    if settings.engine_dtype is not ComputeType.AUTO:
        flags += ["--dtype", settings.engine_dtype.value]
    for flag, value in (
        ("--context-length", settings.engine_context_length),
        ("--max-running-requests", settings.engine_max_running_requests),
        ("--max-total-tokens", settings.engine_max_total_tokens),
    ):
        if value is not None:
            flags += [flag, str(value)]
    if settings.lora_rank:
        flags += ["--enable-lora", "--max-lora-rank", str(settings.lora_rank)]
        flags += ["--lora-target-modules", *LORA_TARGETS, "--max-loras-per-batch", str(LORAS_PER_BATCH)]
    # The memory saver is for GPUs only; without it, SGLang's routes do the same and free nothing.
    if settings.engine_sleeps and place.devices:
        _check_allocator()
        flags += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    if settings.engine_deterministic:
        flags += ["--enable-deterministic-inference"]
    extra = shlex.split(settings.sglang_extra_flags)
    is_quantized = any(flag.split("=")[0] == "--quantization" for flag in extra)
    if place.devices and not is_quantized and NO_FLOAT32_HEAD not in extra:
        flags += [FLOAT32_HEAD]
    if place.devices and (most := _graph_sequences(settings, place)) > SGLANG_GRAPH_SEQUENCES:
        flags += ["--cuda-graph-max-bs-decode", str(most)]
    # Last, because the last of several values wins.
    return flags + [flag for flag in extra if flag != NO_FLOAT32_HEAD]


def _check_allocator() -> None:
    """Refuse expandable segments, whose memory SGLang's memory saver cannot give back while the engine sleeps."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            raise ConfigurationError(
                f"{name} has expandable_segments:True, with which an engine keeps its memory while it sleeps "
                "(ENGINE_SLEEPS); remove it from rollout-server's variables"
            )


def _graph_sequences(settings: RolloutSettings, place: EnginePlace) -> int:
    """Return the sequences of a step that an engine gets, limited by its settings; 0 if BATCH_SIZE is not known."""
    sequences = (settings.batch_size or 0) * settings.group_size
    share = -(-sequences // (num_nodes() * place.engines))
    return min(share, MOST_GRAPH_SEQUENCES, settings.engine_max_running_requests or MOST_GRAPH_SEQUENCES)


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
