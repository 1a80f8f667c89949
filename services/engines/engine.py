"""Clients for administering the rollout tier: the router's list of workers, and a worker's weight updates.

The router forwards no weight updates, so each worker is called directly. The routes are SGLang's; the embedded engine
has the same.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from services.core.endpoints import Endpoint, Task, endpoint
from services.core.errors import DependencyLostError
from services.http.client import HttpClient, RequestRefusedError
from services.weights.policy_store import ADAPTER_NAME

ROUTER_SECONDS = 30.0

PauseMode = Literal["abort", "retract", "in_place"]

Requests = Literal["finish", "continue", "abort"]
"""The fate of the requests in flight while an engine is held; see ``WorkerAdmin.hold``."""

ASLEEP = " asleep"
"""The end of the version that a sleeping worker reports. The engine's own process keeps this mark, so an engine that
restarts has lost it."""


class WorkerRefusedError(Exception):
    """A worker refused or failed a request; the message has its URL, the route and its answer."""


class _Worker(BaseModel):
    """The fields that we read of a worker in the router's list."""

    id: str
    url: str
    is_healthy: bool


class _Workers(BaseModel):
    """The reply of the router's GET /workers."""

    workers: list[_Worker]


class RouterAdmin(HttpClient):
    """The router's list of workers. An async context manager."""

    def __init__(self, address: Endpoint | None = None, token: str | None = None) -> None:
        url = (address or endpoint(Task.ROLLOUT_SERVER)).url
        super().__init__(url, token=token, service="router", timeout=10, deadline=ROUTER_SECONDS)
        self._token = token

    async def workers(self) -> list[str]:
        """Return the URLs of the registered workers, sorted."""
        return sorted(worker.url for worker in await self._workers())

    async def registrations(self) -> dict[str, str]:
        """Return the router's id of each registered worker, by its URL; a worker that registers again gets a new id."""
        return {worker.url: worker.id for worker in await self._workers()}

    async def healthy_workers(self) -> list[str]:
        """Return the URLs of the workers that the router sends requests to, sorted."""
        return sorted(worker.url for worker in await self._workers() if worker.is_healthy)

    async def add(self, url: str) -> None:
        """Register a worker; the router asks it for its model and then routes to it."""
        # The router's own requests to a worker carry the token only when it is given here.
        key = {"api_key": self._token} if self._token else {}
        await self.request("POST", "/workers", {"url": url, **key})

    async def remove(self, url: str) -> None:
        """Take a worker out of the routing; an unregistered worker is no error."""
        for worker in await self._workers():
            if worker.url == url:
                try:
                    await self.request("DELETE", f"/workers/{worker.id}")
                except RequestRefusedError as error:
                    if error.status != 404:
                        raise

    async def _workers(self) -> list[_Worker]:
        return (await self.call("GET", "/workers", _Workers)).workers


class WorkerAdmin(HttpClient):
    """One rollout worker. An async context manager.

    No request is retried: a worker that failed must catch up, which its launcher takes care of. Every method raises
    WorkerRefusedError when the worker answers with an error, and DependencyLostError when it does not answer within
    ``timeout`` seconds.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float) -> None:
        super().__init__(url, token=token, service="worker", timeout=timeout)

    async def version(self) -> int | None:
        """Return the policy version that the worker serves, or will serve once it wakes; None if it is none of ours."""
        text = (await self._version_text()).removesuffix(ASLEEP)
        return int(text) if text.isdecimal() else None

    async def is_asleep(self) -> bool:
        """Return whether the worker has given its memory away; see ``sleep``."""
        return (await self._version_text()).endswith(ASLEEP)

    async def sleep(self) -> None:
        """Have the worker give the GPU's memory away until ``wake``. Requests are aborted, and new ones wait."""
        if await self.is_asleep():
            return
        version = await self._version_text()
        # SGLang's scheduler dies of a release while requests run, and of a wake without a sleep before.
        await self.pause("retract")
        await self.pause("abort")
        await self._set_version(version + ASLEEP)
        await self._ask("POST", "/release_memory_occupation", {})

    async def wake(self) -> None:
        """Have a sleeping worker take its memory back; generation stays paused. Nothing happens to others."""
        version = await self._version_text()
        if version.endswith(ASLEEP):
            await self._ask("POST", "/resume_memory_occupation", {})
            await self._set_version(version.removesuffix(ASLEEP))

    async def scheduler_answers(self, seconds: float) -> bool:
        """Return whether SGLang's scheduler generates a token within ``seconds``, or answers although it is paused.

        The scheduler of an engine that loads weights does neither.
        """
        # A paused engine keeps the token waiting, but its scheduler describes its state.
        for path, limit in (("/health_generate", seconds), ("/server_info", seconds / 6)):
            with contextlib.suppress(DependencyLostError):
                if (await self.send_once("GET", path, seconds=limit)).status_code == HTTPStatus.OK:
                    return True
        return False

    async def tensor_parallel_size(self) -> int:
        """Return the number of ranks that the worker is spread over; each joins a broadcast group by itself."""
        return int((await self._ask("GET", "/server_info")).get("tp_size", 1))

    async def nccl_version(self) -> str | None:
        """Return the worker's version of NCCL; None where it does not tell, as SGLang."""
        return (await self._ask("GET", "/server_info")).get("nccl_version")

    async def update_from_disk(self, path: Path | str, version: int, *, flush_cache: bool = True) -> None:
        """Load a model directory as ``version``. Requests in flight end first, unless generation is paused."""
        payload = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush_cache}
        await self._ask("POST", "/update_weights_from_disk", payload)

    async def load_adapter(self, path: Path | str, version: int) -> None:
        """Load the LoRA adapter in a directory as ``version``, in place of the one before; see ``hold``."""
        await self._replace_adapter("/load_lora_adapter", {"lora_path": str(path)}, version)

    async def load_adapter_from_tensors(self, config: Mapping[str, Any], tensors: bytes, version: int) -> None:
        """Load a LoRA adapter as ``version``, in place of the one before; see ``hold``.

        Args:
            config: PEFT's configuration of the adapter.
            tensors: the pickled dictionary of tensors by PEFT's names.
            version: the policy version.
        """
        # Each tensor-parallel rank reads a copy of its own.
        copies = [base64.b64encode(tensors).decode()] * await self.tensor_parallel_size()
        payload = {"config_dict": dict(config), "serialized_named_tensors": copies}
        await self._replace_adapter("/load_lora_adapter_from_tensors", payload, version)

    async def adapter_path(self) -> str | None:
        """Return the directory of the LoRA adapter that the worker lists; None when it has none."""
        models = (await self._ask("GET", "/v1/models")).get("data", [])
        return next((str(model.get("root")) for model in models if model.get("id") == ADAPTER_NAME), None)

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

    async def _is_embedded(self) -> bool:
        return (await self._ask("GET", "/server_info")).get("engine") == "embedded"

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

    async def hold(self, requests: Requests, *, for_adapter: bool = False) -> None:
        """Stop generation for a change of weights. A sleeping worker wakes first.

        Requests in flight end first (``finish``), continue after ``resume`` (``continue``), or are aborted (``abort``),
        as they must be where the weights may be of two versions; their clients send aborted ones again, elsewhere.

        Continued requests are computed anew up to where they stopped, so that later tokens depend on the new weights
        alone. Without a hold, an update starts when the requests have ended, but SGLang then fails to flush its cache
        if new requests have come.

        Before a change of the LoRA adapter (``for_adapter``) SGLang's requests are aborted instead of continued, and
        their client sends them again: SGLang unloads an adapter only when no request refers to it.
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
        elif for_adapter and not await self._is_embedded():
            await self.pause("abort")
        else:
            await self.pause("retract")

    async def resume(self) -> None:
        """Continue to generate."""
        await self._ask("POST", "/continue_generation", {})

    async def init_group(
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

    async def destroy_group(self, group_name: str) -> None:
        """Leave a broadcast group."""
        await self._ask("POST", "/destroy_weights_update_group", {"group_name": group_name})

    async def begin_update(self) -> None:
        """Begin a weight update by broadcast. Requests in flight end first, unless generation is paused."""
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

    async def end_update(self) -> None:
        """End a weight update by broadcast."""
        await self._ask("POST", "/end_weight_update", {})

    async def rescore(self, token_ids: Sequence[int], lora_path: str | None = None) -> list[float]:
        """Return the log-probabilities of ``token_ids[1:]``, each given the tokens before it.

        ``lora_path`` names the LoRA adapter to compute with; None: the model alone.
        """
        payload = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            **({"lora_path": lora_path} if lora_path else {}),
        }
        reply = await self._ask("POST", "/generate", payload)
        try:
            # The first token has no logprob.
            return [float(entry[0]) for entry in reply["meta_info"]["input_token_logprobs"][1:]]
        except (KeyError, IndexError, TypeError) as error:
            raise WorkerRefusedError(f"worker {self.url}/generate answered without input logprobs") from error

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
