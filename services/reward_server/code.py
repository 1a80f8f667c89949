"""The reward ``code``: runs an answer's program in boxes, and compares what it does with a row's tests.

The program is the last fenced block of the response. Expected values stay here: a box gets inputs, and what comes back
is compared by type and value. Asserts, which have their expected values within them, run in a process of their own
that never executes the answer (``services.sandbox.harness``).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import math
import pickle
import re
import secrets
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from prometheus_client import Counter

from services.core.errors import DependencyLostError
from services.protocol.rewards import RewardItem, RewardStatus
from services.reward_server.pool import Evaluation
from services.reward_server.settings import CodeScore, RewardSettings
from services.sandbox.box import BoxPool, Outcome, Result, require_box
from services.sandbox.kernel import Limits
from services.sandbox.probe import choose

_LANGUAGE = re.compile(r"\{?\s*\.?([a-z]+)[\d.]*(?![^\s{}:,;=])", re.IGNORECASE)
"""The name in the first line of a block, such as ``Python``, ``python3.11 title="x"`` or ``{.python}``."""
_PYTHON = {"", "py", "python"}
_DEFINED = re.compile(r"^def\s+(\w+)", re.MULTILINE)
_CLOCK = 10.0
"""Seconds by the clock for each second of processor time, so that a busy machine decides nothing."""
_KEPT = 20_000
LOST = Counter("reward_boxes_lost", "Boxes that were lost while they ran an answer's program.")
Run = Callable[..., Awaitable[Result]]
"""Does a deed as ``Box.run`` does, with the arguments of the deed and perhaps ``stdin``."""
_COLUMNS = {"tests", "test_list", "entry_point", "private_test_cases", "input_output"}


@dataclass(frozen=True)
class Tests:
    """The tests of a row: calls of a function, runs of a program with standard input, or asserts."""

    inputs: Sequence[Any] = ()
    """Lists of arguments, or texts for standard input."""
    outputs: Sequence[Any] = ()
    """The expected values or texts."""
    name: str | None = None
    """The function that is called; None: the answer's last one."""
    tolerance: float = 0.0
    """The largest difference, relative or absolute, between equal numbers."""
    may_be_wrapped: bool = False
    """True if an expected value may be the only element of a list, as in some rows of APPS."""
    asserts: Sequence[str] = ()
    setup: str = ""
    """Code that runs before the asserts."""
    own: Sequence[str] = ()
    """Names that the asserts mean the answer's by, even where Python has such a one."""
    prefix: str = ""
    """Code that runs before the answer's."""

    def __len__(self) -> int:
        return len(self.asserts) or len(self.outputs)


def last_block(response: str) -> str | None:
    """Return the code of the last closed fenced block for Python or without a language; None without one."""
    blocks = [content for language, content in fenced_blocks(response) if language in _PYTHON]
    return blocks[-1] if blocks else None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the content of each closed block with three backticks, without the block's own indent.

    The language is in small letters and without a version. It takes one pass, whatever the text is.
    """
    blocks: list[tuple[str, str]] = []
    language: str | None = None
    indent, content = 0, list[str]()
    for line in text.split("\n"):
        bare = line.strip(" \t\r")
        info = bare[3:].strip()
        if not bare.startswith("```"):
            content.append(line[:indent].lstrip(" \t") + line[indent:] + "\n")
        elif language is not None and not info:
            blocks.append((language, "".join(content)))
            language = None
        else:  # The block before was never closed.
            named = _LANGUAGE.match(info)
            language = None if "`" in info else named[1].lower() if named else info
            indent, content = len(line) - len(line.lstrip(" \t")), []
    return blocks


def read_tests(row: Mapping[str, Any]) -> Tests:
    """Return the tests of a row with a column ``tests``, or with the columns of a known dataset.

    ``tests`` is a list of asserts, or an object with ``inputs`` and ``outputs`` and perhaps ``fn_name``, ``tolerance``,
    or with ``asserts`` and perhaps ``setup``. The datasets are MBPP, HumanEval, LiveCodeBench and APPS.

    Raises:
        ValueError, KeyError, TypeError: the row has no tests, or not in such a form.
    """
    if "tests" in row:
        tests = _parsed(row["tests"])
        return _from_data(tests) if isinstance(tests, dict) else Tests(asserts=_texts(tests))
    if "test_list" in row:  # MBPP
        setup = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""])
        return Tests(asserts=_texts(row["test_list"]), setup=setup, own=_DEFINED.findall(row.get("code") or ""))
    if "entry_point" in row:  # HumanEval, whose prompt begins the program
        check = f"{row['test']}\ncheck({row['entry_point']})"
        return Tests(asserts=[check], own=[row["entry_point"]], prefix=row["prompt"])
    if "private_test_cases" in row:
        return _from_live_code_bench(row)
    if "input_output" in row:  # APPS
        return _from_data(_parsed(row["input_output"]), may_be_wrapped=True)
    raise ValueError("the row has no column `tests`, and not those of MBPP, HumanEval, LiveCodeBench or APPS")


def tests_of(row: str | None, ground_truth: str) -> Tests:
    """Return the tests of a row, given as JSON text, or those in the ground truth where the row has none.

    Raises:
        ValueError: there are none that can be read; the message says why.
    """
    try:
        columns = json.loads(row or "{}")
        return read_tests(columns if _COLUMNS & columns.keys() or not ground_truth else {"tests": ground_truth})
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error, pickle.UnpicklingError) as error:
        raise ValueError(f"the row's tests cannot be read ({error!r}); docs/guides/code.md has their forms") from error


def _from_data(data: Mapping[str, Any], *, may_be_wrapped: bool = False) -> Tests:
    if "asserts" in data:
        return Tests(asserts=_texts(data["asserts"]), setup=data.get("setup") or "")
    inputs, outputs = data["inputs"], data["outputs"]
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs; give as many of both")
    if "fn_name" not in data and any(isinstance(one, str) for one in inputs):
        inputs, outputs = _texts(inputs), [_text(one) for one in outputs]
    return Tests(inputs, outputs, data.get("fn_name"), float(data.get("tolerance", 0.0)), may_be_wrapped)


def _from_live_code_bench(row: Mapping[str, Any]) -> Tests:
    private = row["private_test_cases"]
    if isinstance(private, str) and not private.lstrip().startswith("["):
        # A text, pickled and packed. No class may be loaded for it.
        private = _TextUnpickler(io.BytesIO(zlib.decompress(base64.b64decode(private)))).load()
    cases = [*_parsed(row["public_test_cases"]), *_parsed(private)]
    name = _parsed(row.get("metadata") or "{}").get("func_name")
    if name is None:
        return Tests([case["input"] for case in cases], [case["output"] for case in cases])
    inputs = [[json.loads(line) for line in case["input"].splitlines() if line.strip()] for case in cases]
    return Tests(inputs, [json.loads(case["output"]) for case in cases], name)


class _TextUnpickler(pickle.Unpickler):
    """Reads plain values only, because a pickle with a class could run anything."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse to load a class."""
        raise ValueError(f"the tests are a pickle with {module}.{name}; only a text is read")


def _parsed(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        raise ValueError("the tests are not a list of texts")
    return values


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def same_value(got: Any, expected: Any, tolerance: float) -> bool:
    """Return whether two plain values are the same: a bool is no number, and a tuple is the same as a list.

    Raises:
        OverflowError: a whole number is too large to be compared with a tolerance.
    """
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    if isinstance(got, int | float) and isinstance(expected, int | float):
        return got == expected or math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same_value, got, expected, [tolerance] * len(got)))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same_value(got[key], expected[key], tolerance) for key in got)
    return type(got) is type(expected) and got == expected


def same_text(got: str, expected: str, tolerance: float) -> bool:
    """Return whether two outputs have the same words in each line, or numbers of the same value instead."""
    lines, wanted = ([line.split() for line in text.rstrip().splitlines()] for text in (got, expected))
    return len(lines) == len(wanted) and all(
        len(words) == len(others) and all(map(_same_word, words, others, [tolerance] * len(words)))
        for words, others in zip(lines, wanted, strict=True)
    )


def _same_word(got: str, expected: str, tolerance: float) -> bool:
    if got == expected:
        return True
    try:
        numbers = Decimal(got), Decimal(expected)
        return numbers[0] == numbers[1] or math.isclose(*map(float, numbers), rel_tol=tolerance, abs_tol=tolerance)
    except (InvalidOperation, OverflowError):
        return False


class CodeReward:
    """Runs the tests of rows on answers; the same answer to the same tests is run once."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        self._kept: OrderedDict[bytes, asyncio.Task[Evaluation]] = OrderedDict()
        self._pool: BoxPool | None = None

    async def start(self) -> None:
        """Choose the sandbox and start its boxes.

        Raises:
            ConfigurationError: no sandbox holds on this machine.
        """
        settings = self._settings
        backend = await choose(settings.sandbox, settings.interpreter, writes=False)
        cpu_seconds = settings.code_cpu_seconds
        limits = Limits(cpu_seconds=cpu_seconds, seconds=_CLOCK * cpu_seconds, memory_mb=settings.code_memory_mb)
        self._pool = BoxPool(backend, settings.interpreter, limits, settings.reward_workers, LOST.inc)
        await self._pool.start()

    async def stop(self) -> None:
        """End the boxes."""
        if self._pool is not None:
            await self._pool.stop()

    async def score(self, item: RewardItem) -> Evaluation:
        """Return the reward of an answer: 1 or 0, or with CODE_SCORE=share the share of the tests that pass.

        A row without readable tests, and a pool that loses an answer, give no value.
        """
        code = last_block(item.response)
        if code is None:
            return Evaluation(0.0, reason="the response has no closed fenced block of Python")
        key = hashlib.blake2b(json.dumps([code, item.row or item.ground_truth]).encode(), digest_size=16).digest()
        if key not in self._kept:
            self._kept[key] = asyncio.create_task(self._score(code, item))
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        # Another answer may wait for the same task.
        task = self._kept[key]
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and (task.cancelled() or task.exception() or task.result().value is None):
                self._kept.pop(key, None)

    async def _score(self, code: str, item: RewardItem) -> Evaluation:
        try:
            tests = tests_of(item.row, item.ground_truth)
        except ValueError as error:
            return Evaluation(None, RewardStatus.ERROR, str(error), code)
        try:
            passed, failure = await count(tests, code, self._run, stops=self._settings.code_score is CodeScore.ALL)
        except TimeoutError:
            reason = "no box was free in time (SERVICE_DEADLINE_SECONDS)"
            return Evaluation(None, RewardStatus.OVERLOADED, reason, code)
        except DependencyLostError as error:
            return Evaluation(None, RewardStatus.ERROR, f"twice {error}", code)
        share = passed / len(tests)
        value = share if self._settings.code_score is CodeScore.SHARE else float(share == 1)
        why = None if passed == len(tests) else f"{passed} of {len(tests)} tests pass; {failure}"
        return Evaluation(value, reason=why, extracted=code)

    async def _run(self, deed: str, **what: Any) -> Result:
        assert self._pool is not None
        return await self._pool.run(deed, seconds=self._settings.queue_seconds, **what)


async def count(tests: Tests, code: str, run: Run, *, stops: bool, module: str = "solution") -> tuple[int, str | None]:
    """Return how many tests a program passes, and why the first other one does not.

    Args:
        tests: those of its row.
        code: the program.
        run: does one of zygote's deeds in a box.
        stops: whether runs with standard input end at the first test that fails.
        module: the name by which asserts can import the program.

    Raises:
        DependencyLostError: the box was lost.
    """
    source = f"{tests.prefix}\n{code}"
    if tests.asserts:
        nonce = secrets.token_hex(16)
        what = {"tests": tests.asserts, "own": tests.own, "setup": tests.setup, "module": module, "nonce": nonce}
        result = require_box(await run("asserts", source=source, **what))
        reply = _reply(result)
        is_whole = isinstance(reply, dict) and reply.get("nonce") == nonce
        return (reply["passed"].count(True) if is_whole else 0), _failure(result)
    if isinstance(tests.inputs[0], str):
        return await _count_outputs(tests, source, run, stops=stops)
    result = require_box(await run("calls", source=source, name=tests.name, inputs=tests.inputs))
    reply = _reply(result)
    if not isinstance(reply, list) or len(reply) != len(tests):
        return 0, _failure(result)
    passed, failure = 0, None
    for got, expected in zip(reply, tests.outputs, strict=True):
        if _is_right(got, expected, tests):
            passed += 1
        else:
            failure = failure or f"a call gives {str(got)[:200]}"
    return passed, failure


async def _count_outputs(tests: Tests, source: str, run: Run, *, stops: bool) -> tuple[int, str | None]:
    passed, failure = 0, None
    for given, expected in zip(tests.inputs, tests.outputs, strict=True):
        result = require_box(await run("script", source=source, stdin=given.encode()))
        if result.outcome is Outcome.OK and same_text(
            result.stdout.decode("utf-8", "replace"), expected, tests.tolerance
        ):
            passed += 1
            continue
        failure = failure or _failure(result, "its output differs")
        if stops:
            break
    return passed, failure


def _failure(result: Result, otherwise: str = "it ended before its tests did") -> str:
    """Return why a test does not pass; ``otherwise`` where the program itself did not fail and said nothing."""
    said = result.last_line.rstrip(": ")
    if result.outcome is Outcome.OK:
        return said or otherwise
    return f"{result.outcome}: {said}" if said else str(result.outcome)


def _is_right(got: Any, expected: Any, tests: Tests) -> bool:
    wrapped = expected[0] if tests.may_be_wrapped and isinstance(expected, list) and len(expected) == 1 else expected
    try:
        kind, packed = got
        value = _as_json(packed)
        return kind == "value" and any(same_value(value, one, tests.tolerance) for one in (expected, wrapped))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return False


def _as_json(packed: Any) -> Any:
    """Return a packed value as the JSON of a row could have it; a tuple is a list.

    Raises:
        ValueError, TypeError: no row can have it. So nothing but texts is hashed here: an answer could choose numbers
            of one hash, whose set takes a minute.
    """
    if isinstance(packed, list):
        return [_as_json(part) for part in packed]
    if not isinstance(packed, dict):
        return packed
    [(kind, content)] = packed.items()
    if kind == "dict" and all(isinstance(key, str) for key, _ in content):
        return {key: _as_json(value) for key, value in content}
    if kind not in ("tuple", "float"):
        raise ValueError(f"no row has such a {kind}")
    return float(content) if kind == "float" else _as_json(content)


def _reply(result: Result) -> Any:
    """Return what an answer's process replied, or the tests' process; None for anything but one document of JSON."""
    if result.outcome is not Outcome.OK:
        return None
    try:
        return json.loads(result.reply)
    except (ValueError, RecursionError):
        return None
