"""A record of the operations that run on the pretended device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Seen(TorchDispatchMode):
    """The operations that ran within this context, inside FakeTensorMode: those of autograd and of FSDP included."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Sequence[Any], Any]] = []
        """Each operation by its full name, such as ``aten.mm.default``, its positional arguments and its result."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        result = func(*args, **(kwargs or {}))
        self.calls.append((str(func), args, result))
        return result

    def names(self) -> Counter[str]:
        """Return how often each operation ran."""
        return Counter(name for name, _, _ in self.calls)
