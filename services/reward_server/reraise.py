"""Imports libraries so that their ``except Exception`` lets MemoryError and RecursionError through.

math-verify takes any exception for "not equal". An answer that exhausts its memory or the stack would so come back as
wrong, a silent reward of 0, where the truth is that nobody knows. There is no option for it, so the two exceptions
are raised again by a clause put before each such handler when the source is compiled.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

_HANDLER = re.compile(rb"^([ \t]*)except Exception( as \w+)?:", re.MULTILINE)
_RAISE_FIRST = rb"\1except (MemoryError, RecursionError):\n\1    raise\n\1except Exception\2:"


@contextmanager
def let_through(*packages: str) -> Iterator[None]:
    """Modules of ``packages`` that are first imported within are compiled with the two exceptions let through."""
    finder = _Finder(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compiles the changed source. Bytecode on disk is of the unchanged one: it is neither read nor written."""
        source = _HANDLER.sub(_RAISE_FIRST, self.get_data(self.path))
        code: CodeType = self.source_to_code(source, self.path)
        return code


class _Finder(MetaPathFinder):
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of the packages, with our loader; None leaves the others to Python."""
        if fullname.partition(".")[0] not in self._packages:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
