"""Any causal language model, computed by transformers' own forward pass: for families that model.py does not know.

A prompt is computed alone, piece by piece, and makes the cache that its model has: keys and values, windows, recurrent
states or inputs of convolutions (state_cache.py). Its completions start from copies of that cache and are decoded in
one batch without padding, because they have the same length; each leaves the batch when it ends. So a recurrent state
never sees a padding token, and a window counts real positions. A sequence gets the same results to the bit whatever
else runs, because linear layers compute each row independently (linear.py). A check at the start finds models whose
other operations do not, such as fused experts, or functions of rows that do not fill a processor's vectors; they are
decoded one sequence at a time. Only the output head covers all running sequences.
"""

from __future__ import annotations

import copy
import inspect
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from services.core.errors import first_line
from services.core.linear import Head, Linear, make_linear
from services.core.logs import get_logger
from services.core.models import attention_option
from services.embedded_engine.adapters import LowRank
from services.embedded_engine.state_cache import Beginning, StateCache, piece_ends
from services.embedded_engine.weights import WeightsError, refuse
from services.weights.digests import digest

log = get_logger(__name__)

_TOWER = re.compile(r"^(?:model\.language_model|language_model\.model)\.")
"""Begins the names of a text model's tensors in a checkpoint that has other modalities, too."""
_CACHES = ("cache", "past_key_values", "cache_params")
"""The names under which forward passes take and return a cache: of transformers from 5.24 on, and before."""
PROBED = 8
"""Tokens of the check whether decoding continues a text."""
JOINED = 9
"""Sequences of the check whether a batch gets the results of each of its sequences alone."""
JOINED_LENGTHS = (PROBED, 200)
"""The lengths of their prompt."""
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest distance of the check's logits, relative to their deviation from their mean."""


class AnyArchitecture:
    """The tensors, linear layers and sizes of a causal language model; of a multimodal one, of its text model."""

    def __init__(self, config: PretrainedConfig) -> None:
        """Read them from a model without data.

        Raises:
            WeightsError: transformers has no causal language model for the configuration.
        """
        self.config = config.get_text_config(decoder=True)
        self._is_part = self.config is not config
        try:
            with torch.device("meta"):
                template: PreTrainedModel = AutoModelForCausalLM.from_config(self.config)
        except ValueError as error:
            kind = self.config.model_type
            raise WeightsError(f"model type {kind!r}: transformers has no causal language model of it") from error
        self.kind = type(template)
        self.family: str = self.config.model_type
        self.vocab_size: int = self.config.vocab_size
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self._ignored = [re.compile(pattern) for pattern in template._keys_to_ignore_on_load_unexpected or ()]
        unique = {id(x): (name, x) for name, x in reversed(template.state_dict(keep_vars=True).items())}
        self._template = template
        self.parameters = {name for name, _ in unique.values()}
        """The names of the model's tensors, tied ones once."""
        files = self.as_in_files({name: x.data for name, x in unique.values()})
        self.shapes = {name: tuple(x.shape) for name, x in files.items()}
        """The shape of every tensor by its name in the family's checkpoints, tied tensors once."""
        self._tied = template.state_dict().keys() - self.parameters
        self.prefix = template.base_model_prefix
        parts = {name: part for name, part in template.named_modules() if isinstance(part, nn.Linear)}
        self.head = next((name for name, part in parts.items() if part is template.get_output_embeddings()), "")
        self.linear_layers = {n: (part.out_features, part.in_features) for n, part in parts.items() if n != self.head}
        """Outputs and inputs of every linear layer but the output head, by name."""

    def as_in_files(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's tensors as its family's checkpoints have them."""
        converted: dict[str, Tensor] = revert_weight_conversion(self._template, tensors)
        return converted

    def own_name(self, name: str) -> str:
        """Return the text model's name of a tensor or module that a multimodal checkpoint names otherwise."""
        name = _TOWER.sub(f"{self.prefix}.", name).removeprefix("language_model.")
        return prefixed if (prefixed := f"{self.prefix}.{name}") in self.shapes else name

    def is_ignored(self, name: str) -> bool:
        """Return whether a tensor is allowed but not read: tied, computed, or of another modality."""
        if name in self.shapes:
            return False
        is_computed = name in self._tied or name.endswith("rotary_emb.inv_freq")
        return self._is_part or is_computed or any(pattern.search(name) for pattern in self._ignored)


class _Head(nn.Module):
    """An output head to float32 logits, whose result for a row does not depend on the other rows."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.linear = Head(head.weight)
        self.bias = head.bias
        self.weight = head.weight.new_empty(0)
        """Some models cast the states to its type."""

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits [..., V] of states [..., H]."""
        logits: Tensor = self.linear(states.flatten(0, -2)).unflatten(0, states.shape[:-1])
        return logits if self.bias is None else logits + self.bias.float()


class _States:
    """A decoder's output that has states only; everything else that a model's head may look for is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, place: int) -> Tensor | None:
        return self.last_hidden_state if place == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _GivenStates(nn.Module):
    """A decoder's stand-in that returns the embeddings it gets: the rest of its model then makes logits of states."""

    @property
    def decoder(self) -> _GivenStates:
        """OPT's model calls its decoder so."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        """Return ``inputs_embeds`` as the states."""
        return _States(inputs_embeds)


class AnyModel:
    """A causal language model whose weights and LoRA adapter can be exchanged between calls."""

    def __init__(
        self,
        architecture: AnyArchitecture,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        context_length: int,
        end_ids: Collection[int],
    ) -> None:
        """Make a model, and check that it continues from its cache as it computes whole sequences.

        A prompt's pieces end behind ``end_ids``, too.

        Raises:
            WeightsError: the weights do not fit, or the model cannot be decoded token by token.
        """
        disable_progress_bar()
        self.architecture = architecture
        weights = self.pack(weights)
        self.adapter: Mapping[str, LowRank] | None = None
        self.dtype = dtype
        self.device = device
        self.context_length = context_length
        self._end_ids = end_ids
        self.continues = False
        """Several tokens can follow a cache at once, so that prompts are computed in pieces."""
        self._packs = True
        """Linear layers keep their weights packed, which a model may read elsewhere."""
        try:
            self._probe(weights)
        # Whatever a forward pass fails with that was not written for this.
        except Exception as error:  # noqa: BLE001
            log.info("linear layers stay unpacked, which is slower", reason=first_line(error))
            self._packs = False
            try:
                self._probe(weights)
            except Exception as error:
                family, reason = architecture.family, first_line(error)
                raise WeightsError(f"model type {family!r} cannot be decoded token by token: {reason}") from error
        self.joins = self._packs and self._computes_rows_alike()
        """A batch gets the results of each of its sequences alone, to the bit."""

    def pack(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the model's own tensors out of ``tensors``, by its own names, for ``load``."""
        self._names = {self.architecture.own_name(name): name for name in tensors}
        """The names of tensors in the checkpoint by those of this model."""
        return {own: tensors[name] for own, name in self._names.items() if not self.architecture.is_ignored(own)}

    def load(self, weights: dict[str, Tensor]) -> None:
        """Replace the weights, or leave them as they are if they do not fit (WeightsError).

        Loading sets torch's default type for a moment, so only the thread that computes may call it.
        """
        self._take_apart(self._build(weights))

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the model computes with by its name in a model directory.

        A tied head is yielded only where it has other values than the embedding.
        """
        prefix, head = self.architecture.prefix, self.architecture.head
        tensors = {f"{prefix}.{name}": tensor for name, tensor in self._decoder.state_dict().items()}
        tensors |= {f"{name}.weight": linear.weight for name, linear in self._packed.items()}
        own, bias = self._output.linear.weight, self._output.bias
        embedding = self._decoder.get_input_embeddings().weight
        if f"{head}.weight" in self.architecture.parameters or digest(own) != digest(embedding):
            tensors[f"{head}.weight"] = own
        if bias is not None:
            tensors[f"{head}.bias"] = bias
        for name, tensor in self.architecture.as_in_files(tensors).items():
            yield self._names.get(name, name), tensor

    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        store: Callable[[int, Any], None] | None,
        use_adapter: Sequence[bool] = (),
        prefixes: Sequence[Beginning | None] = (),
    ) -> Tensor:
        """Compute sequences, one by one, from their first token on or from where their prefixes end.

        Args:
            sequences: token ids without those of the prefixes.
            store: takes a sequence's number and cache; None where nothing will be generated.
            use_adapter: whether to compute each sequence with the LoRA adapter; empty: none of them.
            prefixes: the pieces and the state before each sequence, or None; empty: there are none.

        Returns:
            Hidden states [N, H] after the last norm, for ``logits``.
        """
        states = []
        for number, tokens in enumerate(sequences):
            has_adapter = bool(use_adapter) and use_adapter[number]
            beginning = prefixes[number] if prefixes else None
            if beginning is None:
                beginning = Beginning(piece_ends(tokens, self._end_ids) if self.continues else [len(tokens)])
            hidden, cache = self._prefill_pieces(tokens, beginning, has_adapter)
            states.append(hidden)
            if store is not None:
                store(number, cache)
        return torch.cat(states)

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: StateCache, longest: int, use_adapter: Sequence[bool] = ()
    ) -> Tensor:
        """Compute one more token of every running sequence, batch by batch; see ``Model.decode``.

        The sequences' caches know their positions.
        """
        states, rows = [], []
        for batch in cache.batches:
            has_adapter = bool(use_adapter) and use_adapter[batch.rows[0]]
            ids = tokens[torch.tensor(batch.rows, device=self.device), None]
            state, batch.cache = self._forward(ids, batch.cache, has_adapter)
            states.append(state[:, 0])
            rows += batch.rows
        return self.logits(torch.cat(states)[torch.tensor(rows, device=self.device).argsort()])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] in float32 of hidden states [N, H], by the model's own caps, scales and biases."""
        logits: Tensor = self._head(inputs_embeds=hidden[None]).logits[0]
        return logits.float()

    def _prefill_pieces(self, tokens: Sequence[int], beginning: Beginning, has_adapter: bool) -> tuple[Tensor, Any]:
        """Compute a prompt's last ``tokens`` piece by piece; return their hidden states [n, H] and the cache."""
        if beginning.hidden is not None:
            return beginning.hidden, beginning.cache
        states, start, cache = [], beginning.length, copy.deepcopy(beginning.cache)
        for end in beginning.ends[bisect_right(beginning.ends, start) :]:
            ids = torch.tensor([tokens[start - beginning.length : end - beginning.length]], device=self.device)
            state, cache = self._forward(ids, cache, has_adapter)
            beginning.keep(end, cache, state[0])
            states.append(state[0])
            start = end
        return torch.cat(states), cache

    def _forward(self, ids: Tensor, cache: Any, has_adapter: bool) -> tuple[Tensor, Any]:
        """Return the states [B, n, H] of tokens [B, n] that follow a cache, and the cache with them."""
        given = {} if cache is None else {self._cache_name: cache}
        with ExitStack() as hooks:
            for name, low_rank in (self.adapter or {}).items() if has_adapter else ():
                hooks.enter_context(self._layers[name].register_forward_hook(_adding(low_rank)))
            output = self._decoder(input_ids=ids, use_cache=True, **given)
        return output.last_hidden_state, output[self._cache_name]

    def _build(self, weights: dict[str, Tensor]) -> Any:
        """Return a new model with the weights, as transformers converts and ties them."""
        config = copy.deepcopy(self.architecture.config)
        options: dict[str, Any] = {"dtype": self.dtype, "output_loading_info": True, **attention_option(config)}
        module, found = self.architecture.kind.from_pretrained(None, config=config, state_dict=dict(weights), **options)
        lacking = [f"{name} is missing" for name in found["missing_keys"]]
        unfit = [str(problem) for problem in (*found["mismatched_keys"], *found["error_msgs"])]
        refuse("the update", lacking + unfit)
        # Not a byte of a file, a received bucket or the trainer's memory, which must not be kept for its tensors' sake.
        given = {tensor.untyped_storage().data_ptr() for tensor in weights.values()}
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.untyped_storage().data_ptr() in given:
                tensor.data = tensor.data.clone()
        return module.to(self.device).eval().requires_grad_(False)

    def _take_apart(self, module: Any) -> None:
        """Divide a model into its decoder and what makes logits of the decoder's states."""
        decoder, head = module.base_model, module.get_output_embeddings()
        names = inspect.signature(decoder.forward).parameters
        self._cache_name = next((name for name in _CACHES if name in names), "")
        if decoder is module or not isinstance(head, nn.Linear) or not self._cache_name:
            raise WeightsError("it has no decoder with a cache, or no linear output head")
        self._layers = {name: module.get_submodule(name) for name in self.architecture.linear_layers}
        self._packed: dict[str, Linear] = {}
        for name, layer in self._layers.items() if self._packs else ():
            self._packed[name] = make_linear(layer.weight, layer.bias)
            layer.forward = _of_rows(self._packed[name])
            layer.weight.data = layer.weight.new_empty(0)
        self._decoder = decoder
        self._output = _Head(head)
        module.set_output_embeddings(self._output)
        setattr(module, module.base_model_prefix, _GivenStates())
        self._head = module

    def _probe(self, weights: dict[str, Tensor]) -> None:
        """Load a model, and compare decoding a few tokens, one by one and at once, with its logits of the whole."""
        module = self._build(weights)
        ids = self._drawn(PROBED)[None]
        whole = module(input_ids=ids, use_cache=False).logits[0].float()
        self._take_apart(module)
        half = PROBED // 2
        distance, singly = self._follow(ids, whole, [1] * half)
        if not distance < TOLERANCES[self.dtype]:
            raise WeightsError(f"its logits differ from those of the whole text by {distance:.2g} of their deviation")
        try:
            distance, at_once = self._follow(ids, whole, [half])
            pairs = zip(_tensors(at_once), _tensors(singly), strict=True)
            distance = max(distance, *(float((one - other).norm() / other.norm()) for one, other in pairs))
            self.continues = distance < TOLERANCES[self.dtype]
        # Whatever a forward pass fails with that was written for one token at a time.
        except Exception as error:  # noqa: BLE001
            log.info("prompts are computed whole, and no state is kept of them", reason=first_line(error))
            self.continues = False

    def _follow(self, ids: Tensor, whole: Tensor, parts: Sequence[int]) -> tuple[float, Any]:
        """Compute ``ids`` [1, n], of which the last come in parts.

        Return how the logits deviate from those of the whole text, and the cache.
        """
        states, cache = [], None
        for part in ids.split([ids.shape[1] - sum(parts), *parts], 1):
            state, cache = self._forward(part, cache, has_adapter=False)
            states.append(state)
        return float((self.logits(torch.cat(states, 1)[0]) - whole).std() / whole.std(-1).mean()), cache

    def _computes_rows_alike(self) -> bool:
        """Return whether a batch gets the results of each of its sequences alone, to the bit."""
        tokens = self._drawn(JOINED)
        if not hasattr(self._forward(tokens[None], None, has_adapter=False)[1], "reorder_cache"):
            return False
        for longest in JOINED_LENGTHS:
            length = min(longest, self.context_length - 3)
            caches = [StateCache(length, JOINED, joins=joins) for joins in (True, False)]
            for cache in caches:
                self.prefill([self._drawn(length).tolist()], cache.storer([slice(0, JOINED)]))
            for count in (JOINED, JOINED // 2):
                for cache in caches:
                    cache.truncate(count)
                together, alone = (self.decode(tokens[:count], tokens, cache, length) for cache in caches)
                if not torch.equal(together, alone):
                    return False
        return True

    def _drawn(self, count: int) -> Tensor:
        """Return some tokens [count]."""
        return (7 * torch.arange(count, device=self.device) + 3) % self.architecture.vocab_size


def _tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the states of all layers of a cache."""
    for layer in cache.layers:
        for value in vars(layer).values():
            held = value if isinstance(value, list) else [value]
            yield from (x.float() for x in held if isinstance(x, Tensor) and x.is_floating_point())


def _of_rows(linear: Linear) -> Callable[[Tensor], Tensor]:
    """Return a linear layer's forward pass [..., out] of inputs [..., in], by one of rows."""
    return lambda x: linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def _adding(low_rank: LowRank) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    """Return a hook that adds an adapter's product to a linear layer's."""

    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        change = low_rank(inputs[0].flatten(0, -2)).view_as(output)
        return (output.float() + change).to(output.dtype)

    return add
