"""Loading of MODEL_NAME: its configuration, its tokenizer, and its weights with the trainer's attention.

Parameters are published under their names in MODEL_NAME's checkpoint, which are those that engines load. transformers
keeps some differently: for example, it fuses the experts of a layer into ``mlp.experts.gate_up_proj``, where the
checkpoint has ``mlp.experts.0.gate_proj.weight`` and so on. An engine skips unknown names without an error and would
keep old weights, so ``check_names`` compares them at the start.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    get_model_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.pytorch_utils import Conv1D
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, cached_file

from services.core import machine
from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.machine import Compute
from services.core.models import attention_option
from trainer.config import Layout, TrainerSettings
from trainer.model.attention import TREE_ATTENTION, has_plain_scores, obstacle_to_trees
from trainer.model.gathering import plain_name
from trainer.model.logprobs import check_logits
from trainer.model.ranks import Ranks
from trainer.model.recurrent import check_states, is_recurrent, share_states

log = get_logger(__name__)

LORA_TARGETS = "all-linear"


@dataclass(frozen=True)
class Description:
    """The configuration and tokenizer of MODEL_NAME, and the digest of its weights."""

    config: PretrainedConfig
    """That of the whole checkpoint, which may be an image model's."""
    config_file: dict[str, Any]
    """The content of the checkpoint's config.json."""
    tokenizer: PreTrainedTokenizerBase
    weights_digest: str
    """See the function of this name."""
    untrained: Path | None = None
    """The file with the tensors of an image model that the trainer does not load, such as its vision tower."""

    @property
    def special_tokens(self) -> tuple[set[int], set[int]]:
        """The ids of the special tokens, and those of them that end a text."""
        added = self.tokenizer.added_tokens_decoder
        special = {*self.tokenizer.all_special_ids, *(token for token, content in added.items() if content.special)}
        ends = self.config.get_text_config().eos_token_id
        return special, {self.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def choose_compute(settings: TrainerSettings, ranks: Ranks) -> Compute:
    """Return the device and the type of numbers to compute with, the same type on every rank. A collective."""
    lacks_bfloat16 = not machine.multiplies_bfloat16(torch.cpu.get_capabilities())
    return machine.decide_compute(
        "COMPUTE_TYPE",
        settings.wanted_compute,
        device=ranks.device.type,
        multiplies_bfloat16=not ranks.any(lacks_bfloat16),
        threads=torch.get_num_threads(),
    )


def load_config(settings: TrainerSettings) -> PretrainedConfig:
    """Load MODEL_NAME's configuration; of an image model, that of its language model, which alone is trained.

    Raises:
        ConfigurationError: it cannot be loaded.
    """
    with _as_configuration_error(settings.model_name):
        whole = AutoConfig.from_pretrained(settings.model_name, trust_remote_code=settings.trust_remote_code)
    config = whole.get_text_config()
    if config is not whole:
        _find_text(config.model_type)
    return config


def _find_text(kind: str) -> None:
    """Have transformers leave out, and write again, the prefix of a language model's tensors in an image checkpoint."""
    known = get_checkpoint_conversion_mapping(kind) or []
    if not any(isinstance(change, PrefixChange) for change in known):
        prefixes = [PrefixChange(prefix_to_remove="language_model", model_prefix=model) for model in ("model", None)]
        register_checkpoint_conversion_mapping(kind, [*known, *prefixes], overwrite=True)


def choose_layout(settings: TrainerSettings, configs: Iterable[PretrainedConfig]) -> Layout:
    """Return the layout of micro-batches that models read, the policy's first: trees only if each can be computed so.

    Raises:
        ConfigurationError: LAYOUT=tree and one of them cannot, or CONTEXT_PARALLEL_SIZE and the layout is rows or one
            of them has recurrent layers.
    """
    configs = list(configs)
    obstacles = [f"{config.model_type} {reason}" for config in configs if (reason := obstacle_to_trees(config))]
    if settings.layout is Layout.TREE and obstacles:
        raise ConfigurationError(f"LAYOUT=tree: {obstacles[0]}; set LAYOUT=auto or rows")
    is_rows = settings.layout is Layout.ROWS or bool(obstacles)
    reasons = obstacles + ["LAYOUT is rows"] * is_rows
    reasons += [f"{config.model_type} has recurrent layers" for config in configs if is_recurrent(config)]
    if reasons and settings.context_parallel_size > 1:
        raise ConfigurationError(
            f"CONTEXT_PARALLEL_SIZE={settings.context_parallel_size} needs LAYOUT=tree and layers of attention, and "
            f"{reasons[0]}; set it to 1"
        )
    if settings.attention_kernel == "flash" and (is_rows or not all(map(has_plain_scores, configs))):
        raise ConfigurationError(
            "ATTENTION_KERNEL=flash needs LAYOUT=tree and attention without windows, caps or sinks; set it to triton"
        )
    return Layout.ROWS if is_rows else Layout.TREE


def load_model(settings: TrainerSettings, materialise: bool) -> PreTrainedModel:
    """Load MODEL_NAME in float32, for the settings' layout; without ``materialise``, its parameters have no data.

    Raises:
        ConfigurationError: the model cannot be loaded, or its logits are not what the trainer would compute.
    """
    options = {"dtype": torch.float32, "trust_remote_code": settings.trust_remote_code}
    config = load_config(settings)
    if settings.layout is not Layout.ROWS:
        options["attn_implementation"] = TREE_ATTENTION
    else:
        options |= attention_option(config)
    with _as_configuration_error(settings.model_name):
        if materialise:
            model = AutoModelForCausalLM.from_pretrained(settings.model_name, config=config, **options)
        else:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, **options)
    has_states = settings.layout is not Layout.ROWS and is_recurrent(config)
    if has_states:
        share_states(model)
    if materialise:
        check_logits(model)
        if has_states:
            check_states(decoder_layers(model.base_model), config.hidden_size)
    return cast("PreTrainedModel", model)


def decoder_layers(decoder: PreTrainedModel) -> list[nn.Module]:
    """Return a decoder's layers, by the model's own list of the classes that must not be split.

    Raises:
        ConfigurationError: it has none.
    """
    kinds = set(decoder._no_split_modules or ())
    layers: list[nn.Module] = []
    seen: set[nn.Module] = set()
    for part in decoder.modules():
        if type(part).__name__ in kinds and part not in seen:
            layers.append(part)
            seen.update(part.modules())
    if not layers:
        raise ConfigurationError(
            f"MODEL_NAME: {decoder.config.model_type} does not say what its layers are (_no_split_modules); choose a "
            "model of another family"
        )
    return layers


def load_description(settings: TrainerSettings, digest: str) -> Description:
    """Load the configuration and tokenizer of MODEL_NAME, whose weights have the given digest.

    Raises:
        ConfigurationError: they cannot be loaded.
    """
    # Loaded again, because the model's own configuration names the trainer's attention and number format.
    name, trust = settings.model_name, settings.trust_remote_code
    with _as_configuration_error(name):
        return Description(
            AutoConfig.from_pretrained(name, trust_remote_code=trust),
            PretrainedConfig.get_config_dict(name)[0],
            AutoTokenizer.from_pretrained(name, trust_remote_code=trust),
            digest,
        )


def with_adapters(model: PreTrainedModel, settings: TrainerSettings) -> PreTrainedModel:
    """Return the model in PEFT's wrapper, with new LoRA adapters on every linear layer but the output head.

    Raises:
        ConfigurationError: the model's layers are of another kind.
    """
    from peft import LoraConfig, get_peft_model

    if any(isinstance(part, Conv1D) for part in model.modules()):
        raise ConfigurationError(
            f"LORA_RANK: {model.config.model_type} keeps its matrices the other way round, and adapters of those are "
            "not merged right; train it with LORA_RANK=0"
        )
    # Every rank creates adapters with the same seed; rank 0 sends its own to the others with the weights.
    torch.manual_seed(settings.seed)
    config = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"
    )
    return cast("PreTrainedModel", get_peft_model(model, config, autocast_adapter_dtype=False))


@contextmanager
def _as_configuration_error(model_name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ConfigurationError(
            f"MODEL_NAME: the model {model_name!r} cannot be loaded: {first_line} "
            "Give a Hugging Face name that this machine can reach, or a local model directory."
        ) from error


class ValueHead(nn.Linear):
    """A linear map from hidden states to values, all zeros, so that training starts with the value 0 everywhere."""

    def __init__(self, decoder: PreTrainedModel, ranks: Ranks) -> None:
        """Make a head for a decoder's states, with data on rank 0 only."""
        device = "cpu" if ranks.is_main else "meta"
        super().__init__(decoder.config.hidden_size, 1, device=device, dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Set weight and bias to zero."""
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Return the values [N] of the states [N, D]."""
        return super().forward(states).sum(1)


def count_parameters(module: nn.Module) -> int:
    """Return the number of a module's parameters, adapters included; shared ones count once."""
    return sum(parameter.numel() for parameter in module.parameters())


SAMPLES = 4096
"""Values read of each parameter, evenly spaced, so that a large model takes milliseconds a layer."""


def weights_digest(model: nn.Module) -> str:
    """Return a digest of samples of every parameter. It does not depend on the file format of the weights."""
    digest = hashlib.blake2b(digest_size=8)
    for name, parameter in model.named_parameters():
        values = parameter.detach().flatten()
        samples = values[:: max(values.numel() // SAMPLES, 1)].float().contiguous().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode() + samples.tobytes())
    return digest.hexdigest()


ROTARY = r"rotary_emb\.inv_freq$"
"""Tables in old checkpoints, which every program computes for itself."""

SHOWN = 5
"""Most names of each kind in a message."""


def in_checkpoint(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole parameters as the model's checkpoint has them, by transformers' own conversion in reverse.

    Args:
        model: the model, as ``from_pretrained`` made it.
        parameters: some of its parameters by name, with all those that lie in one tensor of the checkpoint.
    """
    converted: dict[str, Tensor] = revert_weight_conversion(model, dict(parameters))
    return converted


def kept_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that a model's checkpoint has, such as a layer's factor in Gemma 4 and biases of routers."""
    kept = {}
    for module_name, module in model.named_modules():
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                kept[plain_name(f"{module_name}.{name}")] = value
    return kept


def _meta_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a model's parameters and kept buffers without data."""
    parameters = ((name.replace(".base_layer", ""), x) for name, x in model.named_parameters() if "lora_" not in name)
    return {name: x.to("meta") for name, x in (*parameters, *kept_buffers(model).items())}


def check_names(model: PreTrainedModel, model_name: str, *, has_adapters: bool) -> None:
    """Compare the names that would be published with those of the checkpoint that the model was loaded from.

    A checkpoint without an index or safetensors header is not compared.

    Args:
        model: the model as loaded, before it gets adapters.
        model_name: MODEL_NAME.
        has_adapters: the run trains LoRA adapters, which have the names of the parameters that they adapt.

    Raises:
        ConfigurationError: names are missing or surplus, or engines could not load the adapters.
    """
    if not getattr(model, "_weight_conversions", None):
        # Nothing was converted; but engines load the family's usual names, even if transformers also loads its own.
        usual = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = [change for change in usual if not isinstance(change, PrefixChange)]
    with torch.no_grad():
        published = set(in_checkpoint(model, _meta_state(model)))
    plain = {name.replace("language_model.", "") for name in published}  # image checkpoints have the prefix
    if has_adapters and (fused := sorted(dict(model.named_parameters()).keys() - plain)):
        raise ConfigurationError(
            f"LORA_RANK: {model.config.model_type} keeps several tensors of its checkpoint in one parameter "
            f"({_listed('such as', fused)}), and engines load no adapters of those; train it with LORA_RANK=0"
        )
    files = _files_by_name(model_name)
    if files is None:
        log.warning("the names of the checkpoint's tensors cannot be read and compared", model=model_name)
        return
    there = set(files)
    if any("language_model." in name for name in there):  # An image checkpoint, whose other parts are kept.
        there = {name for name in there if "language_model." in name or name in published}
    tied = _tied(model)  # They may lie in the files once or twice.
    ignored = [re.compile(pattern) for pattern in (ROTARY, *(model._keys_to_ignore_on_load_unexpected or ()))]
    missing = [
        name for name in sorted(there - published - tied) if not any(pattern.search(name) for pattern in ignored)
    ]
    surplus = sorted(published - there - tied)
    if missing or surplus:
        raise ConfigurationError(
            f"MODEL_NAME: the tensors of {model_name} have other names than the trainer would publish, and engines "
            f"would silently keep old weights: {_listed('missing from what would be published', missing)}; "
            f"{_listed('not in the checkpoint', surplus)}. Choose a checkpoint in the format of its family"
        )


def _tied(model: PreTrainedModel) -> set[str]:
    """Return the names of parameters that share their data with another one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for alike in names.values() if len(alike) > 1 for name in alike}


def untrained_files(model: PreTrainedModel, model_name: str) -> dict[str, set[str]]:
    """Return the names of a checkpoint's tensors that are not among the model's parameters, by their file."""
    trained = set(in_checkpoint(model, _meta_state(model))) | _tied(model)
    found: dict[str, set[str]] = {}
    for name, file in (_files_by_name(model_name) or {}).items():
        if name not in trained:
            found.setdefault(file, set()).add(name)
    return found


def _files_by_name(model_name: str) -> dict[str, str] | None:
    """Return the file of each tensor of a checkpoint; None if they cannot be read without the weights."""
    for file in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        path = cached_file(
            model_name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is None:
            continue
        if file == SAFE_WEIGHTS_NAME:
            with safe_open(path, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), file)
        found: dict[str, str] = json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"]
        return found
    return None


def _listed(kind: str, names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{kind}: {', '.join(names[:SHOWN]) or 'none'}{more}"
