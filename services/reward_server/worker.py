"""The program of a worker process: evaluates one answer at a time, under limits that the kernel enforces.

ITIMER_PROF limits processor time: its signal ends the process while any code runs. RLIMIT_AS limits memory on
Linux; macOS ignores it. The server limits time by the clock.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import math
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

import orjson

from services.core.errors import own_error
from services.core.imports import find_attribute
from services.core.machine import THREADS_VARIABLE
from services.protocol.rewards import ARGUMENTS
from services.reward_columns import BATCHED, RESERVED, Reads

EXIT_MEMORY = 77
"""Exit code of a worker that ran out of memory, in which little works any more."""

_RESERVE_BYTES = 2**20
"""Memory that is freed when the limit is reached, so that the process can still end in an orderly way."""
_MAX_REASON = 300
_NO_MEMORY = ("failed to map segment", os.strerror(errno.ENOMEM))
"""Parts of the errors of a library that the limit leaves no room for; an import turns them into errors of any type."""


def run(connection: Connection, functions: list[str], n_threads: int, cpu_seconds: float, memory_bytes: int) -> None:
    """Load ``functions``, report the result, and evaluate answers until the server hangs up.

    Args:
        connection: to the server.
        functions: names of ``RewardSettings.worker_functions``.
        n_threads: threads that a function may compute with.
        cpu_seconds: processor time that an answer may take.
        memory_bytes: memory that an answer may add.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the server ends its workers.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with_server, daemon=True).start()
    # Before a user's function imports a library that reads it.
    os.environ[THREADS_VARIABLE] = str(n_threads)
    try:
        table = {name: load(name) for name in functions}
    # The module is the user's and may raise anything, which the server reports.
    except Exception as error:  # noqa: BLE001
        connection.send_bytes(orjson.dumps({"reason": reason(error)}))
        return
    if sys.platform == "linux":
        _limit_memory(memory_bytes)
    worker = os.getpid()
    # The server hangs up when it has no more answers.
    with contextlib.suppress(ConnectionError, EOFError):
        connection.send_bytes(orjson.dumps({"reason": None}))
        while True:
            reply = _evaluate(table, orjson.loads(connection.recv_bytes()), cpu_seconds)
            if os.getpid() != worker:
                os._exit(0)  # A process that the user's function forked.
            connection.send_bytes(orjson.dumps(reply))


def _evaluate(
    table: dict[str, Callable[[dict[str, Any]], dict[str, Any]]], message: dict[str, Any], cpu_seconds: float
) -> dict[str, Any]:
    reserve = bytearray(_RESERVE_BYTES)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return table[message["function"]](message["item"])
    except MemoryError:
        del reserve
        os._exit(EXIT_MEMORY)
    # A reward function that raises costs only its own answer.
    except Exception as error:  # noqa: BLE001
        if any(text in str(error) for text in _NO_MEMORY):
            # The library is too large, not the answer.
            return {"reason": f"{reason(error)}; import it at the top of the module, or raise REWARD_MEMORY_MB"}
        return {"reason": reason(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _end_with_server() -> None:
    """End this process when the server dies, because a reward function might sleep for ever."""
    # Not by poll, which on macOS misses that the other side of the connection is gone.
    server = multiprocessing.parent_process()
    assert server is not None
    server.join()
    os._exit(0)


def load(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the evaluation of a function of ``RewardSettings.worker_functions``: from an item to a value.

    Raises:
        TypeError: the user's function needs a parameter that reward functions do not get.
        Exception: the user's module cannot be imported, or has no such function.
    """
    if name == "math":
        from services.reward_server.verifier import is_equal

        return lambda item: {"value": float(is_equal(item["answer"], item["ground_truth"]))}
    if name == "reasoning_gym":
        from services.reward_server.reasoning import score

        return lambda item: {"value": score(item["answer"], item["ground_truth"])}
    module, _, attribute = name.partition(":")
    function = find_attribute(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    is_batched = "completions" in parameters
    arguments = [BATCHED.get(key, key) if is_batched else key for key in ARGUMENTS]
    _check_parameters(name, parameters, arguments)
    reads = Reads.of(parameters)

    def call(item: dict[str, Any]) -> dict[str, Any]:
        if item.get("row") and reads.has_row:
            # json keeps every digit of a whole number; orjson makes those beyond 64 bits floats.
            row = json.loads(item["row"])
            item = {column: value for column, value in row.items() if column not in RESERVED} | item | {"row": row}
        if missing := [parameter for parameter in reads.needed if parameter not in item]:
            raise TypeError(f"{name} needs {', '.join(missing)}, which the row lacks; give the parameter a default")
        if is_batched:
            item = {BATCHED.get(key, key): [arguments] for key, arguments in item.items()}
        value = function(**{key: arguments for key, arguments in item.items() if takes_all or key in parameters})
        if is_batched:
            [value] = value
        return {"applies": False} if value is None else {"value": _finite(name, value)}

    return call


def _finite(name: str, value: Any) -> float:
    """Return the value of the user's function ``name`` as a number; ValueError if it is not a finite one."""
    number = math.nan
    # Text is not a number, although float() reads it.
    if isinstance(value, SupportsFloat):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} returned {value!r}, of type {type(value).__name__}; a finite number is needed")
    return number


def _check_parameters(name: str, parameters: Mapping[str, inspect.Parameter], arguments: list[str]) -> None:
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind not in optional]
    if unknown := [p.name for p in needed if p.kind is p.POSITIONAL_ONLY or p.name in RESERVED.difference(arguments)]:
        raise TypeError(
            f"{name} needs {', '.join(unknown)}, which it does not get. Use {', '.join(arguments)} and the columns of "
            "the dataset, by keyword; a column with a reserved name is in `row`"
        )


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm", "rb") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
    limit = now + extra_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard),) * 2)


def reason(error: BaseException) -> str:
    """Return the type and message of an error, cut so that a reply stays small, and its place in the user's code."""
    return own_error(error, _MAX_REASON).encode("utf-8", "replace").decode()
