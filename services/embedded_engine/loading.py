"""Loading of a model for the embedded engine: configuration, tokenizer, weights, key-value cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from services.chat.prompts import ChatPrompts
from services.core import machine
from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.models import model_files
from services.embedded_engine.kv_cache import KVCache
from services.embedded_engine.model import Model, Weights, named_weights, pack_weights
from services.embedded_engine.weights import Architecture, WeightsError, read_directory
from services.engines.settings import EMBEDDED_MAX_TOTAL_TOKENS, EngineSettings
from services.weights.digests import digest

log = get_logger(__name__)

DEFAULT_MAX_RUNNING = 64


@dataclass(frozen=True)
class Loaded:
    """A model with its key-value cache and tokenizer."""

    model: Model
    cache: KVCache
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

    def read_weights(self, directory: Path) -> Weights:
        """Return the weights of a model directory, ready to replace the model's.

        Raises:
            WeightsError: the weights cannot be read or do not fit.
        """
        return self.pack(read_directory(directory, self.model.architecture))

    def pack(self, tensors: dict[str, Tensor]) -> Weights:
        """Return weights, ready to replace the model's, made of named tensors, which are removed from ``tensors``."""
        with torch.inference_mode():
            return pack_weights(self.model.architecture, tensors, self.model.dtype, self.model.device)

    def digests(self) -> dict[str, str]:
        """Return the digest of each tensor that the model computes with, by its name in a model directory."""
        with torch.inference_mode():
            named = named_weights(self.model.architecture, self.model.weights)
            return {name: digest(tensor) for name, tensor in named}


def load(settings: EngineSettings) -> Loaded:
    """Load MODEL_NAME.

    Raises:
        ConfigurationError: the model cannot be found, the embedded engine does not compute its architecture, or GPUs
            of this node are missing.
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
        architecture = Architecture(config)
        context_length = min(settings.engine_context_length or architecture.max_positions, max_tokens)
        max_running = settings.engine_max_running_requests or DEFAULT_MAX_RUNNING
        with torch.inference_mode():
            weights = pack_weights(architecture, read_directory(directory, architecture), dtype, device)
            model = Model(config, weights, dtype, device, context_length)
            cache = KVCache(architecture, max_tokens, max_running, dtype, device)
    except (WeightsError, OSError, ValueError) as error:
        raise ConfigurationError(f"MODEL_NAME={settings.model_name}: {error}") from error
    except MemoryError as error:
        raise ConfigurationError(
            f"MODEL_NAME={settings.model_name} with ENGINE_MAX_TOTAL_TOKENS={max_tokens} does not fit into memory "
            f"({error}); lower the number, or take a smaller model"
        ) from error
    machine.release_memory()
    return Loaded(model, cache, tokenizer, end_token_ids(directory, config, tokenizer))


def end_token_ids(directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the end tokens of the model, of its generation settings, and of the tokenizer."""
    sources = [config.eos_token_id, tokenizer.eos_token_id]
    if (directory / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(directory).eos_token_id)
    ids: set[int] = set()
    for source in sources:
        ids.update([source] if isinstance(source, int) else source or [])
    return frozenset(ids)
