"""Tokens a second of an engine, beside transformers' `generate` and the floor of its linear layers.

The engine is the embedded one, or with --url any SGLang, router or rollout node that runs already; JOBGROUP_TOKEN is
its token. The floor is the rate at which the model's linear layers alone would decode as many sequences at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import httpx
import torch

from benchmarks import load
from benchmarks.load import Figure
from services.clients.rollout import ROUTING_KEY
from services.core.machine import cores

REQUEST_SECONDS = 600.0
BATCHES = 4
"""Batches of a round that the engine computes."""
FLOOR_PASSES = 8


def prompts(count: int) -> list[str]:
    """Return different questions of about the same length without a common beginning."""
    return [f"{7 * i + 13} plus {11 * i + 5} is a sum. What is it? Answer with just the number." for i in range(count)]


async def generate(url: str, args: argparse.Namespace) -> float:
    """Return the tokens a second of a server's /generate with ``batch`` completions in flight."""
    sampling = {"max_new_tokens": args.tokens, "temperature": 1.0, "ignore_eos": True}
    token = os.environ.get("JOBGROUP_TOKEN") if args.url else None
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    places = asyncio.Semaphore(args.batch)
    async with httpx.AsyncClient(headers=headers, timeout=REQUEST_SECONDS, trust_env=False) as http:

        async def complete(prompt: str) -> int:
            body = {"text": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}
            # A key of its own, as the trainer's client gives each request.
            key = {ROUTING_KEY: secrets.token_hex(8)}
            async with places:
                reply = (await http.post(f"{url}/generate", json=body, headers=key)).raise_for_status()
            return int(reply.json()["meta_info"]["completion_tokens"])

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(complete, prompts(BATCHES * args.batch))))
        return tokens / (time.perf_counter() - began)


@cache
def loaded(model: str, dtype: str) -> tuple[Any, Any]:
    """Return transformers' model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval(), tokenizer


def by_transformers(args: argparse.Namespace) -> float:
    """Return the tokens a second of transformers' `generate`, ``batch`` prompts at once."""
    model, tokenizer = loaded(args.model, args.dtype)
    inputs = tokenizer(prompts(args.batch), return_tensors="pt", padding=True)
    length = {"min_new_tokens": args.tokens, "max_new_tokens": args.tokens}
    began = time.perf_counter()
    model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, **length)
    return float(args.batch * args.tokens / (time.perf_counter() - began))


@torch.inference_mode()
def floor(args: argparse.Namespace) -> float:
    """Return the tokens a second of the linear layers alone, the output head included, for ``batch`` sequences."""
    model, _ = loaded(args.model, args.dtype)
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {weight.shape[1]: torch.randn(args.batch, weight.shape[1], dtype=weight.dtype) for weight in weights}
    began = 0.0
    for number in range(1 + FLOOR_PASSES):
        if number == 1:  # The first pass warms up.
            began = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
    return float(FLOOR_PASSES * args.batch / (time.perf_counter() - began))


def main() -> None:
    """Measure the engine, `generate` and the floor in turn."""
    parser = load.parser("engine", __doc__)
    parser.add_argument("--model", default=".cache/models/smollm2-135m", help="directory or name")
    parser.add_argument("--url", help="a server that runs, in place of the embedded engine")
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--batch", type=int, default=64, help="completions in flight")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    args = parser.parse_args()
    if args.quick:
        args.batch, args.tokens = 8, 8
    torch.set_num_threads(cores())

    def rate(of: Callable[[], float]) -> Callable[[], Iterator[Figure]]:
        return lambda: iter([Figure(f"{args.tokens} tokens, {args.dtype}", of(), "tokens/s")])

    with ExitStack() as stack:
        url = args.url
        if url is None:
            engine = load.running("embedded_engine", MODEL_NAME=args.model, ENGINE_DTYPE=args.dtype)
            url = f"http://127.0.0.1:{stack.enter_context(engine).port}"
        asyncio.run(generate(url, args))  # Warms up.
        loads = {
            f"engine, {args.batch} in flight": rate(lambda: asyncio.run(generate(url, args))),
            f"linear floor, {args.batch} in flight": rate(lambda: floor(args)),
            f"generate, {args.batch} in flight": rate(lambda: by_transformers(args)),
        }
        load.measure(loads, args)


if __name__ == "__main__":
    main()
