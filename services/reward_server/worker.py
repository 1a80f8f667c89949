"""What runs in a worker process: one answer at a time, under limits that the kernel enforces.

Processor time is limited by ITIMER_PROF: its signal ends the process, whatever code is running. Memory is limited by
RLIMIT_AS where the system honours it (Linux); elsewhere the server watches. Time by the clock is the server's too.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import os
import re
import resource
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from services.protocol import RewardStatus

LENGTH = struct.Struct("!I")
EXIT_MEMORY = 77
"""A worker that ran out of memory ends with this code, since little works in it any more."""

# Between answers and replies a worker must be able to allocate a little beyond the limit.
_RESERVE_BYTES = 2**20
_MAX_REASON = 300


@dataclass(frozen=True)
class Limits:
    """What one answer may use; ``memory_bytes`` is None where the server watches the memory."""

    cpu_seconds: float
    memory_bytes: int | None


def run(connection: socket.socket, functions: list[str], format_pattern: str, limits: Limits) -> None:
    """The body of a worker process: loads ``functions``, says so, and answers until the server hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server ends its workers
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        table = {name: _load(name, format_pattern) for name in functions}
    # Of whatever kind: the module is the user's, and the server reports it.
    except Exception as error:  # noqa: BLE001
        _send(connection, {"ready": False, "reason": _reason(error)})
        return
    if limits.memory_bytes is not None:
        _limit_memory(limits.memory_bytes)
    # A server that hangs up has no more questions.
    with contextlib.suppress(ConnectionError):
        _send(connection, {"ready": True})
        while (message := _receive(connection)) is not None:
            _send(connection, _answer(table, message, limits.cpu_seconds))


def _answer(
    table: dict[str, Callable[[dict[str, Any]], dict[str, Any]]], message: dict[str, Any], cpu_seconds: float
) -> dict[str, Any]:
    reserve = bytearray(_RESERVE_BYTES)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return table[message["function"]](message["item"])
    except MemoryError:
        del reserve
        os._exit(EXIT_MEMORY)
    # A reward function that raises costs its own answer only.
    except Exception as error:  # noqa: BLE001
        return {"status": RewardStatus.ERROR.value, "reason": _reason(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _end_with(connection: socket.socket) -> None:
    """Ends this process when the server hangs up or dies: a reward function might sleep for ever."""
    hang_up = select.poll()
    hang_up.register(connection, 0)  # nothing but the hang-up, which is always reported
    hang_up.poll()
    os._exit(0)


def _load(name: str, format_pattern: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    if name == "math":
        from services.reward_server.verifier import is_equal

        return lambda item: {"value": float(is_equal(item["answer"], item["ground_truth"]))}
    if name == "format":
        search = re.compile(format_pattern).search
        return lambda item: {"value": float(search(item["response"]) is not None)}
    module, _, attribute = name.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())

    def call(item: dict[str, Any]) -> dict[str, Any]:
        value = function(**{key: given for key, given in item.items() if takes_all or key in parameters})
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{name} returned {value!r}; a finite number is needed")
        return {"value": number}

    return call


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm", "rb") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    limit = now + extra_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard),) * 2)


def _reason(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "replace").decode()[:_MAX_REASON]


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    body = orjson.dumps(message)
    connection.sendall(LENGTH.pack(len(body)) + body)


def _receive(connection: socket.socket) -> Any:
    head = _read(connection, LENGTH.size)
    if head is None:
        return None
    body = _read(connection, LENGTH.unpack(head)[0])
    return None if body is None else orjson.loads(body)


def _read(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 2**20))
        if not part:
            return None
        parts += part
    return bytes(parts)
