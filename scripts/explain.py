"""``grpo explain`` and ``grpo verify``: steps of a run, computed again from their records, explained or compared.

docs/guides/operating.md has examples. ``python -m scripts.explain OPTIONS`` is one rank of either, as torchrun starts
it; rank 0 prints the result.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from local_runner.nodes import free_port
from services.core import logs
from services.core.endpoints import ENDPOINTS_VARIABLE, TRAINER_RENDEZVOUS_PORT, Task
from services.core.errors import ConfigurationError, exit_code_of
from services.run_page.directory import find_run
from trainer.__main__ import launch_ranks, leave
from trainer.reporting.group_records import GroupRecords

if TYPE_CHECKING:
    from trainer.explain import Explanation, GroupReport
    from trainer.recompute import Compared

Run = Annotated[str, typer.Argument(help="Id or directory of the run.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with every number instead of text.")]
SILENCES = ("clip", "cap", "mask")
"""The reasons for which the loss gives a token no gradient."""
SHOWN_GROUPS = 3
"""The groups whose completions the text shows; JSON has all."""


def main(run: Run, step: Annotated[int, typer.Option(min=1, help="The step.")], as_json: AsJson = False) -> None:
    """Compute a step of a run again, to the bit, and show which groups and tokens moved the weights."""
    in_ranks(find_run(run).path, step, as_json=as_json)


def verify(run: Run, as_json: AsJson = False) -> None:
    """Compute all recorded steps of a run again, and compare with its checkpoints to the bit. Exit code 1: they differ.

    It answers whether another torch, transformers or machine trains the same.
    """
    run_dir = find_run(run).path
    steps = GroupRecords(run_dir).steps
    if not steps:
        raise ConfigurationError(f"{run_dir} has no recorded groups; RECORD_GROUPS says of which steps it keeps them")
    in_ranks(run_dir, steps[-1], as_json=as_json, all_steps=True)


def in_ranks(run_dir: Path, step: int, **options: Any) -> None:
    """Run ``run_rank`` on as many ranks as computed the step.

    Raises:
        ConfigurationError: the step has no record.
        typer.Exit: a rank failed, and has written its error to stderr, or steps differ from the run.
    """
    then = GroupRecords(run_dir).head(step).computation
    meeting = {f"{Task.TRAINER}-0:{TRAINER_RENDEZVOUS_PORT}": f"127.0.0.1:{free_port()}"}
    os.environ[ENDPOINTS_VARIABLE] = orjson.dumps(meeting).decode()
    if then.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    given = orjson.dumps({"run_dir": str(run_dir), "step": step, **options}).decode()
    if code := launch_ranks(then.ranks, [sys.executable, "-m", "scripts.explain", given]):
        raise typer.Exit(code)


def run_rank(run_dir: str, step: int, *, as_json: bool, all_steps: bool = False) -> int:
    """Explain a step, or compare all, as the rank that torchrun's variables name; rank 0 prints. Return the exit code.

    It is 1 on rank 0 if ``all_steps`` are compared and some differ.
    """
    import transformers

    from trainer import explain
    from trainer.model.ranks import join_ranks

    logs.configure("explain", "warning")
    transformers.utils.logging.disable_progress_bar()
    results: list[Any] = []

    def body() -> None:
        with join_ranks() as ranks:
            path = Path(run_dir)
            found = explain.verify(path, ranks) if all_steps else [explain.explain(path, step, ranks)]
            results.extend(found if ranks.is_main else ())

    if code := exit_code_of(body):
        return code
    if results and as_json:
        # ``default`` is for the computations, which are pydantic's.
        content = orjson.dumps(results if all_steps else results[0], lambda x: x.model_dump(), orjson.OPT_NON_STR_KEYS)
        print(content.decode())
    for one in () if as_json else results:
        if all_steps:
            Console().print(Text(verdict(one)), soft_wrap=True)
        else:
            show(Console(), one)
    return int(all_steps and any(one.step is not None for one in results))


def show(console: Console, explained: Explanation) -> None:
    """Print an explained step, with the completions of the first SHOWN_GROUPS groups."""

    def line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    metrics, tokens, norm = explained.metrics, explained.silence["tokens"], explained.metrics.get("grad_norm", 0.0)
    line(f"run {explained.run}, step {explained.step}: policy version {explained.policy_version} was updated")
    line(verdict(explained.compared))
    scaled = f", scaled down to {explained.max_grad_norm:g}" if norm > explained.max_grad_norm else ""
    line(f"loss {metrics.get('loss', 0.0):.5g}, gradient norm {norm:.5g}{scaled}")
    silence = explained.silence
    shares = ", ".join(f"{kind} {silence[kind]} ({silence[kind] / max(tokens, 1):.1%})" for kind in SILENCES)
    line(f"{tokens} tokens in LOSS={explained.loss}: silenced by {shares}; bounded {silence['bounded']}")
    line(f"{explained.without_advantage} trained tokens have advantage 0")
    sampled = ", ".join(f"{version}: {count}" for version, count in explained.versions.items())
    line(f"trained tokens by the policy version that sampled them: {sampled}")
    table = _table(console, "gradient by group", "group", "norm", "share", "rewards", "versions", "silenced", "prompt")
    for group in explained.groups:
        table.add_row(*_row(group))
    console.print(table)
    for group in explained.groups[:SHOWN_GROUPS]:
        title = f"completions of {group.group_id}"
        table = _table(console, title, "reward", "advantage", "tokens", "log-probability", "change", "text")
        for one in group.completions:
            reward = "none" if one.reward is None else f"{one.reward:g}"
            moved = (f"{one.before:.3f} → {one.after:.3f}", f"{one.after - one.before:+.4f}")
            table.add_row(reward, f"{one.advantage:+.3f}", str(one.tokens), *moved, Text(repr(one.text)))
        console.print(table)
    table = _table(console, "largest ratios to the policy that sampled", "ratio", "version", "group", "place", "token")
    for ratio in explained.ratios:
        text = Text.assemble(repr(ratio.before)[1:-1], (f"⟦{repr(ratio.token)[1:-1]}⟧", "bold"))
        place = f"{ratio.completion}:{ratio.place}"
        table.add_row(f"{ratio.ratio:.4g}", str(ratio.version), ratio.group_id, place, text)
    console.print(table)


def verdict(compared: Compared) -> str:
    """Return a sentence that says whether steps were computed again to the bit, or where they first differ."""
    steps = f"step {compared.last}" if compared.first == compared.last else f"steps {compared.first} to {compared.last}"
    if compared.reason is not None:
        return f"{steps} not compared: {compared.reason}"
    what = f"{compared.metrics} metrics of {steps}"
    if compared.tensors is not None:
        what += f" and the {compared.tensors} tensors of checkpoint step-{compared.last:06d}"
    if compared.step is None and not compared.metrics:
        return f"{steps}: no metrics"
    if compared.step is None:
        return f"equal to the bit: {what}, computed from {compared.begin}"
    first = compared.differences[0]
    place = f"step {compared.step} first differs in {first.name}: {first.recorded} then, {first.recomputed} now"
    if first.elements is not None:
        place += f"; {len(compared.differences)} tensors differ, this one in {first.elements} numbers by up to "
        place += f"{first.largest:.3g}"
    then, now = (one.model_dump() if one is not None else {} for one in (compared.then, compared.now))
    changed = [f"{name} {then[name]} then, {now[name]} now" for name in now if then[name] != now[name]]
    return f"{place} ({'; '.join(changed) or 'same machine and packages'})"


def _row(group: GroupReport) -> list[str | Text]:
    rewards = [one.reward for one in group.completions if one.reward is not None]
    mean = f"{sum(rewards) / len(rewards):.3g} of {len(rewards)}" if rewards else "none"
    silenced = sum((one.silence for one in group.completions), Counter[str]())
    name = f"{group.group_id} (replayed, weight {group.weight:.3g})" if group.is_replayed else group.group_id
    versions = ", ".join(map(str, group.versions))
    share = f"{sum(silenced[kind] for kind in SILENCES) / max(silenced['tokens'], 1):.0%}"
    return [Text(name), f"{group.grad_norm:.4g}", f"{group.share:.1%}", mean, versions, share, Text(repr(group.prompt))]


def _table(console: Console, title: str, *columns: str) -> Table:
    console.print()
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        is_text = column in ("text", "prompt", "token", "group", "source", "versions")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold" if is_text else "ellipsis")
    return table


if __name__ == "__main__":
    leave(run_rank(**orjson.loads(sys.argv[1])))
