"""Loading of a model for the embedded engine: configuration, tokenizer, weights, key-value cache."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from services.chat.prompts import ChatPrompts
from services.core import machine
from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.models import model_files
from services.embedded_engine.families import is_known
from services.embedded_engine.kv_cache import KVCache
from services.embedded_engine.model import Model
from services.embedded_engine.state_cache import StateCache
from services.embedded_engine.weights import Architecture, TensorNames, WeightsError, read_directory
from services.engines.settings import EMBEDDED_MAX_TOTAL_TOKENS, EngineSettings
from services.weights.digests import digest

log = get_logger(__name__)

DEFAULT_MAX_RUNNING = 64

Cache = KVCache | StateCache
"""The cache of either forward pass."""


class CausalModel(Protocol):
    """The model of either forward pass, ``Model`` or ``AnyModel``; each knows its own weights, adapters and cache."""

    adapter: Any
    dtype: torch.dtype
    device: torch.device
    context_length: int

    @property
    def architecture(self) -> TensorNames:
        """The model's tensors and layers."""

    def pack(self, tensors: dict[str, Tensor]) -> Any:
        """Return weights made of named tensors, for ``load``."""

    def load(self, weights: Any) -> None:
        """Replace the weights."""

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield what the model computes with by its name in a model directory."""

    def prefill(
        self, sequences: Sequence[Sequence[int]], store: Any, use_adapter: Sequence[bool], prefixes: Sequence[Any]
    ) -> Tensor:
        """Compute sequences into rows of the cache; return hidden states [N, H]."""

    def decode(
        self, tokens: Tensor, positions: Tensor, cache: Any, longest: int, use_adapter: Sequence[bool]
    ) -> Tensor:
        """Compute one more token of every running sequence; return logits [B, V]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, V] of hidden states [N, H]."""


@dataclass(frozen=True)
class Loaded:
    """A model with its cache and tokenizer."""

    model: CausalModel
    cache: Cache
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    """The tokens that end a completion."""

    @functools.cached_property
    def prompts(self) -> ChatPrompts:
        """The model's chat template, and its tokens of texts."""
        return ChatPrompts(self.tokenizer)

    def decode_text(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        return self.prompts.codec.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text prompt, with the special tokens that the tokenizer adds."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def read_weights(self, directory: Path) -> Any:
        """Return the weights of a model directory, ready to replace the model's.

        Raises:
            WeightsError: the weights cannot be read or do not fit.
        """
        return self.pack(read_directory(directory, self.model.architecture))

    def pack(self, tensors: dict[str, Tensor]) -> Any:
        """Return weights, ready to replace the model's, made of named tensors, which are removed from ``tensors``."""
        with torch.inference_mode():
            return self.model.pack(tensors)

    def digests(self) -> dict[str, str]:
        """Return the digest of each tensor that the model computes with, by its name in a model directory."""
        with torch.inference_mode():
            return {name: digest(tensor) for name, tensor in self.model.named_weights()}


def load(settings: EngineSettings) -> Loaded:
    """Load MODEL_NAME.

    Raises:
        ConfigurationError: the model cannot be found or is not a causal language model that transformers decodes, or
            GPUs of this node are missing.
    """
    machine.check_cuda(torch.cuda.device_count(), torch.version.cuda)
    torch.set_num_threads(machine.threads())
    chosen = machine.decide_compute(
        "ENGINE_DTYPE",
        settings.engine_dtype,
        device="cuda" if torch.cuda.is_available() else "cpu",
        multiplies_bfloat16=machine.multiplies_bfloat16(torch.cpu.get_capabilities()),
        threads=torch.get_num_threads(),
    )
    log.info("computing", **vars(chosen))
    device, dtype = torch.device(chosen.device), getattr(torch, chosen.compute_type)
    directory = model_files(settings.model_name, with_weights=True)
    max_tokens = settings.engine_max_total_tokens or max(EMBEDDED_MAX_TOTAL_TOKENS, settings.engine_context_length or 0)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        end_ids = end_token_ids(directory, config, tokenizer)
        with torch.inference_mode():
            model, cache = _make_model(settings, directory, config, end_ids, max_tokens, dtype, device)
    except (WeightsError, OSError, ValueError) as error:
        raise ConfigurationError(f"MODEL_NAME={settings.model_name}: {error}") from error
    except MemoryError as error:
        raise ConfigurationError(
            f"MODEL_NAME={settings.model_name} with ENGINE_MAX_TOTAL_TOKENS={max_tokens} does not fit into memory "
            f"({error}); lower the number, or take a smaller model"
        ) from error
    machine.release_memory()
    return Loaded(model, cache, tokenizer, end_ids)


def _make_model(
    settings: EngineSettings,
    directory: Path,
    config: PretrainedConfig,
    end_ids: frozenset[int],
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[CausalModel, Cache]:
    """Return the model with the weights of a directory, and its cache for ``max_tokens`` tokens."""
    max_running = settings.engine_max_running_requests or DEFAULT_MAX_RUNNING
    is_own = is_known(directory)
    if is_own:
        architecture: Any = Architecture(config)
    else:
        # It needs transformers with torch, which an engine of a known family does not import.
        from services.embedded_engine.any_model import AnyArchitecture, AnyModel

        architecture = AnyArchitecture(config)
    context_length = min(settings.engine_context_length or architecture.max_positions or max_tokens, max_tokens)
    tensors = read_directory(directory, architecture)
    if not is_own:
        model = AnyModel(architecture, tensors, dtype, device, context_length, end_ids)
        cache = StateCache(max_tokens, max_running, joins=model.joins, keeps=model.continues, end_ids=end_ids)
        return model, cache
    own = Model(config, tensors, dtype, device, context_length)
    return own, KVCache(architecture, max_tokens, max_running, dtype, device)


def end_token_ids(directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the end tokens of the model, of its generation settings, and of the tokenizer."""
    sources = [config.get_text_config(decoder=True).eos_token_id, tokenizer.eos_token_id]
    if (directory / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(directory).eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update([source] if isinstance(source, int) else source or [])
    return frozenset(ids)
