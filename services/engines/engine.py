"""An engine, a process that generates tokens with the model, as launchers, trainer and clients see it.

A new engine is one subclass of ``Engine`` in the table of ``kinds.py``. What it has to do is said here, method by
method, and in docs/architecture.md.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError
from services.core.processes import Command
from services.engines.placement import EnginePlace, Split
from services.engines.settings import EngineKind, RolloutSettings
from services.engines.shape import Config, SizeFacts
from services.http.client import HttpClient
from services.protocol.groups import TokenSequence

Requests = Literal["finish", "continue", "abort"]
"""The fate of the requests in flight while an engine is held; see ``Engine.hold``."""


class WorkerRefusedError(Exception):
    """A worker refused or failed a request; the message has its URL, the route and its answer."""


class Engine(HttpClient, ABC):
    """One engine at its URL. An async context manager.

    No request is retried: an engine that failed must catch up, which its launcher takes care of. Every coroutine raises
    WorkerRefusedError when the engine answers with an error, and DependencyLostError when it does not answer within
    ``timeout`` seconds.
    """

    kind: ClassVar[EngineKind]
    generate_path: ClassVar[str]
    """The route of completions, at the engine and at the router."""
    default_tokens: ClassVar[int] = 0
    """Tokens with keys and values where ENGINE_MAX_TOTAL_TOKENS is unset, or the context length if it is longer; 0 if
    the engine takes all memory that it finds."""
    keeps_weights_asleep: ClassVar[bool] = False
    """Its weights stay on the GPU while it sleeps."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float) -> None:
        super().__init__(url, token=token, service="worker", timeout=timeout)
        self.gpus: tuple[str, ...] = ()
        """The GPU of each tensor-parallel rank, as CUDA_VISIBLE_DEVICES names it. Its launcher knows them; empty where
        there are none, or several for a rank."""

    # The launcher's part: how many engines a node has, and how one is started and watched.

    @classmethod
    @abstractmethod
    def check_installed(cls, settings: RolloutSettings) -> None:
        """Check that this node has the engine's packages.

        Raises:
            ConfigurationError: a package is not installed.
        """

    @classmethod
    @abstractmethod
    def check_sizes(cls, settings: RolloutSettings, n_gpus: int, config: Config | None) -> int:
        """Check the parallel sizes of the settings; return the most engines that a node can have with them.

        Args:
            settings: the rollout node's settings.
            n_gpus: GPUs of the node, at least one.
            config: the model's configuration; None if it is not known.

        Raises:
            ConfigurationError: a size divides the GPUs or the model's attention heads with a remainder.
        """

    @classmethod
    @abstractmethod
    def split(cls, settings: RolloutSettings, n_gpus: int, ask: Callable[[], SizeFacts]) -> Split:
        """Return the engines of a node with ``n_gpus`` GPUs; ``ask`` returns the sizes of model and GPUs.

        Raises:
            ConfigurationError: an engine needs more GPUs or memory than the node has.
        """

    @classmethod
    @abstractmethod
    def command(cls, settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> Command:
        """Return the command of an engine, which listens on ``address`` and sees the GPUs of its place only."""

    @abstractmethod
    async def scheduler_answers(self, seconds: float) -> bool:
        """Return whether the scheduler behind /health can generate, or is paused.

        An engine that loads weights need not answer within ``seconds``.
        """

    # The clients' part: a request for completions and its answer, the same at the router.

    @classmethod
    @abstractmethod
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

    @classmethod
    @abstractmethod
    def read_completions(cls, url: str, reply: bytes) -> list[TokenSequence]:
        """Return the completions of ``url``'s reply, with a log-probability and a policy version for each token.

        Raises:
            DependencyLostError: the reply is something else.
        """

    @classmethod
    @abstractmethod
    def score_body(cls, prompt: Mapping[str, Any], start: int, *, lora_path: str | None = None) -> dict[str, Any]:
        """Return the body of a request, for ``generate_path``, for log-probabilities of a prompt's tokens.

        Args:
            prompt: ``{"input_ids": [...]}`` or ``{"text": ...}``.
            start: the first token whose log-probability is wanted, at least 1.
            lora_path: name of the LoRA adapter to compute with; None: the model alone.
        """

    @classmethod
    @abstractmethod
    def read_scores(cls, reply: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Return a reply's token ids from ``start - 1`` on, and the log-probabilities of those from ``start`` on.

        Raises:
            KeyError, IndexError, TypeError, ValueError: the reply is something else.
        """

    @abstractmethod
    async def rescore(self, token_ids: Sequence[int], lora_path: str | None = None) -> list[float]:
        """Return the log-probabilities of ``token_ids[1:]``, each given the tokens before it.

        ``lora_path`` names the LoRA adapter to compute with; None: the model alone.
        """

    # The part of whoever changes the policy version: trainer and launcher, by ``versions.serve``.

    @abstractmethod
    async def version(self) -> int | None:
        """Return the policy version that the engine serves, or will serve once it wakes; None for other names.

        The version changes together with the weights, so that each token is of the version that the engine reports.
        """

    @abstractmethod
    async def hold(self, requests: Requests, *, for_adapter: bool = False) -> None:
        """Stop generation for a change of weights. A sleeping engine wakes first.

        Requests in flight end first (``finish``), continue after ``resume`` (``continue``), or are aborted (``abort``),
        as they must be where the weights may be of two versions; their clients send aborted ones again, elsewhere.

        Continued requests are computed anew up to where they stopped, so that later tokens depend on the new weights
        alone. An engine may abort requests instead of continuing them before a change of the LoRA adapter
        (``for_adapter``).
        """

    @abstractmethod
    async def resume(self) -> None:
        """Continue to generate."""

    @abstractmethod
    async def load_model(self, path: Path | str, version: int) -> None:
        """Load a model directory, or a model of the hub, as ``version``; see ``hold``."""

    @abstractmethod
    async def load_adapter(self, path: Path | str, version: int) -> None:
        """Load the LoRA adapter in a directory as ``version``, in place of the one before; see ``hold``."""

    @abstractmethod
    async def load_adapter_from_tensors(self, config: Mapping[str, Any], tensors: bytes, version: int) -> None:
        """Load a LoRA adapter as ``version``, in place of the one before; see ``hold``.

        Args:
            config: PEFT's configuration of the adapter.
            tensors: the pickled dictionary of tensors by PEFT's names.
            version: the policy version.
        """

    @abstractmethod
    async def tensor_parallel_size(self) -> int:
        """Return the number of ranks that the engine is spread over; each joins a broadcast group by itself."""

    @abstractmethod
    async def nccl_version(self) -> str | None:
        """Return the engine's version of NCCL; None where the engine does not report it."""

    @abstractmethod
    async def join_group(
        self, address: str, port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a broadcast group whose rank 0 is the trainer; wait until all its members have joined."""

    @abstractmethod
    async def leave_group(self, group_name: str) -> None:
        """Leave a broadcast group."""

    @abstractmethod
    async def begin_update(self) -> None:
        """Begin a weight update by broadcast or a shared GPU. Requests in flight end first, except in a pause."""

    @abstractmethod
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

    @abstractmethod
    async def receive_shared(self, buckets: Sequence[bytes], version: int | None) -> None:
        """Copy tensors out of the memory of GPUs that the engine shares with the trainer.

        Args:
            buckets: the pickle of ``pack_bucket`` for each tensor-parallel rank.
            version: the policy version with the last call of an update, None with the others.
        """

    @abstractmethod
    async def end_update(self) -> None:
        """End a weight update by broadcast or a shared GPU."""

    # The part of ENGINE_SLEEPS.

    @abstractmethod
    async def is_asleep(self) -> bool:
        """Return whether the engine has given its memory away; see ``sleep``."""

    @abstractmethod
    async def sleep(self) -> None:
        """Have the engine give the GPU's memory away until ``wake``. Requests are aborted, and new ones wait."""

    @abstractmethod
    async def wake(self) -> None:
        """Have a sleeping engine take its memory back; generation stays paused. Nothing happens to others."""

    # The part of PROFILE_STEPS.

    @abstractmethod
    async def begin_profile(self, directory: Path) -> None:
        """Begin to record what processor and GPU do, for traces in a directory of its own in ``directory``."""

    @abstractmethod
    async def end_profile(self) -> None:
        """End the recording, and write the traces."""


def check_installed(module: str, extra: str, python: str | None = None) -> None:
    """Check that an interpreter, by default this one, has ``module``, which ``extra`` installs.

    Raises:
        ConfigurationError: the module is not installed, or the interpreter cannot be run.
    """
    is_installed = importlib.util.find_spec(module) is not None if python is None else _has_module(python, module)
    if not is_installed:
        raise ConfigurationError(
            f"this node needs {module}, which {python or sys.executable} does not have; install the extra {extra!r} or "
            f"choose another ROLLOUT_ENGINE or SGLANG_PYTHON"
        )


def _has_module(python: str, module: str) -> bool:
    check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", check], timeout=60, check=False).returncode == 0
    except OSError as error:
        raise ConfigurationError(
            f"SGLANG_PYTHON is {python!r}, which cannot be run ({error}); give the path of a Python interpreter"
        ) from error


def listen_flags(address: Endpoint) -> list[str]:
    """Return the flags with which engines, router and proxy listen on an address."""
    return ["--host", address.host, "--port", str(address.port)]
