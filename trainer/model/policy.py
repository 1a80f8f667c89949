"""The policy: a transformers model, sharded over the ranks, that returns log-probabilities of packed groups.

It also counts how evenly the routers of a mixture of experts share the trained tokens among these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PretrainedConfig, PreTrainedModel

from services.core.errors import ConfigurationError
from services.core.logs import get_logger
from services.core.machine import Compute, ComputeType
from trainer.algorithm.attention_layout import PathRows
from trainer.algorithm.packing import Context, MicroBatch
from trainer.config import CriticModel, PublishedType, TrainerSettings
from trainer.model.attention import SharedLayout, windows_of
from trainer.model.gathering import by_layer, gather, plain_name
from trainer.model.loading import (
    Description,
    ValueHead,
    check_names,
    choose_compute,
    in_checkpoint,
    kept_buffers,
    load_config,
    load_description,
    load_model,
    weights_digest,
    with_adapters,
)
from trainer.model.logprobs import Lesson, LogitForm, divergence, token_logprobs, top_overlap
from trainer.model.ranks import Ranks
from trainer.model.recurrent import is_recurrent
from trainer.model.rounding import Masters, NearestRounding, Rounding, UnbiasedRounding
from trainer.model.sharding import reshard, shard

log = get_logger(__name__)


def load_policy(
    settings: TrainerSettings, ranks: Ranks, *, trainable: bool = True, is_described: bool | None = None
) -> Policy:
    """Load MODEL_NAME and shard it. Rank 0 reads the weights, and the other ranks receive their shards from it.

    Args:
        settings: name the model and what is trained of it.
        ranks: all ranks.
        trainable: the model is the policy in training; otherwise it is frozen.
        is_described: rank 0's policy gets a description. Unset: that in training does.

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
    is_described = ranks.is_main and (trainable if is_described is None else is_described)
    digest = weights_digest(model) if is_described else ""
    ranks.wait_for_main()
    if trainable and settings.lora_rank:
        model = with_adapters(model, settings)
    policy = Policy(model, settings.trained_temperature)
    policy.compute = chosen
    if is_described:
        policy.description = load_description(settings, digest)
    # No dropout: the engine that sampled has none either.
    freeze(policy.eval(), chosen, load_config(settings).dtype, trainable=trainable)
    decoder = cast("PreTrainedModel", policy.causal_lm().base_model)
    if trainable and settings.has_critic and settings.critic is CriticModel.SHARED:
        policy.value_head = ValueHead(decoder, ranks)
    shard(policy, decoder, settings, ranks, chosen)
    for method in ("values", "lesson", "overlap"):
        register_fsdp_forward_method(policy, method)
    if trainable and settings.publish_type is PublishedType.BFLOAT16:
        trained = ((plain_name(name), p) for name, p in policy.model.named_parameters() if p.requires_grad)
        # Adapters change much compared with their size.
        rounding = NearestRounding() if policy.has_adapters else UnbiasedRounding()
        policy.masters = Masters(trained, rounding, are_cast=chosen.compute_type is ComputeType.BFLOAT16)
    return policy


class PolicyOutputs(NamedTuple):
    """The outputs of the policy at a micro-batch's N trained tokens, float32."""

    logprobs: Tensor
    """[N]."""
    entropies: Tensor
    """[N], in nats."""
    values: Tensor | None
    """[N], of the state before each token; None without a value head."""
    divergence: Tensor | None = None
    """[1], the sum over the lessons of their divergences; see ``divergence`` in logprobs.py. None without lessons."""


class Policy(nn.Module):
    """A causal language model, sharded by FSDP2 over all ranks, whose trained weights are in float32.

    With PUBLISH_TYPE=bfloat16 their nearest bfloat16 numbers are the policy, except while ``masters`` are in place.

    A forward pass is a collective: every rank must call the policy equally often.
    """

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.compute: Compute | None = None
        """The device and the type of numbers; ``load_policy`` sets it."""
        self.temperature = temperature
        self.description: Description | None = None
        """The files to save with the weights; set on rank 0's policy in training and on its teachers only."""
        self.value_head: ValueHead | None = None
        """The critic's head on the policy's model; ``load_policy`` sets it for CRITIC=shared."""
        self.expert_load = ExpertLoad(model)
        self.masters = Masters()
        """The float32 masters of the trained weights; ``load_policy`` sets them if the weights are rounded."""

    def forward(
        self, batch: MicroBatch, temperature: float | None = None, lessons: Sequence[Lesson] = ()
    ) -> PolicyOutputs:
        """Return log-probabilities, entropies and values at a micro-batch's trained tokens.

        Args:
            batch: T packed tokens with N trained tokens.
            temperature: temperature of the distribution; by default that of sampling.
            lessons: the states of teachers, each with the weights of its tokens.
        """
        model = self.causal_lm()
        weight, form = output_head(model)
        temperature = self.temperature if temperature is None else temperature
        with self.expert_load.counting(batch):
            states = predicting_states(model.base_model, batch)
        targets = batch.of_own(batch.targets)
        logprobs, entropies = token_logprobs(states, weight, targets, batch.state_ids, temperature, form=form)
        values = None if self.value_head is None else of_tokens(self.value_head(states), batch)
        compared = [divergence(states, weight, lesson, temperature, form) for lesson in lessons]
        total = summed(torch.stack(compared).sum(0, keepdim=True), batch.context) if compared else None
        return PolicyOutputs(whole(logprobs, batch), whole(entropies, batch), values, total)

    @torch.no_grad()
    def lesson(self, batch: MicroBatch, token_weights: Tensor, beta: float) -> Lesson:
        """Return what a frozen policy teaches at a micro-batch's trained tokens, which have ``token_weights`` [N]."""
        model = self.causal_lm()
        states = predicting_states(model.base_model, batch)
        own = batch.of_own(token_weights)
        weights = own.new_zeros(len(states)).index_add_(0, batch.state_ids, own)
        weight, form = output_head(model)
        return Lesson(states, weight.detach(), weights, beta, form)

    @torch.no_grad()
    def overlap(self, batch: MicroBatch, lesson: Lesson, k: int) -> Tensor:
        """Return which share of the k most likely tokens is the teacher's, too, before each trained token, [N]."""
        model = self.causal_lm()
        weight, form = output_head(model)
        shares = top_overlap(predicting_states(model.base_model, batch), weight, lesson, k, form)
        return of_tokens(shares, batch)

    def values(self, batch: MicroBatch) -> Tensor:
        """Return the values [N], float32, of the states before a micro-batch's trained tokens.

        A gradient flows to the value head only, which leaves the model as it is.
        """
        assert self.value_head is not None, "only the policy with a shared critic has values"
        with torch.no_grad():
            states = predicting_states(self.causal_lm().base_model, batch)
        return of_tokens(self.value_head(states), batch)

    def causal_lm(self) -> PreTrainedModel:
        """Return the transformers model, without PEFT's wrapper around it."""
        return cast("PreTrainedModel", cast("Any", self.model).get_base_model() if self.has_adapters else self.model)

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration."""
        return self.causal_lm().config

    @property
    def has_adapters(self) -> bool:
        """True when the run trains LoRA adapters."""
        return hasattr(self.model, "peft_config")

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Let the policy compute without its LoRA adapters, if there are any, within the context."""
        if not self.has_adapters:
            yield
            return
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        with cast("Any", self.model).disable_adapter():
            # PEFT also freezes the adapters, and at the end thaws what is registered then. With SHARD_PARAMETERS=false
            # these are the gathered parameters, and the shards, which the optimizer has, would stay frozen.
            for parameter in trained:
                parameter.requires_grad_()
            yield

    def full_parameters(self, rounding: Rounding) -> Iterator[tuple[str, Tensor]]:
        """Yield every whole parameter by its name in MODEL_NAME's checkpoint; on rank 0 only. A collective.

        LoRA adapters are merged, in float32, and tied weights come once. A layer is freed before the
        next one is gathered. Buffers that the checkpoint has come last, in their own type.
        """
        gathered = Rounding(torch.float32) if self.has_adapters else rounding
        # A forward pass without a backward pass leaves gathered parameters in the compute type.
        reshard(self)
        with torch.no_grad():
            for layer in by_layer(self.model.named_parameters()):
                whole = self._merged({plain_name(name): x for name, x in gather(layer, gathered).items()})
                for name, value in in_checkpoint(self.causal_lm(), whole).items():
                    yield name, rounding(name, value) if self.has_adapters else value
            yield from in_checkpoint(self.causal_lm(), kept_buffers(self.causal_lm())).items()

    def adapter_parameters(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter of the LoRA adapters, whole, by its name in PEFT's files; on rank 0. A collective."""
        reshard(self)
        adapters = {name: x for name, x in self.model.named_parameters() if "lora_" in name}
        for name, value in gather(adapters, Rounding(dtype)).items():
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


def freeze(policy: Policy, chosen: Compute, file_type: torch.dtype | None, *, trainable: bool) -> None:
    """Freeze the parameters that are not trained, and keep them on a GPU in the compute type, where nothing is lost.

    That halves the shards of a reference or teacher, and of the base of LoRA adapters. This base is merged with the
    adapters in the end, so it stays in float32 unless its checkpoint has the compute type already.

    Args:
        policy: the policy in float32, before it is sharded and gets a value head.
        chosen: the device and the compute type.
        file_type: the type of the checkpoint's numbers by its configuration.
        trainable: False for a reference or a teacher.
    """
    compute_type = getattr(torch, chosen.compute_type)
    is_short = chosen.device == "cuda" and (not trainable or file_type == compute_type)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(trainable and ("lora_" in name or not policy.has_adapters))
        if is_short and not parameter.requires_grad:
            parameter.data = parameter.data.to(compute_type)


def output_head(model: PreTrainedModel) -> tuple[Tensor, LogitForm]:
    """Return a model's output embedding [V, D], and what it makes of its products with states."""
    return cast("nn.Linear", model.get_output_embeddings()).weight, LogitForm.of(model)


def predicting_states(decoder: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the hidden states [U, D], in the compute type, from which a micro-batch's tokens are predicted."""
    if isinstance(batch.layout, PathRows):
        rows = {"input_ids": batch.input_ids[batch.layout.paths], "attention_mask": batch.layout.mask()}
        states = decoder(**rows, use_cache=False).last_hidden_state.flatten(0, 1)
        return cast("Tensor", states.index_select(0, batch.layout.places[batch.predict_rows]))
    layout: Any = batch.layout.prepared(windows_of(decoder.config))
    if batch.context.size > 1:
        layout = SharedLayout(layout, batch.context.group, batch.context.rank)
    inputs = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None], "layout": layout}
    if is_recurrent(decoder.config):
        inputs["seq_idx"] = batch.segments
    states = decoder(**inputs, use_cache=False).last_hidden_state[0]
    # The gradient of index_select adds rows in parallel; that of indexing sorts them first.
    return cast("Tensor", states.index_select(0, batch.predict_rows))


def of_tokens(numbers: Tensor, batch: MicroBatch) -> Tensor:
    """Return the number [N] of the state before each trained token, from those of this rank's states, [U]."""
    return whole(numbers.index_select(0, batch.state_ids), batch)


def whole(numbers: Tensor, batch: MicroBatch) -> Tensor:
    """Return the numbers [N] of all trained tokens on every rank of a context group, from those of its own, [M].

    So each rank of the group computes the whole loss, and the gradient of it by the tokens that it predicts itself.
    """
    if batch.own is None:
        return numbers
    return summed(numbers.new_zeros(len(batch.targets)).index_copy(0, batch.own, numbers), batch.context)


def summed(part: Tensor, context: Context) -> Tensor:
    """Return the sum of the parts of a context group's ranks, whose gradient each rank's part gets as it is."""
    return part if context.size == 1 else cast("Tensor", _Sum.apply(part, context.group))  # type: ignore[no-untyped-call]  # torch's


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str) -> Tensor:
        return cast("Tensor", collectives.wait_tensor(collectives.all_reduce(part, "sum", cast("GroupName", group))))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


EXPERT_COLUMN = "expert_max_violation"
"""The metric's name in metrics.jsonl."""


class ExpertLoad:
    """Counts of the tokens that each layer's routers send to each expert.

    Counted are the states that predict trained tokens, once for each token. So padding and repeated prompts do not
    count, and layouts, micro-batches and ranks make no difference.
    """

    def __init__(self, model: nn.Module) -> None:
        """Watch the mixtures of a model: the modules with transformers' interface of experts."""
        self._mixtures: list[Any] = [
            part for part in model.modules() if hasattr(part, "has_gate") and hasattr(part, "num_experts")
        ]
        for mixture in self._mixtures:
            mixture.token_weights = mixture.expert_tokens = None
            mixture.register_forward_pre_hook(_count)

    @contextmanager
    def counting(self, batch: MicroBatch) -> Iterator[None]:
        """Count, within the context, what a forward pass with gradient chooses; its recomputation counts nothing."""
        if not self._mixtures or not torch.is_grad_enabled():
            yield
            return
        weights = _token_weights(batch)
        for mixture in self._mixtures:
            mixture.token_weights = weights
            if mixture.expert_tokens is None:
                mixture.expert_tokens = weights.new_zeros(mixture.num_experts)
        yield
        weights.zero_()

    def clear(self) -> None:
        """Forget the counts."""
        for mixture in self._mixtures:
            mixture.expert_tokens = None

    def take(self, ranks: Ranks) -> dict[str, float]:
        """Return the metric of what all ranks have counted, empty if that is nothing, and forget it. A collective.

        It is MaxVio, the largest load of an expert over the mean load, less 1 (Wang et al. 2024, arXiv:2408.15664), as
        a mean over the layers: 0 if all experts have equally much to do.
        """
        counts = [mixture.expert_tokens for mixture in self._mixtures if mixture.expert_tokens is not None]
        self.clear()
        if not counts:
            return {}
        total = torch.stack(ranks.gather_vectors(torch.cat(counts).cpu())).sum(0)
        loads = [load / load.mean() for load in total.split([len(count) for count in counts]) if load.any()]
        return {EXPERT_COLUMN: float(torch.stack([load.max() for load in loads]).mean()) - 1} if loads else {}


def _token_weights(batch: MicroBatch) -> Tensor:
    """Return how many trained tokens the state of each token of a forward pass predicts, float64."""
    rows, size = batch.predict_rows, len(batch.input_ids)
    if isinstance(batch.layout, PathRows):
        rows, size = batch.layout.places[rows], batch.layout.paths.numel()
    counts = torch.zeros(size, dtype=torch.float64, device=rows.device)
    return (
        counts
        if batch.is_filler
        else counts.index_add_(0, rows[batch.state_ids], counts.new_ones(len(batch.state_ids)))
    )


def _count(mixture: Any, arguments: tuple[Any, ...]) -> None:
    """Add the weights of tokens to the counts of the experts [T, K] that were chosen for them."""
    if torch.is_grad_enabled() and mixture.token_weights is not None and len(arguments) > 1:
        chosen = arguments[1].long()
        weights = mixture.token_weights[:, None].expand(-1, chosen.shape[-1])
        mixture.expert_tokens.scatter_add_(0, chosen.flatten(), weights.flatten())
