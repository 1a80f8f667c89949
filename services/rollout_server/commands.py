"""The programs of a rollout node: which engine it runs, and the addresses and command lines of all of them."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from dataclasses import dataclass

from services.core import endpoints, machine
from services.core.child import API_KEY_FROM_TOKEN
from services.core.endpoints import Endpoint, Task
from services.core.errors import ConfigurationError
from services.core.machine import ComputeType
from services.core.processes import Command
from services.engines.versions import FIRST_VERSION
from services.rollout_server.placement import EnginePlace
from services.rollout_server.settings import EngineKind, RolloutSettings

MAX_QUEUED_REQUESTS = 4096
"""Requests that wait in SGLang before it answers 503; as many as wait in the embedded engine."""

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers that the trainer adapts, as SGLang calls them in Llama, Qwen2 and Qwen3."""
LORAS_PER_BATCH = 2
"""The trained adapter, and requests for the model alone, which count as one."""

ROUTER_FLAGS = (
    # Requests of one X-SMG-Routing-Key go to one worker, which has the session in its cache; those of a new key to the
    # worker with the fewest requests. Requests without a key go to any.
    *("--policy", "manual", "--assignment-mode", "min_load"),
    *("--worker-startup-check-interval", "1", "--worker-startup-timeout-secs", "60"),
    *("--health-check-interval-secs", "2", "--health-check-timeout-secs", "5"),
    *("--health-failure-threshold", "3", "--health-success-threshold", "1"),
    *("--request-timeout-secs", "1800", "--retry-max-retries", "5"),
    # The circuit breaker also counts refusals (400, 429) as failures of the worker, so it opens for a second only:
    # otherwise one client's bad requests would close the rollout tier to all.
    *("--cb-failure-threshold", "3", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "1"),
    # The launcher kills the router after four seconds anyway.
    *("--shutdown-grace-period-secs", "3"),
    # Generation takes minutes and clients bound what they send, so the router itself queues without a limit.
    *("--max-concurrent-requests", "-1", "--log-level", "warn"),
)
"""The router's defaults, which ROUTER_EXTRA_FLAGS can override."""


@dataclass(frozen=True)
class Addresses:
    """The addresses on which this node's programs listen, and the public addresses of router and workers."""

    engines: list[Endpoint]
    """The addresses on which this node's engines listen."""
    router: Endpoint
    router_metrics: Endpoint
    auth_proxy: Endpoint | None
    """In front of the router; None without a token."""
    public_router: Endpoint
    """The address at which every node reaches the router, through the proxy if there is one."""
    own_workers: list[Endpoint]
    """The addresses at which every node reaches this node's engines."""
    first_workers: list[Endpoint]
    """The addresses at which every node reaches the first engine of each node, by rank."""


def choose_addresses(
    *,
    has_token: bool,
    n_engines: int = 1,
    host: str | None = None,
    port: int | None = None,
    engine_port: int | None = None,
) -> Addresses:
    """Return this node's addresses; ``host`` and the ports are those of the command line, if given.

    Further engines have ports as far from the first one's as those of ``ENGINE_PORTS``.

    With a token the router listens to its own node only, because it does not ask for the token on all its routes and
    never on its metrics' port.
    """

    def public(default_port: int, given_port: int | None = None) -> Endpoint:
        default = endpoints.bind_address(Task.ROLLOUT_SERVER, default_port)
        return Endpoint(host or default.host, given_port or default.port)

    def private(default_port: int) -> Endpoint:
        default = endpoints.bind_address(Task.ROLLOUT_SERVER, default_port)
        return Endpoint("127.0.0.1", default.port) if default.host == endpoints.EVERYWHERE else default

    own_rank = endpoints.node_rank()
    front = public(endpoints.ROUTER_PORT, port)
    usual_ports = endpoints.ENGINE_PORTS[:n_engines]
    given_ports = [engine_port and engine_port + usual - endpoints.ENGINE_PORT for usual in usual_ports]
    engines = [public(usual, given) for usual, given in zip(usual_ports, given_ports, strict=True)]
    own_workers = [
        endpoints.reached_at(engine, endpoints.endpoint(Task.ROLLOUT_SERVER, usual, own_rank))
        for engine, usual in zip(engines, usual_ports, strict=True)
    ]

    def first_worker(rank: int) -> Endpoint:
        usual = endpoints.endpoint(Task.ROLLOUT_SERVER, endpoints.ENGINE_PORT, rank)
        return own_workers[0] if rank == own_rank else Endpoint(usual.host, engine_port or usual.port)

    usual_router = endpoints.endpoint(Task.ROLLOUT_SERVER)
    return Addresses(
        engines=engines,
        router=private(endpoints.ROUTER_INNER_PORT) if has_token else front,
        router_metrics=(private if has_token else public)(endpoints.ROUTER_METRICS_PORT),
        auth_proxy=front if has_token else None,
        public_router=endpoints.reached_at(front, usual_router)
        if own_rank == 0
        else Endpoint(usual_router.host, port or usual_router.port),
        own_workers=own_workers,
        first_workers=[first_worker(rank) for rank in range(endpoints.num_nodes())],
    )


def choose_engine(settings: RolloutSettings) -> EngineKind:
    """Return ROLLOUT_ENGINE, with ``auto`` decided by whether the node has a GPU.

    Raises:
        ConfigurationError: a package that the engine needs is not installed.
    """
    kind = settings.rollout_engine
    if kind is EngineKind.AUTO:
        kind = EngineKind.SGLANG if number_of_gpus() > 0 else EngineKind.EMBEDDED
    if kind is EngineKind.SGLANG:
        check_installed("sglang", "sglang", settings.sglang_python)
    else:
        check_installed("torch", "rollout")
        check_installed("transformers", "rollout")
    return kind


def check_installed(module: str, extra: str, python: str | None = None) -> None:
    """Check that an interpreter, by default this one, has ``module``, which ``extra`` installs.

    Raises:
        ConfigurationError: the module is not installed, or the interpreter cannot be run.
    """
    found = importlib.util.find_spec(module) is not None if python is None else _has_module(python, module)
    if not found:
        raise ConfigurationError(
            f"this node needs {module}, which {python or sys.executable} does not have; install the extra {extra!r} or "
            f"choose another ROLLOUT_ENGINE or SGLANG_PYTHON"
        )


def number_of_gpus() -> int:
    """Return the number of this node's GPUs: SkyPilot's figure, else torch's."""
    told = machine.promised_gpus()
    if told is not None:
        return told
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def engine_command(settings: RolloutSettings, kind: EngineKind, address: Endpoint, place: EnginePlace) -> Command:
    """Return the command of an engine, which listens on ``address`` and sees the GPUs of its place only."""
    name = f"engine-{place.number}"
    if kind is EngineKind.EMBEDDED:
        return Command(name, sys.executable, "services.embedded_engine", _listen_flags(address))
    # Otherwise SGLang generates a token for each check of its /health, which takes a second.
    environment = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
    if place.devices:
        environment[machine.VISIBLE_GPUS_VARIABLE] = ",".join(place.devices)
    python = settings.sglang_python or sys.executable
    return Command(name, python, "sglang.launch_server", _sglang_flags(settings, address, place), environment)


def router_command(settings: RolloutSettings, addresses: Addresses) -> Command:
    """Return the command of the router, which starts without workers; these are registered as they come up."""
    metrics = addresses.router_metrics
    flags = [*_listen_flags(addresses.router), API_KEY_FROM_TOKEN, *ROUTER_FLAGS]
    flags += ["--prometheus-host", metrics.host, "--prometheus-port", str(metrics.port)]
    flags += shlex.split(settings.router_extra_flags)
    return Command("router", sys.executable, "sglang_router.launch_router", flags)


def auth_proxy_command(address: Endpoint, router: Endpoint) -> Command:
    """Return the command of the authenticating proxy on ``address``, in front of ``router``."""
    flags = [*_listen_flags(address), "--router", router.url]
    return Command("auth-proxy", sys.executable, "services.rollout_server.auth_proxy", flags)


def _listen_flags(address: Endpoint) -> list[str]:
    return ["--host", address.host, "--port", str(address.port)]


def _sglang_flags(settings: RolloutSettings, address: Endpoint, place: EnginePlace) -> list[str]:
    flags = ["--model-path", settings.model_name, *_listen_flags(address)]
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
        flags += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    if settings.engine_deterministic:
        flags += ["--enable-deterministic-inference"]
    # Last, because the last of several values wins.
    return flags + shlex.split(settings.sglang_extra_flags)


def _has_module(python: str, module: str) -> bool:
    check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        return subprocess.run([python, "-c", check], timeout=60, check=False).returncode == 0
    except OSError as error:
        raise ConfigurationError(
            f"SGLANG_PYTHON is {python!r}, which cannot be run ({error}); give the path of a Python interpreter"
        ) from error
