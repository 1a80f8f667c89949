"""Imports: the user's functions, named ``module:function`` in a setting, and imports without garbage collection.

``python -m services.core.imports MODULE [arguments]`` runs a module that ends soon without garbage collection, which
saves a program that imports torch a third of its time.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from services.core.errors import ConfigurationError, first_line
from services.core.extras import explain_missing_packages


def find_attribute(module: str, name: str) -> Any:
    """Import a module and return its attribute of that name.

    Raises:
        AttributeError: it has none; the message has the nearest name.
        ModuleNotFoundError: there is no such module, or ``module`` names a file.
        Exception: the module cannot be imported.
    """
    if module.endswith(".py"):
        raise ModuleNotFoundError(f"{module} is a file; give its module: {module.removesuffix('.py')}:{name}")
    imported = importlib.import_module(module)
    if not hasattr(imported, name) and (near := difflib.get_close_matches(name, dir(imported), 1)):
        raise AttributeError(f"module {module!r} has no attribute {name!r}, the nearest is {near[0]}")
    return getattr(imported, name)


def load_function(variable: str, name: str) -> Callable[..., Any]:
    """Return the function that ``name``, the value of ``variable``, stands for: ``module:function``.

    Raises:
        ConfigurationError: the import of the module raises any error, or it has no such function.
    """
    module, _, attribute = name.partition(":")
    try:
        function = find_attribute(module, attribute)
    # The module is the user's and may raise anything.
    except Exception as error:
        raise ConfigurationError(
            f"{variable} is {name!r}, which cannot be imported: {type(error).__name__}: {first_line(error)}; "
            "give module:function, with the module on PYTHONPATH or in the working directory"
        ) from error
    if not callable(function):
        raise ConfigurationError(f"{variable} is {name!r}, which is not a function")
    return function  # type: ignore[no-any-return]


@contextmanager
def pause_collection() -> Iterator[None]:
    """Collect no garbage within the block, which imports, and keep its objects out of all later collections.

    The objects of an import stay, yet each collection during it would look at all of them again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_without_collection() -> None:
    """Run the module that the first argument names, as ``python -m`` does."""
    del sys.argv[0]
    explain_missing_packages(module=sys.argv[0])
    with pause_collection():  # and none at the end, when Python would look at all objects again
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_without_collection()
