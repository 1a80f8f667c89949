"""Measures how many tokens per second the rollout workers generate, against transformers' own ``generate``.

    python -m benchmarks.rollouts --model .cache/models/smollm2-135m            # ours: nodes and router
    python -m benchmarks.rollouts --model .cache/models/smollm2-135m --url http://127.0.0.1:30000

Without ``--url`` it starts rollout nodes as a job group would, with the real router in front (ROLLOUT_ENGINE and the
other variables of the rollout-server are read as always); with it, any running SGLang, router or rollout node is
measured. Every round measures ours, prompts one after the other, and a batch, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from local_runner.environment import cores
from services.core.endpoints import ENDPOINTS_VARIABLE, ENGINE_PORT, ROUTER_INNER_PORT, ROUTER_METRICS_PORT, ROUTER_PORT

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

START_SECONDS = 600.0
ONE_BY_ONE = 4
"""Prompts that the slowest way computes in a round."""
RESULTS = "benchmark_results.json"


class PreflightError(Exception):
    """The server cannot be measured; the message says why."""


@dataclass
class Measurement:
    """Tokens per second of one way of generating, round by round."""

    name: str
    tokens_per_second: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Seconds of each request, where requests are what is measured."""
    failed: int = 0

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.tokens_per_second)

    def summary(self) -> dict[str, Any]:
        """What goes into the results."""
        latency = sorted(self.latencies)
        quantiles = {f"p{q}_seconds": latency[int(q / 100 * (len(latency) - 1))] for q in (50, 99)} if latency else {}
        return {
            "name": self.name,
            "tokens_per_second": self.median,
            "rounds": self.tokens_per_second,
            "failed_requests": self.failed,
            **quantiles,
        }


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=Path(".cache/models/smollm2-135m"), help="model directory")
    parser.add_argument("--url", help="a running SGLang, router or rollout node, instead of nodes of our own")
    parser.add_argument("--token", default=os.environ.get("JOBGROUP_TOKEN"), help="its token (also JOBGROUP_TOKEN)")
    parser.add_argument("--num-workers", type=int, default=2, help="rollout nodes to start; they share the cores")
    parser.add_argument("--batch-size", type=int, default=64, help="completions in flight at once")
    parser.add_argument("--group-size", type=int, default=1, help="completions of each prompt")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens of each completion")
    parser.add_argument("--batches", type=int, default=4, help="a round generates this many batches")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="that all compute in")
    parser.add_argument("--timeout-ms", type=int, default=120_000, help="a request not answered by then has failed")
    parser.add_argument("--skip-baselines", action="store_true", help="measure the server alone")
    parser.add_argument("--save-dir", type=Path, default=Path("runs/benchmarks"), help=f"where {RESULTS} is written")
    arguments = parser.parse_args(given)
    if arguments.batch_size % arguments.group_size:
        parser.error(f"--batch-size {arguments.batch_size} is no multiple of --group-size {arguments.group_size}")
    return arguments


def prompts(count: int) -> list[str]:
    """Different questions of about the same length, which share no beginning."""
    return [f"{7 * i + 13} plus {11 * i + 5} is a sum. What is it? Answer with just the number." for i in range(count)]


# --- our rollout nodes -----------------------------------------------------------------------------------------------


@contextmanager
def rollout_nodes(arguments: argparse.Namespace) -> Iterator[str]:
    """Starts the nodes, gives the router's URL, and ends them."""
    count = arguments.num_workers
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(4 * count)]
    ports = iter([s.getsockname()[1] for s in sockets])
    for s in sockets:
        s.close()
    addresses = {
        f"rollout-server-{rank}:{port}": f"127.0.0.1:{next(ports)}"
        for rank in range(count)
        for port in (ROUTER_PORT, ENGINE_PORT, ROUTER_METRICS_PORT, ROUTER_INNER_PORT)
    }
    with tempfile.TemporaryDirectory() as directory:
        common = {
            "ENGINE_DTYPE": arguments.dtype,
            "OMP_NUM_THREADS": str(max(1, cores() // count)),
            "SKYPILOT_NUM_GPUS_PER_NODE": os.environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "0"),
        }
        fixed = {
            "MODEL_NAME": str(arguments.model.resolve()),
            "SHARED_DIR": directory,
            "RUN_ID": "benchmark",
            "SKYPILOT_JOBGROUP_NAME": "benchmark",
            "SKYPILOT_NUM_NODES": str(count),
            ENDPOINTS_VARIABLE: json.dumps(addresses),
        }
        if arguments.token:
            fixed["JOBGROUP_TOKEN"] = arguments.token
        log = Path(directory) / "nodes.log"
        processes = []
        try:
            with log.open("wb") as output:
                for rank in range(count):
                    environment = common | os.environ | fixed | {"SKYPILOT_NODE_RANK": str(rank)}
                    command = [sys.executable, "-m", "services.rollout_server"]
                    processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output))
            url = f"http://{addresses[f'rollout-server-0:{ROUTER_PORT}']}"
            _wait_for_workers(url, arguments.token, count, processes, log)
            yield url
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait(20)


def _wait_for_workers(
    url: str, token: str | None, count: int, processes: Sequence[subprocess.Popen[bytes]], log: Path
) -> None:
    end = time.monotonic() + START_SECONDS
    with httpx.Client(base_url=url, headers=_authorization(token), timeout=5, trust_env=False) as http:
        while True:
            if any(process.poll() is not None for process in processes) or time.monotonic() > end:
                raise PreflightError(
                    f"the rollout nodes did not start; the end of their log:\n{log.read_text()[-2000:]}"
                )
            try:
                reply = http.get("/workers")
            except httpx.TransportError:
                reply = None
            if reply is not None and reply.status_code == 200 and len(reply.json()["workers"]) == count:
                return
            time.sleep(0.2)


def _authorization(token: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


# --- what is measured ------------------------------------------------------------------------------------------------


class Server:
    """Requests to a server that speaks SGLang's /generate."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self.url = url
        self.arguments = arguments

    def preflight(self) -> str:
        """Checks that the server answers as it should; returns what it serves.

        Raises:
            PreflightError: it does not.
        """
        with httpx.Client(
            base_url=self.url, headers=_authorization(self.arguments.token), timeout=30, trust_env=False
        ) as http:
            try:
                health = http.get("/health")
                reply = http.post("/generate", json=self._payload(prompts(1)[0], new_tokens=2))
            except httpx.TransportError as error:
                raise PreflightError(f"{self.url} does not answer ({error}); is the server running?") from error
            if health.status_code != 200:
                raise PreflightError(f"{self.url}/health answers {health.status_code}; wait until it answers 200")
            if reply.status_code != 200:
                raise PreflightError(f"{self.url}/generate answers {reply.status_code}: {reply.text[:300]}")
            records = reply.json() if isinstance(reply.json(), list) else [reply.json()]
            if any(record["meta_info"]["completion_tokens"] != 2 for record in records):
                raise PreflightError(f"{self.url}/generate does not keep to max_new_tokens and ignore_eos")
            info = http.get("/model_info")
        return str(info.json().get("model_path", "?")) if info.status_code == 200 else "?"

    async def measure(self, into: Measurement) -> None:
        """One round: the batches' prompts, ``batch_size`` completions in flight at any time."""
        arguments = self.arguments
        count = arguments.batches * arguments.batch_size // arguments.group_size
        places = asyncio.Semaphore(arguments.batch_size // arguments.group_size)
        seconds = arguments.timeout_ms / 1000
        tokens = 0

        async with httpx.AsyncClient(
            base_url=self.url,
            headers=_authorization(arguments.token),
            timeout=seconds,
            limits=httpx.Limits(max_connections=arguments.batch_size + 8),
            trust_env=False,
        ) as http:

            async def ask(prompt: str) -> None:
                nonlocal tokens
                async with places:
                    started = time.perf_counter()
                    try:
                        async with asyncio.timeout(seconds):
                            reply = await http.post("/generate", json=self._payload(prompt, arguments.new_tokens))
                        reply.raise_for_status()
                    except (httpx.HTTPError, TimeoutError) as error:
                        into.failed += 1
                        print(f"  request failed: {error!r}", file=sys.stderr)
                        return
                    into.latencies.append(time.perf_counter() - started)
                    records = reply.json() if isinstance(reply.json(), list) else [reply.json()]
                    tokens += sum(record["meta_info"]["completion_tokens"] for record in records)

            started = time.perf_counter()
            await asyncio.gather(*(ask(prompt) for prompt in prompts(count)))
            into.tokens_per_second.append(tokens / (time.perf_counter() - started))

    def _payload(self, prompt: str, new_tokens: int) -> dict[str, Any]:
        sampling = {
            "n": self.arguments.group_size,
            "max_new_tokens": new_tokens,
            "temperature": 1.0,
            "ignore_eos": True,
        }
        return {"text": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}


class Transformers:
    """The model in this process, as transformers generates with it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.set_num_threads(cores())
        self.new_tokens = arguments.new_tokens
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            arguments.model, dtype=getattr(torch, arguments.dtype)
        ).eval()

    def measure(self, into: Measurement, batches: Sequence[Sequence[str]]) -> None:
        """One round: every batch by one call of ``generate``."""
        tokens = 0
        started = time.perf_counter()
        for batch in batches:
            inputs = self.tokenizer(list(batch), return_tensors="pt", padding=True)
            sampled = self.model.generate(
                **inputs,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                min_new_tokens=self.new_tokens,
                max_new_tokens=self.new_tokens,
            )
            tokens += (sampled.shape[1] - inputs["input_ids"].shape[1]) * len(batch)
        into.tokens_per_second.append(tokens / (time.perf_counter() - started))


# --- the run ---------------------------------------------------------------------------------------------------------


def run(url: str, arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Measurement]:
    """All rounds."""
    server = Server(url, arguments)
    say(f"{url} serves {server.preflight()}")
    workers = "" if arguments.url else f", {arguments.num_workers} worker(s)"
    ours = Measurement(f"server, {arguments.batch_size} in flight{workers}")
    measurements = [ours]
    baseline = None if arguments.skip_baselines else Transformers(arguments)
    one_by_one = Measurement("transformers generate, one after the other")
    batched = Measurement(f"transformers generate, batch of {arguments.batch_size}")
    if baseline is not None:
        measurements += [one_by_one, batched]
    say("warming up")
    asyncio.run(server.measure(Measurement("warm-up")))
    for number in range(arguments.rounds):
        asyncio.run(server.measure(ours))
        told = f"round {number + 1} of {arguments.rounds}: server {ours.tokens_per_second[-1]:.0f}"
        if baseline is not None:
            baseline.measure(one_by_one, [[prompt] for prompt in prompts(ONE_BY_ONE)])
            baseline.measure(batched, [prompts(arguments.batch_size)])
            told += f", one by one {one_by_one.tokens_per_second[-1]:.0f}, batch {batched.tokens_per_second[-1]:.0f}"
        say(f"{told} tokens/s")
    return measurements


def report(measurements: Sequence[Measurement], arguments: argparse.Namespace) -> dict[str, Any]:
    """The content of benchmark_results.json."""
    ours = measurements[0]
    prefixes = ("ENGINE_", "ROLLOUT_", "SGLANG_")
    return {
        "measurements": [measurement.summary() for measurement in measurements],
        "ratios": {f"server / {other.name}": ours.median / other.median for other in measurements[1:]},
        "settings": {key: str(v) if isinstance(v, Path) else v for key, v in vars(arguments).items() if key != "token"},
        "engine_settings": {name: v for name, v in sorted(os.environ.items()) if name.startswith(prefixes)},
        "machine": asdict(Machine.here()),
    }


@dataclass(frozen=True)
class Machine:
    """Where it ran."""

    system: str
    processor: str
    cores: int
    python: str
    time: str

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
        return cls(
            platform.platform(),
            model or platform.processor(),
            cores(),
            platform.python_version(),
            time.strftime("%F %T"),
        )


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 when the server cannot be measured or a request failed."""
    arguments = parse(given)

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        if arguments.url:
            measurements = run(arguments.url.rstrip("/"), arguments, say)
        else:
            say(f"starting {arguments.num_workers} rollout node(s) with {arguments.model}")
            with rollout_nodes(arguments) as url:
                measurements = run(url, arguments, say)
    except PreflightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results = report(measurements, arguments)
    arguments.save_dir.mkdir(parents=True, exist_ok=True)
    path = arguments.save_dir / RESULTS
    path.write_text(json.dumps(results, indent=2) + "\n")
    say("")
    for measurement in measurements:
        ratio = measurements[0].median / measurement.median
        say(f"{measurement.name:<48} {measurement.median:7.0f} tokens/s   {ratio:5.1f}x")
    say(f"written to {path}")
    return 1 if measurements[0].failed else 0


if __name__ == "__main__":
    sys.exit(main())
