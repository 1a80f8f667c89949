"""The policy: a transformers model, sharded over the ranks, that returns log-probabilities of packed groups."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import huggingface_hub.serialization._torch
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from services.core import compute
from services.core.compute import Compute
from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.weights.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from trainer.algorithm.packing import MicroBatch
from trainer.checkpoints.fingerprint import weights_digest
from trainer.checkpoints.volume import DiskFullError, writing
from trainer.config import CriticModel, TrainerSettings
from trainer.model.attention import TREE_ATTENTION
from trainer.model.checkpoint_names import check_names, in_checkpoint
from trainer.model.gathering import by_layer, gather, gather_state
from trainer.model.logprobs import token_logprobs
from trainer.model.ranks import Ranks
from trainer.model.reduce_scatter import PairwiseReduceScatter
from trainer.model.supported import FAMILIES, check_config, check_model

log = get_logger(__name__)

LORA_TARGETS = "all-linear"
# huggingface_hub logs every file that it saves, under its own path as the logger's name.
logging.getLogger(huggingface_hub.serialization._torch.__file__).setLevel(logging.WARNING)


@dataclass(frozen=True)
class Description:
    """The configuration and tokenizer of MODEL_NAME, and the digest of its weights."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    weights_digest: str
    """See ``weights_digest`` in trainer/checkpoints/fingerprint.py."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class PolicyOutputs(NamedTuple):
    """The outputs of the policy at a micro-batch's N trained tokens, float32."""

    logprobs: Tensor
    """[N]."""
    entropies: Tensor
    """[N], in nats."""
    values: Tensor | None
    """[N], of the state before each token; None without a value head."""


class Policy(nn.Module):
    """A causal language model with float32 master weights, sharded by FSDP2 over all ranks.

    A forward pass is a collective: every rank must call the policy equally often.
    """

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.compute: Compute | None = None
        """The device and the type of numbers; ``load_policy`` sets it."""
        self.temperature = temperature
        self.description: Description | None = None
        """The files to save with the weights; set on rank 0's policy in training only."""
        self.value_head: ValueHead | None = None
        """The critic's head on the policy's model; ``load_policy`` sets it for CRITIC=shared."""

    def forward(self, batch: MicroBatch, temperature: float | None = None) -> PolicyOutputs:
        """Return log-probabilities, entropies and values at a micro-batch's trained tokens.

        Args:
            batch: T packed tokens with N trained tokens.
            temperature: temperature of the distribution; by default that of sampling.
        """
        model = self._causal_lm()
        weight = cast("nn.Linear", model.get_output_embeddings()).weight
        temperature = self.temperature if temperature is None else temperature
        states = predicting_states(model.base_model, batch)
        logprobs, entropies = token_logprobs(states, weight, batch.targets, batch.state_ids, temperature)
        values = None if self.value_head is None else self.value_head(states).index_select(0, batch.state_ids)
        return PolicyOutputs(logprobs, entropies, values)

    def values(self, batch: MicroBatch) -> Tensor:
        """Return the values [N], float32, of the states before a micro-batch's trained tokens.

        A gradient flows to the value head only, which leaves the model as it is.
        """
        assert self.value_head is not None, "only the policy with a shared critic has values"
        with torch.no_grad():
            states = predicting_states(self._causal_lm().base_model, batch)
        return cast("Tensor", self.value_head(states).index_select(0, batch.state_ids))

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration."""
        return self._causal_lm().config

    @property
    def has_adapters(self) -> bool:
        """True when the run trains LoRA adapters."""
        return hasattr(self.model, "peft_config")

    def without_adapters(self) -> AbstractContextManager[Any]:
        """Return a context within which the policy computes without its LoRA adapters."""
        if not self.has_adapters:
            return nullcontext()
        return cast("AbstractContextManager[Any]", cast("Any", self.model).disable_adapter())

    def full_parameters(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole parameter by its name in MODEL_NAME's checkpoint; on rank 0 only. A collective.

        LoRA adapters are merged, in float32, and tied weights come once. A layer is freed before the
        next one is gathered.
        """
        gathered_type = torch.float32 if self.has_adapters else dtype
        with torch.no_grad():
            for layer in by_layer(self.model.named_parameters()):
                whole = self._merged({plain_name(name): x for name, x in gather(layer, gathered_type).items()})
                for name, value in in_checkpoint(self._causal_lm(), whole).items():
                    yield name, value.to(dtype)

    def adapter_parameters(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter of the LoRA adapters, whole, by its name in PEFT's files; on rank 0. A collective."""
        adapters = {name: x for name, x in self.model.named_parameters() if "lora_" in name}
        for name, value in gather(adapters, dtype).items():
            yield plain_name(name).replace(".default.", "."), value

    def adapter_config(self) -> dict[str, Any]:
        """Return PEFT's configuration of the LoRA adapters, as far as it changes what is computed."""
        config = cast("Any", self.model).peft_config["default"]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": config.base_model_name_or_path,
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "target_modules": sorted(config.target_modules),
            "inference_mode": True,
        }

    def _merged(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's parameters by the names that they have without LoRA adapters, which are merged."""
        if not self.has_adapters:
            return whole
        merged = {}
        for name, value in whole.items():
            stem, _, rest = name.partition(".base_layer.")
            if rest == "weight":
                a, b = (whole[f"{stem}.lora_{side}.default.weight"] for side in "AB")
                value = value + b @ a * float(cast("Any", self.model.get_submodule(stem)).scaling["default"])
            if "lora_" not in name:
                merged[name.removeprefix("base_model.model.").replace(".base_layer", "")] = value
        return merged

    def _causal_lm(self) -> PreTrainedModel:
        return cast("PreTrainedModel", cast("Any", self.model).get_base_model() if self.has_adapters else self.model)


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


def predicting_states(decoder: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the hidden states [U, D], in the compute type, from which a micro-batch's tokens are predicted."""
    layout = batch.layout.prepared(cast("nn.Embedding", decoder.get_input_embeddings()).weight.dtype)
    inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
    states = decoder(**inputs, use_cache=False, layout=layout).last_hidden_state[0]
    # The gradient of index_select adds rows in parallel; that of indexing sorts them first.
    return cast("Tensor", states.index_select(0, batch.predict_rows))


def load_policy(settings: TrainerSettings, ranks: Ranks, *, trainable: bool = True) -> Policy:
    """Load MODEL_NAME and shard it. Rank 0 reads the weights, and the other ranks receive their shards from it.

    Raises:
        ConfigurationError: the model cannot be loaded, or its architecture is not supported.
    """
    chosen = choose_compute(settings, ranks)
    if trainable:
        log.info("computing", **vars(chosen))
    model = load_model(settings, materialise=ranks.is_main)
    if trainable:
        check = partial(check_names, model, settings.model_name, has_adapters=settings.lora_rank > 0)
        ranks.on_main(check, ConfigurationError)
    digest = weights_digest(model) if trainable and ranks.is_main else ""
    ranks.wait_for_main()
    if trainable and settings.lora_rank:
        model = _with_adapters(model, settings)
    policy = Policy(model, settings.temperature)
    policy.compute = chosen
    if trainable and ranks.is_main:
        policy.description = _load_description(settings, digest)
    # No dropout: the engine that sampled has none either.
    policy.eval().requires_grad_(trainable and not settings.lora_rank)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(trainable)
    decoder = cast("PreTrainedModel", policy._causal_lm().base_model)
    if trainable and settings.has_critic and settings.critic is CriticModel.SHARED:
        policy.value_head = ValueHead(decoder, ranks)
    has_checkpointing = trainable and settings.activation_checkpointing is True
    shard(policy, decoder, settings, ranks, chosen, has_checkpointing=has_checkpointing)
    register_fsdp_forward_method(policy, "values")
    return policy


def choose_compute(settings: TrainerSettings, ranks: Ranks) -> Compute:
    """Return the device and the type of numbers to compute with, the same type on every rank. A collective."""
    lacks_bfloat16 = not compute.multiplies_bfloat16(torch.cpu.get_capabilities())
    return compute.decide(
        "COMPUTE_TYPE",
        settings.compute_type,
        device=ranks.device.type,
        multiplies_bfloat16=not ranks.any(lacks_bfloat16),
        threads=torch.get_num_threads(),
    )


def save_pretrained(policy: Policy, ranks: Ranks, directory: Path, dtype: torch.dtype) -> None:
    """Write a model directory that ``AutoModelForCausalLM.from_pretrained`` and every engine load. A collective.

    Raises:
        DiskFullError: the disk is full; raised on every rank.
    """
    # No copy on a CPU: everything is written before the parameters change.
    state = gather_state(policy.full_parameters(dtype), ranks, copy=False)
    ranks.on_main(lambda: write_model(policy, state, directory, dtype), DiskFullError)


def write_model(policy: Policy, state: dict[str, Tensor], directory: Path, dtype: torch.dtype) -> None:
    """Write a model directory: weights, configuration, generation defaults and tokenizer. For rank 0.

    Raises:
        DiskFullError: the disk is full.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(state, directory, metadata={"format": "pt"})
        _save_description(policy, directory, dtype)


def write_adapter(policy: Policy, state: dict[str, Tensor], directory: Path) -> None:
    """Write a directory with the LoRA adapters, which PEFT and every engine load beside MODEL_NAME. For rank 0.

    Raises:
        DiskFullError: the disk is full.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        save_file(state, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        (directory / CONFIG_FILE).write_text(json.dumps(policy.adapter_config(), indent=2))


def _save_description(policy: Policy, directory: Path, dtype: torch.dtype) -> None:
    assert policy.description is not None, "only rank 0 saves, and only the policy in training"
    config = copy.deepcopy(policy.description.config)
    config.dtype = dtype
    config.architectures = [type(policy._causal_lm()).__name__]
    config.save_pretrained(directory)
    generation = getattr(policy._causal_lm(), "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)
    policy.description.tokenizer.save_pretrained(directory)


def load_config(settings: TrainerSettings) -> PretrainedConfig:
    """Load MODEL_NAME's configuration.

    Raises:
        ConfigurationError: it cannot be loaded, or its architecture is not supported.
    """
    with _as_configuration_error(settings.model_name):
        config = AutoConfig.from_pretrained(settings.model_name, trust_remote_code=settings.trust_remote_code)
        check_config(config)
    return config


def load_model(settings: TrainerSettings, materialise: bool) -> PreTrainedModel:
    """Load MODEL_NAME with the trainer's attention, in float32; without ``materialise``, its parameters have no data.

    Raises:
        ConfigurationError: the model cannot be loaded, or its architecture is not supported.
    """
    trust = settings.trust_remote_code
    options = {"dtype": torch.float32, "attn_implementation": TREE_ATTENTION, "trust_remote_code": trust}
    config = load_config(settings)
    with _as_configuration_error(settings.model_name):
        if materialise:
            model = AutoModelForCausalLM.from_pretrained(settings.model_name, config=config, **options)
        else:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, **options)
    check_model(model)
    return cast("PreTrainedModel", model)


def _load_description(settings: TrainerSettings, digest: str) -> Description:
    # Loaded again, because the model's own configuration names the trainer's attention and number format.
    name, trust = settings.model_name, settings.trust_remote_code
    with _as_configuration_error(name):
        return Description(
            AutoConfig.from_pretrained(name, trust_remote_code=trust),
            AutoTokenizer.from_pretrained(name, trust_remote_code=trust),
            digest,
        )


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


def _with_adapters(model: PreTrainedModel, settings: TrainerSettings) -> PreTrainedModel:
    from peft import LoraConfig, get_peft_model

    # Every rank creates adapters with the same seed; rank 0 sends its own to the others with the weights.
    torch.manual_seed(settings.seed)
    config = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"
    )
    return cast("PreTrainedModel", get_peft_model(model, config, autocast_adapter_dtype=False))


def shard(
    module: nn.Module,
    decoder: PreTrainedModel,
    settings: TrainerSettings,
    ranks: Ranks,
    chosen: Compute,
    *,
    has_checkpointing: bool,
) -> None:
    """Shard a module over the ranks, which receive their parts from rank 0.

    Args:
        module: the module, with data on rank 0 only.
        decoder: the part of it with the list of layers; each layer is sharded by itself.
        settings: SHARD_PARAMETERS.
        ranks: all ranks.
        chosen: the type of numbers to compute with. A value head computes in float32.
        has_checkpointing: recompute layers in the backward pass.

    Raises:
        ConfigurationError: the decoder has no list of layers.
    """
    layers = _decoder_layers(decoder)
    if ranks.device.type == "cuda":
        compile_layers(layers)
    if has_checkpointing:
        apply_activation_checkpointing(module, check_fn=lambda part: part in layers)
        layers = _decoder_layers(decoder)
    # Rank 0's weights stay on the host. fully_shard moves one layer at a time to the device; loading moves one tensor.
    state = module.state_dict() if ranks.is_main and ranks.world_size > 1 else {}
    _fully_shard(module, layers, settings, ranks, chosen)
    if ranks.world_size > 1:
        _receive(module, state, ranks)


def _fully_shard(
    module: nn.Module, layers: Sequence[nn.Module], settings: TrainerSettings, ranks: Ranks, chosen: Compute
) -> None:
    """Apply FSDP2 to each layer, to value heads and to the rest of a module."""
    precision = MixedPrecisionPolicy(param_dtype=getattr(torch, chosen.compute_type), reduce_dtype=torch.float32)
    frees = settings.shard_parameters is not False
    for layer in layers:
        fully_shard(layer, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=frees)
    heads = [part for part in module.modules() if isinstance(part, ValueHead)]
    for head in heads:
        exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
        fully_shard(head, mesh=ranks.mesh, mp_policy=exact, reshard_after_forward=False)
    fully_shard(module, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=False)
    if ranks.device.type == "cpu":
        for part in (*layers, *heads, module):
            cast("FSDPModule", part).set_custom_reduce_scatter(PairwiseReduceScatter())
            # gloo has no mean.
            cast("FSDPModule", part).set_force_sum_reduction_for_comms(ranks.mesh.ndim > 1)


def _receive(module: nn.Module, state: dict[str, Any], ranks: Ranks) -> None:
    """Receive a rank's shards of ``state``, which is empty on all ranks but rank 0, and the buffers."""
    if not ranks.is_main:
        module.to_empty(device=ranks.device)
    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # A state dict does not contain rotary frequencies, which are buffers.
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
    cast("FSDPModule", module).set_requires_gradient_sync(True)


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile the forward pass of decoder layers for CUDA at their first call, with attention as one kernel.

    All layers share one graph, in which the lengths of micro-batches are variables. The hooks of FSDP, which run before
    and after ``forward``, stay outside of it.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _decoder_layers(decoder: PreTrainedModel) -> list[nn.Module]:
    layers = getattr(decoder, "layers", None)
    if layers is None:
        raise ConfigurationError(
            f"MODEL_NAME: {decoder.config.model_type} has no list of decoder layers named `layers`; "
            f"choose a model of another family ({FAMILIES})"
        )
    return list(layers)


def whole_parameters(module: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole parameter of a sharded module by its name; on rank 0 only. A collective."""
    for layer in by_layer(module.named_parameters()):
        for name, value in gather(layer, dtype).items():
            yield plain_name(name), value


def plain_name(name: str) -> str:
    """Return a parameter's name without the wrappers of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")
