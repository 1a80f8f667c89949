"""Families that transformers computes: every sequence as if it were alone, by the trainer's log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from services.core.errors import ConfigurationError
from services.core.models import attention_option
from services.embedded_engine.adapters import read_adapter
from services.embedded_engine.any_model import AnyModel
from services.embedded_engine.families import is_known
from services.embedded_engine.loading import load
from services.embedded_engine.scheduler import Request, Sequence
from services.weights.digests import digest
from services.weights.policy_store import ADAPTER_NAME
from tests.adapters import adapted_logprobs, save_adapter
from tests.sequences import trained_sequence
from tests.services.embedded_engine.conftest import RunningEngine, settings_for
from tests.services.embedded_engine.test_engine import Gate
from tests.tolerance import both_types, logprob_tolerance
from tests.toy_models import noisy_model
from tests.trainer.model.test_rows import OTHERS
from tests.trainer.tiny import SHAPE, save_model
from tests.waiting import IDLE_SECONDS
from toys.arithmetic import build_tokenizer
from trainer.algorithm.attention_layout import PathRows
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.model.policy import Policy

CPU = torch.device("cpu")
TEMPERATURE = 0.7
SIZES = SHAPE | {"max_position_embeddings": 512, "intermediate_size": 64}
SERVED = {
    name: OTHERS.get(name, {})
    for name in (
        "qwen3_5_text",
        "gemma3_text",
        "gemma2",
        "gpt_oss",
        "lfm2",
        "gemma4_text",
        "qwen3_next",
        "mamba",
        "opt",
    )
}
SERVED["gemma4_text"] = SERVED["gemma4_text"] | {"vocab_size_per_layer_input": SIZES["vocab_size"]}
"""Delta nets, windows, caps, sinks, convolutions, shared keys and values, experts, no attention, learned positions."""
QUICK = ("qwen3_5_text",)
families = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SERVED]
)


@pytest.fixture
def compute_type() -> str:
    """Tokens are compared with those of other programs, which round otherwise in bfloat16."""
    return "float32"


def config_of(family: str) -> PretrainedConfig:
    return AutoConfig.for_model(family, **SIZES, **SERVED[family])


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(2, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def at(count: int, call: Callable[[], Any]) -> Callable[[Sequence], None]:
    """Return a watcher that makes the call when a sequence has so many tokens."""
    return lambda sequence: call() if len(sequence.output_ids) == count else None


def trainers_logprobs(model: Path, request: Request, temperature: float = TEMPERATURE) -> list[list[float]]:
    """The log-probabilities of each of a request's completions, by rows of the trainer."""
    options: dict[str, Any] = {"dtype": torch.float32, **attention_option(AutoConfig.from_pretrained(model))}
    policy = Policy(AutoModelForCausalLM.from_pretrained(model, **options).eval(), temperature)
    completions = [trained_sequence(s.output_ids, s.logprobs, [1.0] * len(s.output_ids)) for s in request.sequences]
    with torch.no_grad():
        logprobs = policy(pack([TrainingGroup(request.prompt_ids, completions, "group")], PathRows)).logprobs
    return [part.tolist() for part in logprobs.split([len(s.output_ids) for s in request.sequences])]


@families
@pytest.mark.parametrize("joins", [True, False], ids=["joined", "as computed alike"])
def test_tokens_and_log_probabilities_are_those_of_a_request_alone(
    family: str,
    joins: bool,
    tmp_path: Path,
    make_engine: Callable[..., RunningEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts of 1 to 300 tokens join while others run, in groups and alone; one is aborted, and rows move.

    Groups are decoded in batches either where the check finds that equal to the bit on this processor, or in any case.
    """
    if joins:
        monkeypatch.setattr(AnyModel, "_computes_rows_alike", lambda _: True)
    model = save_model(tmp_path, config_of(family))
    engine = make_engine(model)
    joined: dict[str, Future[Request]] = {}

    def join(name: str, count: int, **fields: Any) -> None:
        joined[name] = engine.submit(tokens(count, count), rid=name, sampling_seed=count, **fields)

    sampled = {"temperature": TEMPERATURE, "max_new_tokens": 24, "n": 3}
    greedy = {"temperature": 0.0, "max_new_tokens": 20}
    watchers = {
        4: lambda: join("one token", 1, **sampled),
        6: lambda: join("long", 300, **greedy),
        7: lambda: join("medium", 70, **sampled),
        9: lambda: join("short", 5, **greedy, on_progress=at(2, lambda: join("last", 33, **sampled))),
        15: lambda: engine.engine.abort(lambda sequence: sequence.request.rid == "first", "it is enough"),
    }

    def watch(sequence: Sequence) -> None:
        watchers.get(len(sequence.output_ids), lambda: None)()

    first = engine.submit(tokens(8, 0), rid="first", temperature=0.0, max_new_tokens=400, on_progress=watch)
    aborted = first.result(IDLE_SECONDS).sequences[0]
    assert aborted.finish is not None
    assert aborted.finish["type"] == "abort"
    together = {name: future.result(IDLE_SECONDS) for name, future in joined.items()}
    assert len(together) == 5
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for name, request in together.items():
        prompt, length = torch.tensor([request.prompt_ids]), len(request.prompt_ids)
        if name in ("long", "short"):
            options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            written = reference.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, length:]
            assert request.sequences[0].output_ids == written.tolist()
            wanted = trainers_logprobs(model, request, 1.0)
        else:
            group, one = (
                engine.generate(request.prompt_ids, sampling_seed=length, **sampled | {"n": n}) for n in (3, 1)
            )
            assert [s.output_ids for s in request.sequences] == [s.output_ids for s in group.sequences]
            assert [s.logprobs for s in request.sequences] == [s.logprobs for s in group.sequences]
            alone, joined = one.sequences[0], request.sequences[0]
            assert joined.output_ids == alone.output_ids
            assert joined.logprobs == pytest.approx(alone.logprobs, abs=1e-5 if joins else 0.0, rel=0)
            wanted = trainers_logprobs(model, request)
        for sequence, expected in zip(request.sequences, wanted, strict=True):
            assert sequence.logprobs == pytest.approx(expected, abs=1e-4)
    assert not engine.failures


def messages(seed: int, *lengths: int) -> list[int]:
    """Messages of such lengths, each of which ends with the end token."""
    return [token for part, length in enumerate(lengths) for token in [*tokens(length - 1, seed + 100 * part), 1]]


FIRST = messages(1, 70, 230, 10)
SIBLING = [*FIRST, 9, 1, *messages(3, 90)]
TURNS = {
    "first": (FIRST, 0),
    "its next turn": ([*FIRST, 5, 6, 1, *messages(2, 90)], 300),
    "another next turn": (SIBLING, 300),
    "the same again": (SIBLING, len(SIBLING) - 1),
    "the first again": (FIRST, 300),
    "one that departs after 70": ([*FIRST[:70], *tokens(20, 4)], 0),
    "one more": ([*FIRST[:70], *tokens(90, 5)], 70),
    "one long message": (tokens(330, 9), 0),
    "it goes on": ([*tokens(330, 9), 4], 256),
}
"""Prompts, and how many of their tokens are known by then. Pieces end after 256 tokens, or with a message after 64."""


@families
def test_a_later_prompt_computes_what_follows_a_kept_state_and_gives_what_it_gives_without(
    family: str, tmp_path: Path, make_engine: Callable[..., RunningEngine]
) -> None:
    model = save_model(tmp_path, config_of(family))
    engine = make_engine(model)
    fields = {"temperature": TEMPERATURE, "max_new_tokens": 6, "n": 2, "sampling_seed": 4}
    kept = {name: engine.generate(prompt, **fields) for name, (prompt, _) in TURNS.items()}
    for name, (prompt, cached) in TURNS.items():
        engine.engine.flush().result(IDLE_SECONDS)
        alone = engine.generate(prompt, **fields)
        assert (name, kept[name].sequences[0].cached_tokens) == (name, 0 if family == "mamba" else cached)
        assert alone.sequences[0].cached_tokens == 0
        for one, other in zip(kept[name].sequences, alone.sequences, strict=True):
            assert (one.output_ids, one.logprobs) == (other.output_ids, other.logprobs)
        for sequence, wanted in zip(alone.sequences, trainers_logprobs(model, alone), strict=True):
            assert sequence.logprobs == pytest.approx(wanted, abs=1e-4)


def test_kept_states_are_of_one_adapter_and_of_one_version(
    tmp_path: Path, make_engine: Callable[..., RunningEngine]
) -> None:
    model = save_model(tmp_path / "model", config_of("lfm2"))
    engine = make_engine(model)
    adapter = read_adapter(
        save_adapter(model, tmp_path / "adapter", 1, size=0.1), engine.loaded.model.architecture, CPU
    )
    engine.engine.change_adapter(adapter, ADAPTER_NAME).result(IDLE_SECONDS)

    def cached(use_adapter: bool) -> int:
        return engine.generate(FIRST, use_adapter=use_adapter).sequences[0].cached_tokens

    assert [cached(use) for use in (True, False, True, False)] == [0, 0, 300, 300]
    weights = engine.loaded.read_weights(save_model(tmp_path / "new", config_of("lfm2"), 1))
    engine.engine.change_weights(weights, "1").result(IDLE_SECONDS)
    assert engine.engine.stats()["prefix_cache_tokens"] == 0
    assert [cached(use) for use in (False, False)] == [0, 300]


@both_types
def test_a_model_that_ignores_its_state_where_several_tokens_come_computes_prompts_whole(
    tmp_path: Path, make_engine: Callable[..., RunningEngine], compute_type: str
) -> None:
    model = save_model(tmp_path, config_of("mamba"))
    engine = make_engine(model)
    for _ in range(2):
        request = engine.generate(FIRST, temperature=1.0)
        assert request.sequences[0].cached_tokens == 0
        wanted = adapted_logprobs(model, None, [*FIRST, *request.sequences[0].output_ids])[len(FIRST) - 1 :]
        assert request.sequences[0].logprobs == pytest.approx(wanted, abs=logprob_tolerance(compute_type))


@families
def test_weights_change_under_requests_which_go_on_with_the_new_ones(
    family: str, tmp_path: Path, make_engine: Callable[..., RunningEngine]
) -> None:
    """The memory of the states is given away and taken back, too."""
    old, new = (save_model(tmp_path / str(seed), config_of(family), seed) for seed in (0, 1))
    engine = make_engine(old)
    fields = {"temperature": TEMPERATURE, "n": 2, "max_new_tokens": 60}
    gate = Gate(9)
    pending = engine.submit(tokens(40, 1), sampling_seed=3, on_progress=gate, **fields)
    assert gate.reached.wait(IDLE_SECONDS)
    paused = engine.engine.pause("retract")
    gate.released.set()
    paused.result(IDLE_SECONDS)
    engine.engine.occupy(has_memory=False).result(IDLE_SECONDS)
    assert not engine.loaded.cache.has_memory
    weights = engine.loaded.read_weights(new)
    engine.engine.change_weights(weights, "5").result(IDLE_SECONDS)
    for tensor in weights.values():
        tensor.zero_()  # The engine keeps no memory of a file or of the trainer.
    served = {name: digest(tensor) for name, tensor in load_file(new / "model.safetensors").items()}
    assert engine.loaded.digests() == served
    engine.engine.occupy(has_memory=True).result(IDLE_SECONDS)
    engine.engine.resume().result(IDLE_SECONDS)
    request = pending.result(IDLE_SECONDS)
    before, after = (trainers_logprobs(model, request) for model in (old, new))
    for sequence, first, second in zip(request.sequences, before, after, strict=True):
        assert [version for version, _ in sequence.versions] == ["0", "5"]
        change = sequence.versions[1][1]
        assert 9 <= change < 60
        assert sequence.logprobs == pytest.approx(first[:change] + second[change:], abs=1e-4)
        assert second[:change] != pytest.approx(first[:change], abs=1e-2)


@both_types
def test_log_probabilities_of_a_prompt_and_of_bfloat16_are_those_of_the_model(
    tmp_path: Path, make_engine: Callable[..., RunningEngine], compute_type: str
) -> None:
    model = save_model(tmp_path, config_of("lfm2"))
    request = make_engine(model).generate(tokens(50, 1), logprob_start=0, max_new_tokens=30)
    wanted = adapted_logprobs(model, None, [*request.prompt_ids, *request.sequences[0].output_ids])
    given = [*request.input_logprobs[1:], *request.sequences[0].logprobs]
    assert given == pytest.approx(wanted, abs=logprob_tolerance(compute_type))


@pytest.mark.parametrize("family", ["qwen3_5_text", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_an_adapter_computes_what_peft_computes_for_those_who_ask(
    family: str, tmp_path: Path, make_engine: Callable[..., RunningEngine]
) -> None:
    model = save_model(tmp_path / "model", config_of(family))
    adapter = save_adapter(model, tmp_path / "adapter", 1, size=0.1)
    engine = make_engine(model)
    read = read_adapter(adapter, engine.loaded.model.architecture, CPU)
    engine.engine.change_adapter(read, ADAPTER_NAME).result(IDLE_SECONDS)
    both = [engine.submit(tokens(9, 1), use_adapter=use, sampling_seed=5) for use in (True, False)]
    adapted, plain = (future.result(IDLE_SECONDS) for future in both)
    for request, directory in ((adapted, adapter), (plain, None)):
        wanted = adapted_logprobs(model, directory, [*request.prompt_ids, *request.sequences[0].output_ids])
        assert request.sequences[0].logprobs == pytest.approx(wanted[8:], abs=1e-4)
    assert plain.sequences[0].logprobs != pytest.approx(adapted.sequences[0].logprobs, abs=1e-2)


IMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_5": (
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
        "model.language_model.",
    ),
    "gemma3": (
        {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2},
        "language_model.model.",
    ),
}


@pytest.mark.parametrize("family", IMAGES)
def test_of_a_model_of_images_the_text_model_alone_is_served(
    family: str, tmp_path: Path, make_engine: Callable[..., RunningEngine]
) -> None:
    """Its tensors have the names of the whole checkpoint, in the directory and in an update."""
    vision, prefix = IMAGES[family]
    text = config_of(f"{family}_text")
    model = noisy_model(text, matrices=0.1, vectors=0.1)
    whole = AutoConfig.for_model(family, text_config=text.to_dict(), vision_config=vision)
    whole.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    tensors = {name.replace("model.", prefix, 1): x for name, x in model.state_dict().items() if "lm_head" not in name}
    tensors |= {"model.visual.blocks.0.norm1.weight": torch.ones(16), "vision_tower.extra": torch.ones(3)}
    if not text.tie_word_embeddings:
        tensors["lm_head.weight"] = model.lm_head.weight.detach()
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    engine = make_engine(tmp_path)
    names = [name for name, _ in engine.loaded.model._decoder.named_parameters()]  # type: ignore[attr-defined]
    assert len(names) == sum(name.startswith(prefix) for name in tensors)

    def logprobs(factor: float) -> list[float]:
        ids = torch.tensor([tokens(9, 1)])
        with torch.inference_mode():
            for parameter in model.parameters():
                parameter.mul_(factor)
            scores = model(ids).logits[0].log_softmax(-1)
        return scores[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()

    def given() -> Any:
        return pytest.approx(engine.generate(tokens(9, 1), logprob_start=0).input_logprobs[1:], abs=1e-4)

    assert logprobs(1.0) == given()
    update = {name: 0.9 * x for name, x in load_file(tmp_path / "model.safetensors").items()}
    engine.engine.change_weights(engine.loaded.pack(update), "1").result(IDLE_SECONDS)
    assert logprobs(0.9) == given()
    text = {name: tensor for name, tensor in update.items() if "vis" not in name}
    assert engine.loaded.digests() == {name: digest(tensor) for name, tensor in text.items()}


def test_a_model_that_loses_its_state_between_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_model(tmp_path, config_of("qwen3_5_text"))
    monkeypatch.setattr(LinearAttentionLayer, "update_recurrent_state", lambda *_, **__: None)
    with pytest.raises(ConfigurationError, match=r"qwen3_5_text.* cannot be decoded token by token"):
        load(settings_for(model))


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_model_of_another_task_is_refused_by_name(family: str, tmp_path: Path) -> None:
    AutoConfig.for_model(family, **SHAPE).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=family):
        load(settings_for(tmp_path))


@pytest.mark.parametrize(
    ("family", "options", "known"),
    [
        ("llama", {}, True),
        ("qwen3_moe", {}, True),
        ("qwen3_5_text", {}, False),
        ("llama", {"hidden_act": "gelu"}, False),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16}, False),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, False),
    ],
)
def test_what_a_known_family_does_otherwise_is_left_to_transformers(
    family: str, options: dict[str, Any], known: bool, tmp_path: Path
) -> None:
    AutoConfig.for_model(family, **SHAPE, **options).save_pretrained(tmp_path)
    assert is_known(tmp_path) is known
