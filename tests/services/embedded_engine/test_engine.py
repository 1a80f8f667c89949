"""The engine's thread: what runs beside what, who waits, what happens when weights change or the engine fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.embedded_engine.engine import EngineStoppedError
from services.embedded_engine.model import Model
from services.embedded_engine.scheduler import Request, Sequence
from tests.services.embedded_engine.conftest import PROMPT, RunningEngine
from tests.tolerance import both_types, logprob_tolerance
from tests.waiting import IDLE_SECONDS

MakeEngine = Callable[..., RunningEngine]


def outputs(request: Request) -> list[tuple[list[int], list[float]]]:
    return [(sequence.output_ids, sequence.logprobs) for sequence in request.sequences]


class Gate:
    """Holds a request's first sequence after its k-th token, in the engine's thread."""

    def __init__(self, tokens: int = 3) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()
        self._tokens = tokens

    def __call__(self, sequence: Sequence) -> None:
        if sequence.number == 0 and len(sequence.output_ids) == self._tokens and not self.reached.is_set():
            self.reached.set()
            assert self.released.wait(IDLE_SECONDS)


def held(engine: RunningEngine, tokens: int = 3, **fields: Any) -> tuple[Gate, Future[Request]]:
    """A request that is in mid-generation."""
    gate = Gate(tokens)
    done = engine.submit(on_progress=gate, **{"max_new_tokens": 30, **fields})
    assert gate.reached.wait(IDLE_SECONDS)
    return gate, done


@pytest.fixture(scope="module")
def other_weights(tiny_model: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    names = model.state_dict().items()
    return {name: t + 0.05 * torch.randn_like(t) for name, t in names if name != "lm_head.weight"}


# --- seeds and batching ----------------------------------------------------------------------------------------------


@both_types
def test_a_seed_gives_the_same_tokens_and_logprobs_whatever_else_runs(engine: RunningEngine) -> None:
    alone = outputs(engine.generate(n=4, sampling_seed=11, temperature=1.5, max_new_tokens=40))
    others = [
        engine.submit([2 + i, 12, 3], n=1 + i % 5, max_new_tokens=3 + 5 * i, temperature=1.0 + i / 10)
        for i in range(12)
    ]
    again = engine.submit(n=4, sampling_seed=11, temperature=1.5, max_new_tokens=40)
    others += [engine.submit([2 + i] * (1 + 7 * i), n=2, top_p=0.9, max_new_tokens=20) for i in range(8)]
    assert outputs(again.result(IDLE_SECONDS)) == alone
    assert len({tuple(ids) for ids, _ in alone}) > 1
    for other in others:
        other.result(IDLE_SECONDS)


def test_without_a_seed_completions_differ(engine: RunningEngine) -> None:
    first, second = (outputs(engine.generate(n=4, temperature=2.0, max_new_tokens=20)) for _ in range(2))
    assert first != second


@both_types
def test_a_group_larger_than_the_engine_holds_is_computed_in_turns_with_the_same_result(
    engine: RunningEngine, make_engine: MakeEngine
) -> None:
    wanted = outputs(engine.generate(n=9, sampling_seed=4, max_new_tokens=12))
    small = make_engine(engine_max_running_requests=2)
    assert outputs(small.generate(n=9, sampling_seed=4, max_new_tokens=12)) == wanted


def test_a_prompt_is_computed_once_for_all_its_completions(make_engine: MakeEngine) -> None:
    small = make_engine(engine_max_running_requests=3)
    before = small.engine.stats()["prompt_tokens"]
    done = small.generate(n=8, max_new_tokens=10)
    assert small.engine.stats()["prompt_tokens"] - before == len(PROMPT)
    assert [sequence.cached_tokens for sequence in done.sequences] == [0] + [len(PROMPT)] * 7


def test_sequences_take_no_more_rows_and_tokens_than_there_are(make_engine: MakeEngine) -> None:
    running: list[int] = []
    small = make_engine(engine_max_total_tokens=512)

    def watch(sequence: Sequence) -> None:
        running.append(small.engine.stats()["running"])

    # A row of 4 + 120 tokens takes 128 of the 512.
    small.generate(n=20, max_new_tokens=120, on_progress=watch)
    assert max(running) == 4
    running.clear()
    small.generate(n=20, max_new_tokens=60, on_progress=watch)
    assert max(running) == 8


def test_long_and_short_requests_share_the_memory_and_keep_their_results(
    engine: RunningEngine, make_engine: MakeEngine
) -> None:
    asked = [
        ([2 + i] * (1 + 20 * (i % 4)), {"n": 3, "max_new_tokens": 10 + 30 * (i % 3), "sampling_seed": i})
        for i in range(8)
    ]
    wanted = [outputs(engine.generate(prompt, **fields)) for prompt, fields in asked]
    small = make_engine(engine_max_total_tokens=600, engine_max_running_requests=5)
    pending = [small.submit(prompt, **fields) for prompt, fields in asked]
    assert [outputs(done.result(IDLE_SECONDS)) for done in pending] == wanted


@both_types
def test_prompt_logprobs_come_with_a_completion(engine: RunningEngine) -> None:
    both = engine.generate(logprob_start=0, max_new_tokens=2)
    alone = engine.generate(logprob_start=0, max_new_tokens=0)
    assert both.input_logprobs == alone.input_logprobs
    assert alone.input_logprobs[0] is None
    assert len(alone.input_logprobs) == len(PROMPT)
    later = engine.generate(logprob_start=2, max_new_tokens=0)
    assert later.input_logprobs == [None, alone.input_logprobs[3]]


# --- limits and aborts -----------------------------------------------------------------------------------------------


def test_an_abort_ends_running_and_waiting_sequences_with_what_they_have(make_engine: MakeEngine) -> None:
    small = make_engine(engine_max_running_requests=1)
    gate, running = held(small, rid="a")
    waiting, other = small.submit(rid="b"), small.submit(rid="c")
    ended = small.engine.abort(lambda sequence: sequence.request.rid in ("a", "b"), "enough")
    gate.released.set()
    assert ended.result(IDLE_SECONDS) == 2
    first, second = running.result(IDLE_SECONDS).sequences[0], waiting.result(IDLE_SECONDS).sequences[0]
    assert len(first.output_ids) == len(first.logprobs) == 3
    assert second.output_ids == []
    assert first.finish == second.finish == {"type": "abort", "message": "enough"}
    assert other.result(IDLE_SECONDS).sequences[0].finish == {"type": "length", "length": 8}


def test_a_stop_string_ends_a_completion_at_any_place(engine: RunningEngine) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 6, "skip_special_tokens": False}
    first, second = engine.generate(**greedy).sequences[0].output_ids[:2]
    # The whole first token and the beginning of the second.
    stop = engine.loaded.decode_text([first], False) + engine.loaded.decode_text([second], False)[0]
    sequence = engine.generate(**greedy, stop=["never this", stop]).sequences[0]
    assert sequence.finish == {"type": "stop", "matched": stop}
    assert sequence.output_ids == [first, second]


# --- pauses and weights ----------------------------------------------------------------------------------------------


def test_weights_change_only_once_nothing_runs_and_nothing_is_let_in_before(
    engine: RunningEngine, other_weights: dict[str, torch.Tensor]
) -> None:
    gate, running = held(engine)
    changed = engine.engine.change_weights(engine.loaded.pack(dict(other_weights)), "1")
    late = engine.submit()
    gate.released.set()
    changed.result(IDLE_SECONDS)
    assert running.result(IDLE_SECONDS).sequences[0].versions == [("0", 0)]
    assert late.result(IDLE_SECONDS).sequences[0].versions == [("1", 0)]
    assert engine.engine.version == "1"


@both_types
def test_retracted_sequences_go_on_with_new_weights_throughout(
    engine: RunningEngine, other_weights: dict[str, torch.Tensor], compute_type: str
) -> None:
    gate, running = held(engine, tokens=5, max_new_tokens=12)
    paused = engine.engine.pause("retract")
    gate.released.set()
    assert paused.result(IDLE_SECONDS) == 1
    engine.engine.change_weights(engine.loaded.pack(dict(other_weights)), "2").result(IDLE_SECONDS)
    engine.engine.resume()
    sequence = running.result(IDLE_SECONDS).sequences[0]
    assert sequence.versions == [("0", 0), ("2", 5)]
    # Computed anew: what follows is what the new weights alone give after the same tokens.
    rescored = engine.generate([*PROMPT, *sequence.output_ids], logprob_start=0, max_new_tokens=0).input_logprobs
    assert sequence.logprobs[5:] == pytest.approx(rescored[len(PROMPT) + 5 :], abs=logprob_tolerance(compute_type))


# --- failures --------------------------------------------------------------------------------------------------------


@both_types
def test_logits_that_are_not_finite_abort_the_completion_and_leave_no_trace(
    engine: RunningEngine, other_weights: dict[str, torch.Tensor], tiny_model: Path
) -> None:
    wanted = outputs(engine.generate(n=2, sampling_seed=1))
    broken = {name: tensor.clone() for name, tensor in other_weights.items()}
    broken["model.layers.1.self_attn.v_proj.bias"][:] = torch.nan
    engine.engine.change_weights(engine.loaded.pack(broken), "1").result(IDLE_SECONDS)
    sequence = engine.generate().sequences[0]
    assert sequence.finish == {"type": "abort", "message": "the model's logits are not finite"}
    assert sequence.logprobs == []
    weights = engine.loaded.read_weights(tiny_model)
    engine.engine.change_weights(weights, "2").result(IDLE_SECONDS)
    assert outputs(engine.generate(n=2, sampling_seed=1)) == wanted


def test_a_failing_step_ends_the_engine_and_tells_everyone_who_waits(
    engine: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, running = held(engine)
    waiting = engine.submit()

    def fail(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Model, "decode", fail)
    gate.released.set()
    for done in (running, waiting):
        with pytest.raises(EngineStoppedError):
            done.result(IDLE_SECONDS)
    engine.engine.stop()
    assert [str(error) for error in engine.failures] == ["out of memory"]
    with pytest.raises(EngineStoppedError):
        engine.submit()
