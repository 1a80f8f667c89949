"""Linear layers of an exported policy on a CPU, so that a state gets the same decision alone and in any batch.

A plain matrix product chooses its kernel by the number of rows, so that scores change in their last bits with the
batch. The embedded engine's layer with a packed weight does not, and is faster for batches.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from services.embedded_engine.compute.linear import make_linear


class Linear(torch.nn.Module):
    """A linear layer with a weight that is packed if the processor's library can."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._layer = make_linear(weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b for ``x`` [..., in]."""
        rows = self._layer(x.reshape(-1, x.shape[-1]))
        return rows.view(*x.shape[:-1], rows.shape[-1])


def pack(module: GraphModule) -> GraphModule:
    """Replace the float32 linear layers of an exported module on the CPU; return the module.

    Weights that the module uses in another place, too, stay as they are beside their packed copies.
    """
    for index, node in enumerate(list(module.graph.nodes)):
        if node.target is not torch.ops.aten.linear.default:
            continue
        weight, bias = (_parameter(module, source) for source in (*node.args[1:], None)[:2])
        if weight is None or weight.dtype is not torch.float32 or (bias is None) != (len(node.args) < 3):
            continue
        name = f"packed_{index}"
        module.add_submodule(name, Linear(weight.detach(), None if bias is None else bias.detach()))
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.call_module(name, (node.args[0],)))
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    module.delete_all_unused_submodules()
    return module


def _parameter(module: GraphModule, node: object) -> Tensor | None:
    """Return the tensor that a node of the module's graph gets; None if it computes one."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    value = getattr(module.get_submodule(owner), name)
    return value if isinstance(value, Tensor) else None
