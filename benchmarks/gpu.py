"""An hour on this node's GPUs: attention alone, updates of whole models, and runs of jobgroup.yaml on GSM8K.

1. Attention alone, forward and backward, in each variant of its kernel; ten minutes.
2. Updates of random models on random tokens, in completions of 500 and of 2,000 tokens, on 1, 2 and 8 GPUs.
3. Runs on GSM8K with the first model, half of the GPUs for the engines: 100 steps with weights by broadcast, which are
   the learning curve, and 10 by the shared volume. NCCL joins no two processes on one GPU, so that one GPU uses the
   volume. SGLANG_PYTHON is the interpreter of SGLang's environment.

Only the last needs a network; --only attention, --only "update of 0.5B" or --only run measures a part.

Rows, metrics, logs and the machine's description are packed into one file to send back. What fails is noted, and the
rest is measured. --quick measures a tiny model with the embedded engine, also without a GPU.

The random models have the shape of a published one, and a tokenizer with a token for each byte and placeholders for the
other ids, which an untrained model samples, too. --write 0.5B DIRECTORY writes one. No completion is right, so
REWARD_FN=benchmarks.gpu:noise rewards half of them, from which a run can learn.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerBase

from benchmarks import attention, job, load
from benchmarks.job import Job, running, say, with_gpus
from benchmarks.load import Figure
from benchmarks.results.__main__ import measurements
from benchmarks.results.experiments import TINY, Settings
from benchmarks.update import Work, figures
from toys import arithmetic
from trainer.capacity.shape import CONFIGS

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
SHAPES = ("0.5B", "1.7B", "8B")
"""The labels of Qwen2.5-0.5B, Qwen3-1.7B and Qwen3-8B."""
LENGTHS = (500, 2000)
COUNTS = (1, 2, 8)
GSM8K = {
    "DATASET": "gsm8k",
    "REWARD_FN": "math",
    "ROLLOUT_ENGINE": "sglang",
    "BATCH_SIZE": "64",
    "GROUP_SIZE": "8",
    "MAX_NEW_TOKENS": "512",
    "EVAL_EVERY": "20",
    "EVAL_PROMPTS": "500",
    "CHECKPOINT_EVERY": "0",
    "MIN_WORKERS": "1",
    "NUM_EPOCHS": "1000",
}
MOST_SECONDS = {100: 600.0, 10: 180.0}
"""Longest time of a run from its first step on, by its steps; then it is stopped."""
MACHINE = {
    "nvidia-smi.txt": ("nvidia-smi",),
    "topology.txt": ("nvidia-smi", "topo", "-m"),
    "packages.txt": (sys.executable, "-m", "pip", "freeze"),
}
"""Files of the machine's description, and the commands that print them."""


def write(config: PretrainedConfig, directory: Path, seed: int = 0) -> Path:
    """Write a model of random bfloat16 weights, made on the GPU where there is one, and its tokenizer."""
    torch.manual_seed(seed)
    shape = type(config)(**config.to_dict() | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None})
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokenizer(shape.vocab_size, shape.max_position_embeddings).save_pretrained(directory)
    return directory


def tokenizer(vocabulary: int, context: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer of bytes with as many ids as the model has."""
    alphabet = sorted(ByteLevel.alphabet())
    placeholders = [f"<{number}>" for number in range(2 + len(alphabet), vocabulary)]
    return arithmetic.build_tokenizer([*alphabet, *placeholders], context)


def noise(response: str) -> float:
    """Return a reward of 0 or 1 that depends on every character of a completion."""
    return float(zlib.crc32(response.encode()) % 2)


def train(settings: Settings, gpus: int, results: Path) -> Iterator[Figure]:
    """Run jobgroup.yaml; keep its metrics and logs in ``results``, and measure its phases and its learning."""
    half = max(gpus // 2, min(gpus, 1))
    if gpus == 1:  # Two processes share it; SGLang would take most of its memory.
        settings = settings | {"SGLANG_EXTRA_FLAGS": "--mem-fraction-static 0.3"}
    most = MOST_SECONDS.get(int(settings["MAX_STEPS"]), 60.0)

    def is_late(run: Job) -> bool:
        steps = run.steps()
        return bool(steps) and time.time() - steps[0]["time"] > most

    with tempfile.TemporaryDirectory() as name:
        path = with_gpus(Path(name), "jobgroup.yaml", {"rollout-server": half, "ppo-trainer": half})
        with running(Path(name), settings, path) as run:
            try:
                run.wait(lambda: is_late(run))
            finally:
                ignored = shutil.ignore_patterns("policy", "checkpoints", "model", "replay")
                shutil.copytree(run.run_dir, results, ignore=ignored, dirs_exist_ok=True)
                shutil.copy(run.messages, results)
        row = measurements(run, settings)
    yield Figure("steps", len(row["rewards"]), "")
    yield Figure("reward, last step", row["rewards"][-1], "")
    for phase, seconds in row["figures"].items():
        yield Figure(phase, seconds, "s" if "seconds" in phase else "")
    tokens = statistics.median(row["tokens"][1:] or row["tokens"])
    yield Figure("generated", tokens / row["figures"]["seconds_generate"], "tokens/s")


def update(shape: str, directory: Path, work: Work, gpus: int) -> Iterator[Figure]:
    """Measure updates of a model of SHAPES; its first use writes it to ``directory``."""
    if not directory.exists():
        write(CONFIGS[shape][1], directory)
    yield from figures(replace(work, model=str(directory)), gpus)


def noted(of: Callable[[], Iterator[Figure]]) -> Iterator[Figure]:
    """Yield figures; write the message of a program that failed to stderr, so that the other loads continue."""
    try:
        yield from of()
    except SystemExit as failure:
        if not isinstance(failure.code, str):
            raise
        say(failure.code)


def loads_of(args: argparse.Namespace, directory: str) -> load.Loads:
    """Return the passes of attention, the updates and the runs; models are written to ``directory``."""
    shapes, lengths, steps, settings, model = [*SHAPES], [*LENGTHS], (100, 10), GSM8K, MODEL
    if args.quick:
        tiny = Path(directory, "tiny")
        arithmetic.make(tiny)
        shapes, lengths, steps, settings, model = ["tiny"], [4], (2, 1), {**TINY, "EVAL_PROMPTS": "2"}, str(tiny)
        del settings["CUDA_VISIBLE_DEVICES"]
    counts = [count for count in COUNTS if count <= torch.cuda.device_count()] or [0]
    loads: dict[str, Callable[[], Iterator[Figure]]] = {}
    for (width, variant), options in attention.VARIANTS.items() if counts[0] else ():
        loads[f"attention, heads of {width}, {variant}"] = partial(attention.figures, width, options)
    for shape, length, count in product(shapes, lengths, counts):
        work = Work("", 8 * max(count, 1), 8, 10 if args.quick else 100, length)
        name = f"update of {shape}, {length} tokens, {count} GPUs"
        loads[name] = partial(update, shape, Path(directory, shape), work, max(count, 1))
    for count in counts:
        transports = {"disk": steps[0]} if count == 1 else {"broadcast": steps[0], "disk": steps[1]}
        for transport, number in transports.items():
            own = {"MODEL_NAME": model, "PUBLISH_TRANSPORT": transport, "MAX_STEPS": str(number)}
            where = args.results / f"{count}-gpus-{transport}"
            loads[f"run, {count} GPUs, {transport}"] = partial(train, settings | own, count, where)
    return {name: partial(noted, of) for name, of in loads.items()}


def main() -> None:
    """Measure everything, and pack it.

    Raises:
        SystemExit: there is no GPU, and --quick is not given.
    """
    parser = load.parser("gpu", __doc__)
    parser.add_argument("--results", type=Path, default=Path("gpu-benchmark"), help="directory of the files to send")
    parser.add_argument("--write", nargs=2, metavar=("SHAPE", "DIRECTORY"), help="only write a random model")
    args = parser.parse_args()
    if args.write:
        print(write(CONFIGS[args.write[0]][1], Path(args.write[1])))
        return
    job.end_in_order()
    if not args.quick and not torch.cuda.is_available():
        raise SystemExit("error: torch sees no GPU; see docs/gpus.md for drivers and images")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    args.results.mkdir(parents=True, exist_ok=True)
    args.rows = args.rows or args.results / "gpu.jsonl"
    args.rounds = 1
    for file, command in MACHINE.items():
        with (args.results / file).open("wb") as output:
            subprocess.run(["sh", "-c", '"$@" 2>&1', "sh", *command], stdout=output, timeout=60, check=False)
    with tempfile.TemporaryDirectory() as name:
        load.measure(loads_of(args, name), args)
    say(f"please send back {shutil.make_archive(str(args.results), 'gztar', args.results)}")


if __name__ == "__main__":
    main()
