"""Log-probabilities of given tokens, computed a chunk of hidden states at a time.

Logits [U, V] in float32 would take more memory than everything else in a step (U = 16,000 and V = 152,000: 10 GB). So
they exist for one chunk of states at a time, and the backward pass computes them again, except for the last chunk,
whose logits still exist when it begins.

Logits are accumulated in float32 and stay float32, whatever the compute type: rounding a logit of 20 to bfloat16 would
change it by up to 0.06.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.core.errors import ConfigurationError
from trainer.algorithm.teachers import jensen_shannon
from trainer.model.attention import GRAPHS

CPU_CHUNK = 256
"""States whose logits exist at the same time on a CPU: 156 MB for 152,000 tokens of vocabulary, and enough rows to keep
matrix products fast."""

LEAST_CUDA_CHUNK, CUDA_MEMORY_SHARE = 2048, 32
"""On CUDA a chunk's float32 logits take a 32nd of the device's memory, and a chunk has 2,048 states or more. Each chunk
reads and writes the float32 gradient of the output embedding, which with few states takes longer than its products."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    state_ids: Tensor,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    form: LogitForm | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(hidden weight^T / temperature) at ``targets``, and the entropy of that distribution.

    The logits of a state are computed once, however many targets it predicts.

    Both are differentiable with respect to ``hidden`` and ``weight``. With bfloat16 inputs, GPUs and processors with
    AMX round the gradient of the logits to bfloat16 for the backward pass's products, as in any linear layer.

    Args:
        hidden: [U, D] float32 or bfloat16, the hidden states that predict the targets.
        weight: [V, D] output embedding, of the same type.
        targets: [N] int64.
        state_ids: [N] int64 in [0, U), the state that predicts each target.
        temperature: temperature of the sampling distribution.
        chunk_tokens: states whose logits exist at the same time; by default ``chunk_states``.
        form: what the model makes of hidden weight^T, if anything.

    Returns:
        logprobs [N] float32 and entropies [N] float32 (in nats).
    """
    chunk_tokens = chunk_tokens or chunk_states(len(weight), memory_of(weight.device))
    form = form or LogitForm()
    return _apply(hidden, weight, form.bias, targets, state_ids, temperature, chunk_tokens, form)


SCALES = {"logit_scale": 1, "logits_scaling": -1, "lm_head_multiplier": 1}
"""Names in configurations for a factor of the logits, with its power."""


@dataclass(frozen=True)
class LogitForm:
    """The function from the product x of states and output embedding to logits: cap tanh(scale (x + bias) / cap)."""

    scale: float = 1.0
    cap: float | None = None
    bias: Tensor | None = None
    """[V], of the type of the output embedding."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> LogitForm:
        """Return the form of a model's logits, by its configuration and its output embedding."""
        powers = {name: power for name, power in SCALES.items() if getattr(model.config, name, None) is not None}
        scale = math.prod(float(getattr(model.config, name)) ** power for name, power in powers.items())
        bias = getattr(model.get_output_embeddings(), "bias", None)
        return cls(scale, getattr(model.config, "final_logit_softcapping", None), bias)

    def apply(self, logits: Tensor) -> Tensor:
        """Return the logits [n, V] float32 of products, which are overwritten."""
        if self.bias is not None:
            logits += self.bias
        if self.scale != 1:
            logits *= self.scale
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def first(self, n: int) -> LogitForm:
        """Return the form of the first n token ids."""
        return self if self.bias is None else replace(self, bias=self.bias[:n])

    def slope(self, logits: Tensor, temperature: float) -> Tensor | None:
        """Return the derivative of the logits by the products, or None if it is 1, from logits / temperature [n, V]."""
        if self.cap is not None:
            return (logits * temperature / self.cap).square_().neg_().add_(1).mul_(self.scale)
        return None if self.scale == 1 else logits.new_tensor(self.scale)


class _States:
    """A decoder's output with nothing but its last states."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, place: int) -> Tensor | None:
        return None if place else self.last_hidden_state


@torch.no_grad()
def check_logits(model: PreTrainedModel) -> None:
    """Compare a model's logits of three random states with those that are computed here.

    Raises:
        ConfigurationError: they differ.
    """
    head, decoder = cast("nn.Linear", model.get_output_embeddings()), model.base_model
    states = torch.randn(1, 3, head.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(head.weight.dtype)
    forward = decoder.forward
    try:
        decoder.forward = lambda *_, **__: _States(states)
        theirs = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits[0].float()
    finally:
        decoder.forward = forward
    ours = LogitForm.of(model).apply((states[0] @ head.weight.T).float())
    if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max())):
        raise ConfigurationError(
            f"MODEL_NAME: {model.config.model_type} computes its logits in a way of its own, not from "
            f"{', '.join(SCALES)}, final_logit_softcapping and a bias; choose a model of another family"
        )


@dataclass(frozen=True)
class Lesson:
    """A frozen teacher's states before a micro-batch's tokens, to be compared with the policy over the vocabulary."""

    hidden: Tensor
    """[U, D_t], in the teacher's compute type, the states that predict the tokens."""
    weight: Tensor
    """[V_t, D_t], the teacher's output embedding."""
    state_weights: Tensor
    """[U] float32, the sum of the weights of the tokens that each state predicts and this teacher teaches."""
    beta: float
    """See ``jensen_shannon`` in trainer/algorithm/teachers.py."""
    form: LogitForm = field(default_factory=LogitForm)
    """The function from hidden weight^T to the teacher's logits."""


def divergence(
    hidden: Tensor, weight: Tensor, lesson: Lesson, temperature: float, form: LogitForm | None = None
) -> Tensor:
    """Return the sum over states of their weights times the divergence from a teacher over the vocabulary.

    The gradient is computed in the forward pass, so that each logit is computed once. Logits of token ids that only
    one of the models has are left out: a family's models have different numbers of unused rows.

    Args:
        hidden: [U, D] float32 or bfloat16, the policy's states; with gradient.
        weight: [V, D] output embedding, of the same type; with gradient.
        lesson: the teacher's states.
        temperature: temperature of both distributions.
        form: what the policy makes of hidden weight^T, if anything.

    Returns:
        A scalar, float32.
    """
    form = form or LogitForm()
    return _diverge(hidden, weight, form.bias, lesson, temperature, form)


@torch.no_grad()
def top_overlap(hidden: Tensor, weight: Tensor, lesson: Lesson, k: int, form: LogitForm | None = None) -> Tensor:
    """Return the share of the policy's k most likely tokens that are among a teacher's k most likely ones, [U]."""
    n = min(len(weight), len(lesson.weight))
    size = chunk_states(n, memory_of(weight.device))
    heads = _heads_of(hidden, weight, lesson, n, size, form or LogitForm())
    overlaps = [lesson.state_weights.new_empty(0)]
    for rows in _chunks(hidden, size):
        ours, theirs = (head.logits(rows, 1.0).topk(k).indices for head in heads)
        overlaps.append((ours[:, :, None] == theirs[:, None, :]).any(2).float().mean(1))
    return torch.cat(overlaps)


def chunk_states(vocabulary: int, gpu_memory: int) -> int:
    """Return how many states' logits [n, vocabulary] exist at the same time, on a GPU of these bytes; 0: on a CPU."""
    return max(LEAST_CUDA_CHUNK, gpu_memory // CUDA_MEMORY_SHARE // (vocabulary * 4)) if gpu_memory else CPU_CHUNK


def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        state_ids: Tensor,
        temperature: float,
        chunk_tokens: int,
        form: LogitForm,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normalisers, entropies = (logprobs.new_empty(len(hidden)) for _ in range(2))
        head, chunk = _Head(hidden, weight, chunk_tokens, form), None
        measure = _fused(_measure, hidden.device)
        for rows in _chunks(hidden, chunk_tokens):
            chunk = head.logits(rows, temperature)
            buffer = head.buffer(chunk)
            normalisers[rows], entropies[rows] = measure(chunk) if buffer is None else _normalise(chunk, buffer)
            places, is_here = _places(chunk, rows, targets, state_ids)
            logprobs = torch.where(is_here, chunk.view(-1)[places], logprobs)
        if not head.is_on_cpu:
            logprobs = logprobs - normalisers[state_ids]
        ctx.save_for_backward(hidden, weight, targets, state_ids, normalisers, entropies)
        ctx.temperature, ctx.chunk_tokens, ctx.form = temperature, chunk_tokens, form
        # The slope of a cap is that of logits, and these are log-probabilities by now, on a CPU.
        ctx.last = None if form.cap is not None else (head, chunk)
        ctx.set_materialize_grads(False)
        return logprobs, entropies[state_ids]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, state_ids, normalisers, entropies = ctx.saved_tensors
        logprob_gradient = entropies.new_zeros(len(targets)) if gradients[0] is None else gradients[0]
        by_state = torch.zeros_like(entropies).index_add_(0, state_ids, logprob_gradient)
        entropy_gradient = None
        if gradients[1] is not None:
            entropy_gradient = torch.zeros_like(entropies).index_add_(0, state_ids, gradients[1])
        of_inputs = _Gradients(ctx, hidden, weight)
        # The first backward pass uses up the last chunk; another backward pass computes all logits again.
        head, chunk = ctx.last or (_Head(hidden, weight, ctx.chunk_tokens, ctx.form), None)
        ctx.last = None
        differentiate = _fused(_differentiate, hidden.device)
        for rows in reversed(_chunks(hidden, ctx.chunk_tokens)):
            shift = None if chunk is not None and head.is_on_cpu else normalisers[rows, None]
            chunk = head.logits(rows, ctx.temperature) if chunk is None else chunk
            slope = ctx.form.slope(chunk, ctx.temperature)
            of_entropy = None if entropy_gradient is None else (entropies[rows, None], entropy_gradient[rows, None])
            gradient = differentiate(chunk, shift, by_state[rows, None], of_entropy, head.buffer(chunk))
            places, is_here = _places(gradient, rows, targets, state_ids)
            gradient.view(-1).scatter_add_(0, places, logprob_gradient * is_here)
            if ctx.temperature != 1:
                gradient.div_(ctx.temperature)
            of_inputs.add(head, rows, gradient, slope)
            chunk = None
        return *of_inputs.rounded(), None, None, None, None, None


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lesson: Lesson,
        temperature: float,
        form: LogitForm,
    ) -> Tensor:
        n = min(len(weight), len(lesson.weight))
        size = chunk_states(n, memory_of(weight.device))
        head, teacher = _heads_of(hidden, weight, lesson, n, size, form)
        of_inputs = _Gradients(ctx, hidden, weight)
        total = lesson.state_weights.new_zeros(())
        for rows in _chunks(hidden, size):
            logits = head.logits(rows, temperature)
            slope = form.slope(logits, temperature)
            log_p, log_t = logits.log_softmax(1), teacher.logits(rows, temperature).log_softmax(1)
            values, gradient = jensen_shannon(log_p, log_t, lesson.beta)
            weights = lesson.state_weights[rows]
            total += weights @ values
            of_inputs.add(head, rows, gradient.mul_(weights[:, None] / temperature), slope)
        ctx.gradients = of_inputs.rounded()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *(None if x is None else x * gradients[0] for x in ctx.gradients), None, None, None


def _heads_of(
    hidden: Tensor, weight: Tensor, lesson: Lesson, n: int, chunk_tokens: int, form: LogitForm
) -> tuple[_Head, _Head]:
    """Return the policy's and the teacher's heads over the first ``n`` token ids."""
    return (
        _Head(hidden, weight[:n], chunk_tokens, form.first(n)),
        _Head(lesson.hidden, lesson.weight[:n], chunk_tokens, lesson.form.first(n)),
    )


def _chunks(hidden: Tensor, chunk_tokens: int) -> list[slice]:
    return [slice(start, start + chunk_tokens) for start in range(0, len(hidden), chunk_tokens)]


def _places(chunk: Tensor, rows: slice, targets: Tensor, state_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index [N] of each target in the flattened chunk, and which targets [N] the chunk's states predict.

    The index of a target that it does not predict is that of another of its numbers. To leave these out would need
    their number, and on CUDA the host would have to wait for it.
    """
    n_rows, vocabulary = chunk.shape
    row = state_ids - rows.start
    return row.clamp(0, n_rows - 1) * vocabulary + targets, (row >= 0) & (row < n_rows)


LONGEST_STRETCH, LEAST_STRETCH = 1024, 64
"""Numbers of a row that a kernel holds in registers at the same time."""


def _measure(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normalisers [n] and the entropies [n] of logits [n, V], which a kernel reads once and leaves.

    Each stretch of a row has a maximum, a sum of exponentials, and that sum weighted by the exponents; then these are
    combined. A vocabulary that does not divide into stretches is read several times.
    """
    stretch = math.gcd(logits.shape[1], LONGEST_STRETCH)
    parts = logits.unflatten(1, (-1, stretch if stretch >= LEAST_STRETCH else logits.shape[1]))
    largest = parts.amax(2)
    exponents = parts - largest[:, :, None]
    sums, weighted = exponents.exp().sum(2), (exponents.exp() * exponents).sum(2)
    shift = largest - largest.amax(1, keepdim=True)
    total = (shift.exp() * sums).sum(1)
    mean = (shift.exp() * (weighted + shift * sums)).sum(1) / total
    return largest.amax(1) + total.log(), total.log() - mean


def _normalise(logits: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits [n, V] into log-probabilities in place; return the normalisers [n] and the entropies [n].

    ``buffer`` takes the probabilities.
    """
    normalisers = logits.logsumexp(1)
    log_p = logits.sub_(normalisers[:, None])
    return normalisers, -torch.linalg.vecdot(torch.exp(log_p, out=buffer), log_p)


def _differentiate(
    log_p: Tensor,
    normalisers: Tensor | None,
    by_state: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    buffer: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits [n, V] but for the targets' own terms, in ``buffer`` or in place of ``log_p``.

    d logp[target] / d logits = onehot - p;  d H / d logits = -p (log p + H)

    Args:
        log_p: [n, V], overwritten; logits if there are ``normalisers`` [n, 1] to subtract.
        normalisers: see ``log_p``.
        by_state: [n, 1], the sum of the gradients of a state's log-probabilities.
        of_entropy: the entropies and their gradients, [n, 1] each; None if nothing depends on them.
        buffer: [n, V], or None.
    """
    if normalisers is not None:
        log_p = log_p.sub_(normalisers)
    p = torch.exp(log_p, out=buffer)
    if of_entropy is None:
        gradient = p.mul_(-by_state)
    else:
        entropies, entropy_gradient = of_entropy
        scale = log_p.add_(entropies).mul_(entropy_gradient)
        gradient = p.mul_(scale.add_(by_state)).neg_()
    return gradient if buffer is not None else log_p.copy_(gradient)


@cache
def _fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function of logits [n, V] and others for a device: on CUDA compiled, without buffers."""
    if device.type != "cuda":
        return function
    # Each vocabulary has graphs of its own: with and without entropies, for one state and for more.
    compiled = torch.compile(  # type: ignore[call-overload]  # the overloads lack the limit
        function, dynamic=True, fullgraph=True, recompile_limit=GRAPHS
    )

    def call(logits: Tensor, *others: Any) -> Any:
        # A kernel for any V could not count on rows that begin at 16 bytes, and would move 4 bytes at a time.
        torch._dynamo.mark_static(logits, 1)
        return compiled(logits, *others)

    return call


class _Head:
    """The output head, and buffers of the size of one chunk's logits, which every chunk uses again.

    On a CPU, allocating new memory for each chunk takes as much time as computing the logits.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, chunk_tokens: int, form: LogitForm) -> None:
        # torch's product of bfloat16 factors that returns float32 exists on GPUs only.
        dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self._is_bfloat16 = weight.dtype == torch.bfloat16
        self._form = form
        shape = (min(len(hidden), chunk_tokens), len(weight))
        self._logits = torch.empty(shape, dtype=torch.float32, device=hidden.device)
        self.is_on_cpu = hidden.device.type == "cpu"
        self._other = torch.empty_like(self._logits) if self.is_on_cpu else None

    def logits(self, rows: slice, temperature: float) -> Tensor:
        """Return the logits of ``rows`` over the temperature, [n, V] float32; valid until the next call."""
        hidden = self.hidden[rows]
        logits = self._form.apply(self.multiply(hidden, self.weight.T, self._logits[: len(hidden)]))
        return logits if temperature == 1 else logits.div_(temperature)

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
        """Write left @ right to ``out``, or add it. Sums and ``out`` are float32, whatever the factors' type."""
        if left.dtype == torch.float32:
            with _bfloat16_factors(self._is_bfloat16):
                return out.addmm_(left, right, beta=float(add))
        if add:
            return out.add_(torch.mm(left, right, out_dtype=torch.float32))
        return torch.mm(left, right, out_dtype=torch.float32, out=out)

    def buffer(self, logits: Tensor) -> Tensor | None:
        """Return a second buffer of the shape of the logits, valid until the next call; None on CUDA."""
        return None if self._other is None else self._other[: len(logits)]


class _Gradients:
    """The gradients of states, output embedding and bias, those that are needed, as sums in float32."""

    def __init__(self, ctx: Any, hidden: Tensor, weight: Tensor) -> None:
        self._dtypes, needs = (hidden.dtype, weight.dtype, weight.dtype), ctx.needs_input_grad
        self._sums = [
            torch.empty_like(hidden, dtype=torch.float32) if needs[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None,
            weight.new_zeros(len(weight), dtype=torch.float32) if needs[2] else None,
        ]

    def add(self, head: _Head, rows: slice, gradient: Tensor, slope: Tensor | None) -> None:
        """Add what comes of the gradient of the logits [n, V] of ``rows``, which is overwritten; see ``LogitForm``."""
        of_hidden, of_weight, of_bias = self._sums
        gradient = (gradient if slope is None else gradient.mul_(slope)).to(head.weight.dtype)
        if of_hidden is not None:
            head.multiply(gradient, head.weight, of_hidden[rows])
        if of_weight is not None:
            head.multiply(gradient.T, head.hidden[rows], of_weight[: len(head.weight)], add=True)
        if of_bias is not None:
            of_bias[: len(head.weight)] += gradient.sum(0)

    def rounded(self) -> list[Tensor | None]:
        """Return the gradients in the types of their inputs; each sum is freed before the next one is copied."""
        for place, dtype in enumerate(self._dtypes):
            if (total := self._sums[place]) is not None:
                self._sums[place] = total.to(dtype)
        return self._sums


@contextmanager
def _bfloat16_factors(are_bfloat16: bool) -> Iterator[None]:
    """Within the context, let oneDNN compute float32 products with bfloat16 factors and float32 sums.

    Hidden states and weights that were bfloat16 lose nothing by it. oneDNN does so on processors with AMX instructions
    and computes in float32 on others.
    """
    products = cast("Any", torch.backends.mkldnn).matmul
    before = products.fp32_precision
    products.fp32_precision = "bf16" if are_bfloat16 else before
    try:
        yield
    finally:
        products.fp32_precision = before


_diverge: Callable[[Tensor, Tensor, Tensor | None, Lesson, float, LogitForm], Tensor] = _Divergence.apply
_apply: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply
