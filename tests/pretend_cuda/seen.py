"""A record of the operations that run on the pretended device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Call:
    """One operation with its arguments and its result."""

    operation: Any
    """The operator, of torch.ops."""
    args: Sequence[Any]
    options: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """The full name, such as ``aten.mm.default``."""
        return str(self.operation)


class Seen(TorchDispatchMode):
    """The operations that run within this context, inside FakeTensorMode: those of autograd and of FSDP included."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, because torch.compile skips all code that runs in a mode of another kind."""
        return True

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and record it."""
        result = func(*args, **(kwargs or {}))
        self.calls.append(Call(func, args, kwargs or {}, result))
        return result

    def names(self) -> Counter[str]:
        """Return how often each operation ran."""
        return Counter(call.name for call in self.calls)
