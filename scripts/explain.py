"""``grpo explain``: a step of a run, computed again from its record and explained.

docs/guides/explaining.md has examples.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.core.endpoints import ENDPOINTS_VARIABLE, TRAINER_RENDEZVOUS_PORT, Task
from services.run_page.directory import RUNS, find_run
from trainer.__main__ import launch_ranks
from trainer.reporting.explanations import Compared, Explanation, GroupReport, Silence
from trainer.reporting.group_records import GroupRecords

Run = Annotated[str, typer.Argument(help="Id or directory of the run.")]
Below = Annotated[Path, typer.Option("--runs", metavar="DIR", help="The directory of runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON with every number instead of text.")]
SHOWN_GROUPS = 3
"""The groups whose completions the text shows; page and JSON have all."""


def main(
    run: Run,
    step: Annotated[int, typer.Option(min=1, help="The step.")],
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write an HTML page with all groups.")] = None,
    as_json: AsJson = False,
    below: Below = RUNS,
) -> None:
    """Compute a step of a run again, to the bit, and show which groups and tokens moved the weights."""
    found = in_ranks("explain", find_run(run, below).path, step)
    explained = Explanation.model_validate(found)
    if as_json:
        print(orjson.dumps(found).decode())
    else:
        show(Console(), explained, SHOWN_GROUPS)
    if page is not None:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
            recorded = Console(record=True, width=160, file=nowhere)
            show(recorded, explained, len(explained.groups))
            recorded.save_html(str(page))


def in_ranks(name: str, run_dir: Path, step: int) -> Any:
    """Run ``explain`` or ``verify`` on as many ranks as computed the step; return its result, from JSON.

    Raises:
        ConfigurationError: the step has no record.
        SystemExit: a rank failed and has written its error to stderr, with the rank's exit code.
    """
    then = GroupRecords(run_dir).head(step).computation
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        meeting = {f"{Task.TRAINER}-0:{TRAINER_RENDEZVOUS_PORT}": f"127.0.0.1:{listener.getsockname()[1]}"}
    os.environ[ENDPOINTS_VARIABLE] = orjson.dumps(meeting).decode()
    if then.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = (name, str(run_dir), str(step), str(result))
        if code := launch_ranks(then.ranks, [sys.executable, "-m", "trainer.explain", *arguments]):
            raise SystemExit(code)
        return json.loads(result.read_bytes())


def show(console: Console, explained: Explanation, n_groups: int) -> None:
    """Print an explained step, with the completions of the first ``n_groups`` groups."""

    def line(text: str) -> None:
        console.print(Text(text), soft_wrap=not console.record)

    metrics, tokens, norm = explained.metrics, explained.silence.tokens, explained.metrics.get("grad_norm", 0.0)
    line(f"run {explained.run}, step {explained.step}: policy version {explained.policy_version} was updated")
    line(verdict(explained.compared))
    scaled = f", scaled down to {explained.max_grad_norm:g}" if norm > explained.max_grad_norm else ""
    line(f"loss {metrics.get('loss', 0.0):.5g}, gradient norm {norm:.5g}{scaled}")
    line(f"{tokens} tokens in LOSS={explained.loss}: {_silenced(explained.silence)}")
    line(f"{explained.without_advantage} trained tokens have advantage 0")
    sampled = ", ".join(f"{version}: {count}" for version, count in explained.versions.items())
    line(f"trained tokens by the policy version that sampled them: {sampled}")
    if len(explained.sources) > 1:
        table = _table(console, "gradient by source", "source", "groups", "norm", "share")
        for source in explained.sources:
            table.add_row(Text(source.source), str(source.groups), f"{source.grad_norm:.4g}", f"{source.share:.1%}")
        console.print(table)
    table = _table(console, "gradient by group", "group", "norm", "share", "rewards", "versions", "silenced", "prompt")
    for group in explained.groups:
        table.add_row(*_row(group))
    console.print(table)
    for group in explained.groups[:n_groups]:
        title = f"completions of {group.group_id}"
        table = _table(console, title, "reward", "advantage", "tokens", "log-probability", "change", "text")
        for one in group.completions:
            reward = "none" if one.reward is None else f"{one.reward:g}"
            moved = (f"{one.before:.3f} → {one.after:.3f}", f"{one.change:+.4f}")
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
    if compared.step is None:
        return (
            f"equal to the bit: {what}, computed from {compared.begin}" if compared.metrics else f"{steps}: no metrics"
        )
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
    silenced = sum((one.silence for one in group.completions), Silence())
    name = f"{group.group_id} (replayed, weight {group.weight:.3g})" if group.is_replayed else group.group_id
    versions = ", ".join(map(str, group.versions))
    share = f"{(silenced.clip + silenced.cap + silenced.mask) / max(silenced.tokens, 1):.0%}"
    return [Text(name), f"{group.grad_norm:.4g}", f"{group.share:.1%}", mean, versions, share, Text(repr(group.prompt))]


def _silenced(silence: Silence) -> str:
    counts = {"clip": silence.clip, "cap": silence.cap, "mask": silence.mask}
    shares = [f"{name} {count} ({count / max(silence.tokens, 1):.1%})" for name, count in counts.items()]
    return f"silenced by {', '.join(shares)}; bounded {silence.bounded}"


def _table(console: Console, title: str, *columns: str) -> Table:
    console.print()
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        is_text = column in ("text", "prompt", "token", "group", "source", "versions")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold" if is_text else "ellipsis")
    return table
