"""The kernels of operations that run one by one, outside the compiled layers: what each computes, reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.pretend_cuda.seen import Call

LOOK_UPS = ("aten.embedding.", "aten.index.", "aten.index_select.", "aten.gather.")
"""Operations that read as many numbers of their first argument as they return."""
NOTHING_MOVES = ("aten.empty", "aten.new_empty", "aten.detach.", "aten._unsafe_view.", "c10d.", "_c10d_", "prim.")
SCATTERS = ("aten.scatter_add_.",)
"""Operations that change as many numbers of their first argument as their last one has."""
LOGSUMEXP = 6
"""Passes over the argument of a logsumexp: reads for maxima and for sums, and a read and a write each for differences
and for exponentials."""


@dataclass(frozen=True)
class Kernel:
    """One launch of a kernel."""

    kind: str
    """``product``, ``attention``, ``fused`` for what the compiler makes of other operations, or ``eager``."""
    operations: float
    moved: int
    """Bytes read and written."""


def kernel(call: Call) -> Kernel | None:
    """Return an operation's kernel; None without one, as for views, allocations and what runs on the CPU."""
    written = [tensor for tensor in tensors(call.result) if tensor.is_cuda]
    read = [tensor for tensor in tensors((call.args, {**call.options, "out": None})) if tensor.is_cuda]
    if call.name.startswith(NOTHING_MOVES) or not (written or read) or getattr(call.operation, "is_view", False):
        return None
    if call.name.startswith("aten.mm."):
        (rows, inner), columns = call.args[0].shape, call.args[1].shape[1]
        return Kernel("product", 2.0 * rows * inner * columns, sum(map(size, {*call.args[:2], *written})))
    if call.name.startswith(LOOK_UPS):
        return Kernel("eager", 0.0, 2 * sum(map(size, written)))
    if call.name.startswith(SCATTERS):
        return Kernel("eager", 0.0, 3 * size(call.args[-1]))
    if call.name.startswith("aten.logsumexp."):
        return Kernel("eager", 0.0, LOGSUMEXP * size(call.args[0]))
    known = {place(tensor) for tensor in read}
    new = [tensor for tensor in written if place(tensor) not in known]
    return Kernel("eager", 0.0, sum(map(size, [*read, *new, *changed(call)])))


def changed(call: Call) -> Iterator[Tensor]:
    """Yield the arguments that an operation changes in place, but for ``out``, which is its result."""
    for index, argument in enumerate(call.operation._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "out":
            given = call.args[index] if index < len(call.args) else call.options.get(argument.name)
            yield from (tensor for tensor in tensors(given) if tensor.is_cuda)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested arguments; of one that is spread over ranks, this rank's part."""
    if isinstance(value, DTensor):
        yield value._local_tensor
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for part in value:
            yield from tensors(part)


def size(tensor: Tensor) -> int:
    """Return a tensor's bytes; an expanded one counts once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def place(tensor: Tensor) -> int:
    """Return what two tensors have in common that share memory."""
    return tensor.untyped_storage()._cdata
