"""Measure the embedded engine beside transformers' continuous batching, in one process and in float32.

    python -m benchmarks.continuous_batching [--model DIR] [--threads N] [--rounds N]

Each round gives the same requests to one engine and then to the other. Both return log-probabilities, and both compute
a group's prompt once. On a machine with other work, tokens a processor second are the steadier figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks.common import harness
from benchmarks.common.engine import embedded_engine
from services.core.compute import ComputeType
from services.embedded_engine.compute.loading import Loaded, load
from services.embedded_engine.http.requests import SamplingParams
from services.embedded_engine.settings import EngineSettings

RUNNING = 64
# By default continuous batching takes 90% of the memory for its cache and masks; 640 pages hold 64 times 160 tokens.
CACHE = {"page_size": 16, "num_blocks": 640, "max_batch_tokens": 512, "max_requests_per_batch": RUNNING}


class Workload(NamedTuple):
    """Requests that are sent at once. No completion ends before its last token."""

    prompts: int
    completions: int
    tokens: int


WARM_UP = Workload(prompts=8, completions=8, tokens=2)
WORKLOADS = (Workload(prompts=8, completions=8, tokens=8), Workload(prompts=64, completions=1, tokens=100))
Generate = Callable[[list[list[int]]], int]
"""Completes prompts and returns how many tokens it sampled."""


@contextmanager
def embedded(loaded: Loaded, workload: Workload) -> Iterator[Generate]:
    """Run the embedded engine within the context."""
    params = SamplingParams(n=workload.completions, max_new_tokens=workload.tokens, ignore_eos=True)
    with embedded_engine(loaded) as complete:

        def generate(prompts: list[list[int]]) -> int:
            done = complete(prompts, [params] * len(prompts))
            return sum(len(sequence.logprobs) for request in done for sequence in request.sequences)

        yield generate


@contextmanager
def continuous_batching(model: PreTrainedModel, workload: Workload) -> Iterator[Generate]:
    """Run transformers' continuous batching within the context."""
    sampling = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, num_return_sequences=workload.completions)
    cache = ContinuousBatchingConfig(return_logprobs=True, **CACHE)
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=cache) as manager:

        def generate(prompts: list[list[int]]) -> int:
            manager.add_requests(prompts, max_new_tokens=workload.tokens)
            return sum(len(manager.get_result().logprobs) for _ in range(len(prompts) * workload.completions))

        yield generate


def rates(generate: Generate, prompts: list[list[int]]) -> tuple[float, float]:
    """Return the tokens a second and the tokens a processor second of one call."""
    started, used = time.perf_counter(), time.process_time()
    tokens = generate(prompts)
    return tokens / (time.perf_counter() - started), tokens / (time.process_time() - used)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, and print medians of the rounds and of their ratios."""
    parser = harness.CommandLine("continuous_batching", rounds=3, quick="one round")
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="model directory")
    parser.add_argument("--threads", type=int, default=1, help="processor threads")
    given = parser.parse(arguments)
    torch.set_num_threads(given.threads)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    texts = [f"What is {a} + 5? Answer with just the number. {a} + 5 =" for a in range(10, 10 + RUNNING)]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    loaded = load(EngineSettings.load(model_name=str(given.model), engine_dtype=ComputeType.FLOAT32))
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    rows: list[tuple[str, ...]] = []
    for workload in (WARM_UP, *WORKLOADS):
        with embedded(loaded, workload) as ours, continuous_batching(model, workload) as theirs:
            sent = prompts[: workload.prompts]
            rounds = [[rates(generate, sent) for generate in (ours, theirs)] for _ in range(given.rounds)]
        for place, unit in enumerate(("a second", "a processor second")):
            pairs = [(own[place], other[place]) for own, other in rounds]
            medians = [f"{statistics.median(side):.0f}" for side in zip(*pairs, strict=True)]
            ratio = statistics.median(own / other for own, other in pairs)
            if workload is not WARM_UP:
                rows.append((" x ".join(map(str, workload)), unit, *medians, f"{ratio:.1f}"))
    columns = ("requests", "tokens", "embedded", "continuous", "ratio")
    harness.finish(given, [harness.table(f"float32, {given.threads} threads", columns, rows)], rows)


if __name__ == "__main__":
    main()
