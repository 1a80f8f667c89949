"""What a trainer or launcher says to the router and to each rollout worker: routing and weight updates.

The router forwards no weight update, so every worker is addressed by itself. The routes are SGLang's; the embedded
engine has the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import httpx
from pydantic import BaseModel, ValidationError

from services.core import endpoints
from services.core.errors import DependencyLostError
from services.http.client import HttpClient, RequestRefusedError, transport

ROUTER_SECONDS = 30.0
PROBE_SECONDS = 5.0

PauseMode = Literal["abort", "retract", "in_place"]


class WorkerRefusedError(Exception):
    """A worker did not do what it was asked to; the message has its URL, the route and its answer."""


class _Worker(BaseModel):
    """What we read of a worker in the router's list."""

    id: str
    url: str
    is_healthy: bool


class _Workers(BaseModel):
    """The reply of the router's GET /workers."""

    workers: list[_Worker]


class RouterControl:
    """The router's workers. An async context manager."""

    def __init__(self, endpoint: endpoints.Endpoint | None = None, token: str | None = None) -> None:
        address = endpoint or endpoints.router()
        self._token = token
        self._http = HttpClient(address.url, token=token, service="router", timeout=10, deadline=ROUTER_SECONDS)
        self._probe = httpx.AsyncClient(base_url=address.url, timeout=PROBE_SECONDS, trust_env=False)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        await self._probe.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)
        await self._probe.__aexit__(kind, error, trace)

    async def is_healthy(self) -> bool:
        """Whether the router answers now; asked once."""
        try:
            return (await self._probe.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def workers(self) -> list[str]:
        """URLs of the registered workers, in order of their URL."""
        return sorted(worker.url for worker in await self._workers())

    async def registrations(self) -> dict[str, str]:
        """What the router calls each registered worker, by its URL; another name after it was registered anew."""
        return {worker.url: worker.id for worker in await self._workers()}

    async def healthy_workers(self) -> list[str]:
        """URLs of the workers that the router sends requests to."""
        return sorted(worker.url for worker in await self._workers() if worker.is_healthy)

    async def add(self, url: str) -> None:
        """Registers a worker; the router asks it for its model and then routes to it."""
        # The router's own questions to a worker carry the token only when it is given here.
        key = {"api_key": self._token} if self._token else {}
        await self._http.request("POST", "/workers", payload={"url": url, **key})

    async def remove(self, url: str) -> None:
        """Takes a worker out of the routing; one that is not registered is no error."""
        for worker in await self._workers():
            if worker.url == url:
                try:
                    await self._http.request("DELETE", f"/workers/{worker.id}")
                except RequestRefusedError as error:
                    if error.status != 404:
                        raise

    async def _workers(self) -> list[_Worker]:
        response = await self._http.request("GET", "/workers")
        try:
            reply = _Workers.model_validate_json(response.content)
        except ValidationError as error:
            raise DependencyLostError(
                f"{response.url} answered what is not a router's list of workers; is another program listening there?"
            ) from error
        return reply.workers


class WorkerControl:
    """One rollout worker. An async context manager.

    Nothing here is retried: what a worker that failed needs is to catch up, which its launcher sees to. Every method
    raises WorkerRefusedError when the worker answers with an error, and DependencyLostError when it does not answer
    within ``timeout`` seconds.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        headers = {"Authorization": f"Bearer {token}"} if token else None
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=5.0),
            transport=transport(httpx.Limits()),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def is_healthy(self) -> bool:
        """Whether the worker answers /health with 200."""
        try:
            return (await self._http.get("/health", timeout=PROBE_SECONDS)).status_code == 200
        except httpx.HTTPError:
            return False

    async def version(self) -> int | None:
        """The policy version that the worker serves; None when it has a version that is not ours."""
        text = str((await self._get("/model_info")).get("weight_version"))
        return int(text) if text.isdecimal() else None

    async def tensor_parallel_size(self) -> int:
        """Over how many ranks the worker is spread; each joins a broadcast group by itself."""
        return int((await self._get("/server_info")).get("tp_size", 1))

    async def update_from_disk(self, path: Path | str, version: int, *, flush_cache: bool = True) -> None:
        """Loads a model directory as ``version``. Requests in flight end first, unless generation is paused."""
        payload = {"model_path": str(path), "weight_version": str(version), "flush_cache": flush_cache}
        await self._post("/update_weights_from_disk", payload)

    async def pause(self, mode: PauseMode = "in_place") -> None:
        """Pauses generation: ``in_place`` keeps requests and their caches, ``retract`` keeps requests, ``abort`` ends
        them."""
        await self._post("/pause_generation", {"mode": mode})

    async def drain(self) -> None:
        """Returns when what is in flight has ended; what comes meanwhile waits."""
        # There is no route for it, but an update waits, and one without tensors changes nothing.
        await self.begin_update()
        await self.end_update()

    async def hold(self, *, finishes_requests: bool) -> None:
        """Stops generation for a change of weights: requests in flight end first, or go on after ``resume``.

        Those that go on are computed anew up to where they are, and so with the new weights alone from there on. An
        update without a hold loads weights when requests have ended, but SGLang then fails to flush its cache if more
        have come.
        """
        if finishes_requests:
            await self.drain()
            # What came since is asked for again by its client.
            await self.pause("abort")
        else:
            await self.pause("retract")

    async def resume(self) -> None:
        """Goes on generating."""
        await self._post("/continue_generation", {})

    async def init_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Joins a broadcast group whose rank 0 is the trainer; blocks until all its members have joined."""
        payload = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", payload)

    async def destroy_group(self, group_name: str) -> None:
        """Leaves a broadcast group."""
        await self._post("/destroy_weights_update_group", {"group_name": group_name})

    async def begin_update(self) -> None:
        """Opens a weight update by broadcast. Requests in flight end first, unless generation is paused."""
        await self._post("/begin_weight_update", {"selector": "all"})

    async def receive_weights(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        version: int | None,
        *,
        flush_cache: bool = True,
    ) -> None:
        """Receives tensors by broadcast in the order of ``names``; returns when all have come.

        An update of several calls gives its ``version`` with the last one only, and None with those before.
        """
        payload = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
            "weight_version": None if version is None else str(version),
        }
        await self._post("/update_weights_from_distributed", payload)

    async def end_update(self) -> None:
        """Closes a weight update by broadcast."""
        await self._post("/end_weight_update", {})

    async def rescore(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of ``token_ids[1:]``, each given those before it."""
        payload = {
            "input_ids": list(token_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await self._post("/generate", payload)
        try:
            # The first token has no logprob.
            return [float(entry[0]) for entry in reply["meta_info"]["input_token_logprobs"][1:]]
        except (KeyError, IndexError, TypeError) as error:
            raise WorkerRefusedError(f"worker {self.url}/generate answered without input logprobs") from error

    async def _get(self, path: str) -> dict[str, Any]:
        return self._read(path, await self._send("GET", path))

    async def _post(self, path: str, payload: dict[str, Any]) -> dict[str, Any]:
        return self._read(path, await self._send("POST", path, payload))

    async def _send(self, method: str, path: str, payload: dict[str, Any] | None = None) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=payload)
        except httpx.HTTPError as error:
            raise DependencyLostError(f"worker {self.url} did not answer {path}: {error!r}") from error

    def _read(self, path: str, response: httpx.Response) -> dict[str, Any]:
        # Some routes answer with a line of text.
        is_json = response.headers.get("content-type", "").startswith("application/json")
        try:
            body = response.json() if is_json and response.content else {}
        except ValueError:
            raise WorkerRefusedError(f"worker {self.url}{path} answered broken JSON: {response.text[:200]}") from None
        if response.status_code >= 400 or (isinstance(body, dict) and body.get("success") is False):
            raise WorkerRefusedError(f"worker {self.url}{path}: {response.status_code} {response.text[:500]}")
        return body if isinstance(body, dict) else {}
