"""Runs an answer in a process that has lost its rights: as a script, call by call, or under the asserts of a dataset.

Asserts run in a process of their own, which never executes the answer's code: a name of the answer is a ``Remote``
there, whose calls go to the answer's process, and only plain values come back. So neither an ``__eq__`` of the answer
nor a look through its process's memory can pass a test. An answer may write anything in place of the replies: they
decide nothing but the values of what the tests ask for. Standard library only.
"""

from __future__ import annotations

import atexit
import builtins
import importlib
import json
import os
import re
import site
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

_USUAL = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator random re"
)
USUAL_MODULES = (*_USUAL.split(), "statistics", "string", "sys", "typing")
"""Modules of the standard library that are imported before an answer runs, so that it waits for none of them."""
_MODULE = 0
"""The target of a ``Remote`` that stands for the answer's module."""
Link = tuple[TextIO, TextIO]
_CONTAINERS = {"tuple": tuple, "set": set, "frozenset": frozenset, "list": list}


def pack(value: Any, keep: Callable[[Any], Any] | None = None) -> Any:
    """Return a value as JSON can have it: a list stays one, and what JSON lacks becomes ``{type: content}``.

    Values of subclasses become values of their base. ``keep`` returns by what name another object is known.

    Raises:
        TypeError: there is such an object, and no ``keep``.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | str):
        return int(value) if isinstance(value, int) else str.__str__(value)
    if isinstance(value, float):
        return float(value) if value - value == 0 else {"float": repr(float(value))}
    if isinstance(value, dict):
        return {"dict": [[pack(key, keep), pack(content, keep)] for key, content in value.items()]}
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            content = [pack(part, keep) for part in value]
            return content if name == "list" else {name: content}
    if isinstance(value, bytes):
        return {"bytes": value.decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(type(value), "tolist"):  # numpy's numbers and arrays
        return pack(value.tolist(), keep)
    if keep is None:
        raise TypeError(f"{type(value).__name__} is not a plain value")
    return {"object": keep(value)}


def unpack(packed: Any, find: Callable[[Any], Any] | None = None) -> Any:
    """Return the value that ``pack`` was given; ``find`` returns the object of a name.

    Raises:
        ValueError, TypeError: it is not of that form.
    """
    if isinstance(packed, list):
        return [unpack(part, find) for part in packed]
    if not isinstance(packed, dict):
        return packed
    [(name, content)] = packed.items()
    match name:
        case "float":
            return float(content)
        case "dict":
            return {unpack(key, find): unpack(value, find) for key, value in content}
        case "bytes":
            return content.encode("latin-1")
        case "complex":
            return complex(*content)
        case "object" if find is not None:
            return find(content)
    return _CONTAINERS[name](unpack(part, find) for part in content)


def run_script(source: str) -> None:
    """Run a whole program, with its threads, as ``python program.py`` does."""
    try:
        _execute(source, "__main__")
    finally:
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()


def run_calls(source: str, name: str | None, inputs: Sequence[Sequence[Any]], reply: TextIO) -> None:
    """Call a function of the answer with each list of arguments, and write the packed results as a JSON list.

    Args:
        source: the answer.
        name: the function, or the method of the answer's class ``Solution``; None: the answer's last function.
        inputs: lists of arguments.
        reply: where the list goes; a call that raises has ``["error", text]`` there, others ``["value", packed]``.
    """
    names = _execute(source, "answer")
    results: list[tuple[str, Any]] = []
    for arguments in inputs:
        try:
            results.append(("value", pack(_function(names, name)(*arguments))))
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  # the answer's own, such as of exit()
            results.append(("error", f"{type(error).__name__}: {error}"[:300]))
    reply.write(json.dumps(results))


def _function(names: dict[str, Any], name: str | None) -> Any:
    if name is None:
        own = [value for value in names.values() if callable(value) and getattr(value, "__module__", "") == "answer"]
        return own[-1]
    return names[name] if name in names else getattr(names["Solution"](), name)


def _execute(source: str, name: str) -> dict[str, Any]:
    """Run an answer as the module ``name``, with what ``python answer.py`` has; return the module's names."""
    for add in (site.setquit, site.setcopyright, site.sethelper):
        add()
    sys.argv = ["answer.py"]
    names = _module(name)
    names |= {"__file__": os.path.abspath("answer.py"), "__builtins__": builtins}
    exec(compile(source, "answer.py", "exec"), names)
    return names


def _module(name: str) -> dict[str, Any]:
    """Return the names of a new module, which pickle and dataclasses find by ``name``."""
    module = type(sys)(name)
    sys.modules[name] = module
    return vars(module)


def serve_answer(source: str, requests: TextIO, replies: TextIO) -> None:
    """Run the answer, say which names it has, and do what ``run_asserts`` asks of its functions and objects."""
    names = _execute(source, "answer")
    objects: list[Any] = [sys.modules["answer"]]

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def find(target: str | int) -> Any:
        return names[target] if isinstance(target, str) else objects[target]

    _write_line(replies, [name for name, value in names.items() if callable(value) and not name.startswith("_")])
    for line in requests:
        try:
            deed, target, packed = json.loads(line)
            arguments = unpack(packed, find)
            value = _DEEDS[deed](find(target), *arguments)
            reply = ["value", pack(value, keep), pack(arguments, keep)]
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  # the answer's own
            kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
            reply = ["error", kind.__name__, str(error)[:300]]
        _write_line(replies, reply)


_DEEDS: dict[str, Callable[..., Any]] = {
    "call": lambda target, *arguments: target(*arguments[:-1], **arguments[-1]),
    "get": getattr,
    "set": setattr,
    "item": lambda target, key: target[key],
    "iterate": list,
    "length": len,
    "truth": bool,
    "instance": lambda target, value: isinstance(value, target),
}


def _write_line(file: TextIO, value: Any) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()


class Remote:
    """A function or an object of the answer, in the process of the asserts; it equals nothing but itself."""

    def __init__(self, link: Link, words: set[str], target: str | int) -> None:
        object.__setattr__(self, "_remote", (*link, words, target))

    def _ask(self, deed: str, *arguments: Any) -> Any:
        requests, replies, words, target = object.__getattribute__(self, "_remote")
        _write_line(replies, [deed, target, pack(list(arguments), _name_of)])
        line = requests.readline()
        if not line:
            raise EOFError("the answer's process has ended")
        kind, *content = json.loads(line)
        if kind == "error":
            raise _error(*content)

        def find(target: Any) -> Remote:
            return Remote((requests, replies), words, target)

        for argument, changed in zip(arguments, unpack(content[1], find), strict=True):
            _update(argument, changed)
        return unpack(content[0], find)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it in the answer's process."""
        return self._ask("call", *arguments, named)

    def __getattr__(self, name: str) -> Any:
        # Libraries ask any object for such names: numpy would read memory where an `__array_interface__` points.
        if name.startswith("_") and name not in object.__getattribute__(self, "_remote")[2]:
            raise AttributeError(f"the tests do not name {name}")
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("iterate"))

    def __len__(self) -> int:
        return int(self._ask("length"))

    def __bool__(self) -> bool:
        return bool(self._ask("truth"))

    def __instancecheck__(self, value: Any) -> bool:
        return bool(self._ask("instance", value))


def _error(name: Any, text: Any) -> Exception:
    """Return what an answer raised; RuntimeError for what would end a loop or the process of the tests."""
    kind: Any = getattr(builtins, str(name), None)
    is_error = isinstance(kind, type) and issubclass(kind, Exception)
    if not is_error or issubclass(kind, StopIteration | StopAsyncIteration | MemoryError):
        kind = RuntimeError
    # UnicodeDecodeError, for one, is initialised with more than a text.
    error: Exception = kind.__new__(kind, text)
    return error


def _name_of(value: Any) -> Any:
    if not isinstance(value, Remote):
        raise TypeError(f"a test cannot pass {type(value).__name__} to an answer")
    return object.__getattribute__(value, "_remote")[-1]


def _update(argument: Any, new: Any) -> None:
    """Change a list, set or dict of the tests as the answer changed its copy."""
    if isinstance(argument, list) and isinstance(new, list):
        argument[:] = new
    elif isinstance(argument, set | dict) and type(new) is type(argument):
        argument.clear()
        argument.update(new)


def run_asserts(
    tests: Sequence[str], own: Sequence[str], setup: str, module: str, nonce: str, link: Link, reply: TextIO
) -> None:
    """Run the tests of a dataset on the answer of another process, and write how many of them pass, with the nonce.

    Args:
        tests: pieces of code that raise unless the answer is right; later ones see the names of earlier ones.
        own: names that are the answer's even where Python has such a one, as ``sum``.
        setup: code that runs before them.
        module: the name by which they can import the answer.
        nonce: written last, so that a test which ends the process does not pass.
        link: from and to the answer's process.
        reply: where ``{"passed": [bool, ...], "nonce": nonce}`` goes as JSON.
    """
    names = _module("tests")
    words = set(re.findall(r"\w+", "\n".join([setup, *tests])))
    answers_names = words.intersection(json.loads(link[0].readline() or "[]"))
    # A name of Python or of its library stays what it is, whatever the answer makes of it.
    names |= {name: importlib.import_module(name) for name in USUAL_MODULES}
    for name in answers_names:
        is_python = name.startswith("_") or hasattr(builtins, name) or name in USUAL_MODULES
        if name in own or not is_python:
            names[name] = Remote(link, words, name)
    sys.modules.setdefault(module, Remote(link, words, _MODULE))  # type: ignore[arg-type]
    exec(compile(setup, "setup.py", "exec"), names)
    passed = []
    for test in tests:
        try:
            exec(compile(test, "test.py", "exec"), names)
            passed.append(True)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  # the test's own
            print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)
            passed.append(False)
    reply.write(json.dumps({"passed": passed, "nonce": nonce}))
