"""Which engine a node runs, and the command lines of engine and router."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.core import endpoints
from services.core.compute import ComputeType
from services.core.endpoints import Endpoint
from services.core.errors import ConfigurationError
from services.rollout_server.child import API_KEY_FROM_TOKEN
from services.rollout_server.settings import EngineKind, RolloutSettings

CHILD = Path(__file__).with_name("child.py")
EMBEDDED_NEEDS = ("torch", "transformers")
ROUTER_PACKAGE = "sglang_router"
FIRST_VERSION = 0
"""The policy version of MODEL_NAME itself."""


@dataclass(frozen=True)
class Command:
    """How a child process is started."""

    name: str
    python: str
    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> list[str]:
        """The whole command line."""
        return [self.python, str(CHILD), self.module, *self.arguments]


def choose_engine(settings: RolloutSettings) -> EngineKind:
    """ROLLOUT_ENGINE, with ``auto`` decided by whether the node has a GPU.

    Raises:
        ConfigurationError: what it needs is not installed.
    """
    kind = settings.rollout_engine
    if kind is EngineKind.AUTO:
        kind = EngineKind.SGLANG if number_of_gpus() > 0 else EngineKind.EMBEDDED
    if kind is EngineKind.SGLANG and not _has_module(settings.sglang_python, "sglang"):
        raise ConfigurationError(
            f"ROLLOUT_ENGINE={settings.rollout_engine.value} needs SGLang on this node, which "
            f"{settings.sglang_python or sys.executable} does not have; install the extra 'sglang', name its "
            f"interpreter by SGLANG_PYTHON, or set ROLLOUT_ENGINE=embedded"
        )
    missing = [name for name in EMBEDDED_NEEDS if kind is EngineKind.EMBEDDED and not _has_module(None, name)]
    if missing:
        raise ConfigurationError(
            f"the embedded engine (ROLLOUT_ENGINE={settings.rollout_engine.value}) needs {' and '.join(missing)} on "
            f"this node, which {sys.executable} does not have; install the extra 'rollout'"
        )
    return kind


def check_router_installed() -> None:
    """Raises ConfigurationError when the router is not installed."""
    if not _has_module(None, ROUTER_PACKAGE):
        raise ConfigurationError(
            f"node 0 runs the router, and {sys.executable} does not have {ROUTER_PACKAGE}; install the extra 'sglang' "
            f"or 'rollout'"
        )


def number_of_gpus() -> int:
    """This node's GPUs: as SkyPilot says, else as torch finds them."""
    told = os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "")
    if told.isdecimal():
        return int(told)
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def engine_command(settings: RolloutSettings, kind: EngineKind, bind: Endpoint) -> Command:
    """How to start the node's engine."""
    if kind is EngineKind.EMBEDDED:
        address = ["--host", bind.host, "--port", str(bind.port)]
        return Command("engine", sys.executable, "services.embedded_engine", address)
    # One second a check otherwise, since /health would generate a token each time.
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    python = settings.sglang_python or sys.executable
    return Command("engine", python, "sglang.launch_server", sglang_flags(settings, bind), environment)


def sglang_flags(settings: RolloutSettings, bind: Endpoint) -> list[str]:
    """The arguments of ``sglang.launch_server``."""
    flags = ["--model-path", settings.model_name, "--host", bind.host, "--port", str(bind.port)]
    flags += ["--weight-version", str(FIRST_VERSION), "--enable-metrics", API_KEY_FROM_TOKEN]
    flags += ["--tp-size", str(settings.sglang_tp_size or max(number_of_gpus(), 1))]
    flags += ["--max-queued-requests", str(settings.engine_max_queued_requests)]
    if settings.engine_dtype is not ComputeType.AUTO:
        flags += ["--dtype", settings.engine_dtype.value]
    for flag, value in (
        ("--mem-fraction-static", settings.sglang_mem_fraction),
        ("--context-length", settings.engine_context_length),
        ("--attention-backend", settings.sglang_attention_backend),
        ("--tool-call-parser", settings.sglang_tool_call_parser),
        ("--max-running-requests", settings.engine_max_running_requests),
        ("--max-total-tokens", settings.engine_max_total_tokens),
    ):
        if value is not None:
            flags += [flag, str(value)]
    if settings.engine_deterministic:
        flags += ["--enable-deterministic-inference"]
    # Last, since the last of several wins.
    return flags + settings.extra_flags


def router_command(settings: RolloutSettings, bind: Endpoint, metrics: Endpoint) -> Command:
    """How to start the router, without workers: these are registered as they come up."""
    flags = ["--host", bind.host, "--port", str(bind.port), "--policy", settings.router_policy.value]
    flags += ["--prometheus-host", metrics.host, "--prometheus-port", str(metrics.port), API_KEY_FROM_TOKEN]
    # Affinity counts for little against an idle worker: a group's prompt travels once, with all its completions.
    flags += ["--balance-abs-threshold", str(settings.router_imbalance), "--balance-rel-threshold", "1.1"]
    flags += ["--worker-startup-check-interval", "1", "--worker-startup-timeout-secs", "60"]
    interval = str(settings.router_health_interval_seconds)
    flags += ["--health-check-interval-secs", interval, "--health-check-timeout-secs", "5"]
    flags += ["--health-failure-threshold", "3", "--health-success-threshold", "1"]
    flags += ["--request-timeout-secs", str(settings.router_request_seconds)]
    flags += ["--retry-max-retries", str(settings.router_retries)]
    # The circuit breaker also counts refusals (400, 429) as failures of the worker, so it opens for a moment only:
    # for longer, one client's bad requests would close the rollout tier to all.
    flags += ["--cb-failure-threshold", str(settings.router_circuit_failures), "--cb-success-threshold", "1"]
    flags += ["--cb-timeout-duration-secs", str(settings.router_circuit_seconds)]
    # The launcher ends it after four seconds anyway.
    flags += ["--shutdown-grace-period-secs", "3"]
    # Generation takes minutes and clients bound what they send: the router itself queues without a limit.
    flags += ["--max-concurrent-requests", "-1", "--log-level", "warn"]
    return Command("router", sys.executable, "sglang_router.launch_router", flags)


def door_command(bind: Endpoint, router: Endpoint) -> Command:
    """How to start what stands in front of the router when there is a token."""
    address = ["--host", bind.host, "--port", str(bind.port)]
    return Command("door", sys.executable, "services.rollout_server.auth_proxy", [*address, "--router", router.url])


@dataclass(frozen=True)
class Binds:
    """Where what runs on a rollout node listens."""

    engine: Endpoint
    router: Endpoint
    metrics: Endpoint
    """The router's metrics."""
    door: Endpoint | None
    """In front of the router; None without a token."""

    @classmethod
    def of(
        cls,
        settings: RolloutSettings,
        *,
        host: str | None = None,
        port: int | None = None,
        engine_port: int | None = None,
    ) -> Binds:
        """Return this node's addresses: those of the job group, but for what is given.

        With a token the router hears its own node alone: it does not ask for it on all its routes, and never on its
        metrics' port.
        """

        def outward(port: int, given_port: int | None = None) -> Endpoint:
            default = endpoints.bind_address(endpoints.Task.ROLLOUT_SERVER, port)
            return Endpoint(host or default.host, given_port or default.port)

        def here(port: int) -> Endpoint:
            default = endpoints.bind_address(endpoints.Task.ROLLOUT_SERVER, port)
            return Endpoint("127.0.0.1", default.port) if default.host == endpoints.EVERYWHERE else default

        engine = outward(endpoints.ENGINE_PORT, engine_port)
        front = outward(endpoints.ROUTER_PORT, port)
        if settings.token:
            return cls(engine, here(endpoints.ROUTER_INNER_PORT), here(endpoints.ROUTER_METRICS_PORT), front)
        return cls(engine, front, outward(endpoints.ROUTER_METRICS_PORT), None)


def _has_module(python: str | None, module: str) -> bool:
    if python is None:
        return importlib.util.find_spec(module) is not None
    check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", check], timeout=60, check=False).returncode == 0
    except OSError as error:
        raise ConfigurationError(
            f"SGLANG_PYTHON is {python!r}, which cannot be run ({error}); give the path of a Python interpreter"
        ) from error
