"""``grpo groups``: answers that a run was trained on, selected from its record for another training.

The record is what RECORD_GROUPS keeps of a run, token for token. docs/guides/operating.md has examples. An answer is an
episode with all its sequences; a completion is an episode of one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer

from services.core.errors import ConfigurationError, first_line
from services.core.files import atomic_write
from services.protocol.groups import Group, GroupFileHead, group_file
from services.protocol.prompts import Split
from services.protocol.rewards import FinishReason
from services.run_page.directory import find_run
from trainer.reporting.group_records import GroupRecords

if TYPE_CHECKING:
    from pandas import DataFrame

CONDITION = "A condition, read by pandas' DataFrame.query: 'reward >= 1 and tokens < 400'. The guide has the names."


def main(
    run: Annotated[str, typer.Argument(help="Id or directory of the run.")],
    where: Annotated[str, typer.Argument(metavar="[EXPRESSION]", help=CONDITION)] = "",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the answers. Default: only count.")] = None,
    per_prompt: Annotated[int, typer.Option(min=1, metavar="K", help="Most answers of a prompt.")] = 4,
) -> None:
    """Select answers that a run was trained on, token for token."""
    run_dir = find_run(run).path
    records = GroupRecords(run_dir)
    if not records.steps:
        raise ConfigurationError(f"{run_dir} has no recorded groups; RECORD_GROUPS says of which steps it keeps them")
    answers, left_out = read_answers(records)
    kept = choose(answers, where, per_prompt, left_out)
    _print(answers, kept, left_out)
    if kept.empty:
        raise ConfigurationError(f"no answer is left of {run_dir}; the table says why")
    if out is None:
        return
    head = records.head(records.steps[0])
    model = head.settings.get("model_name")
    named = GroupFileHead(run=run_dir.name, model=model, tokenizer=head.tokenizer, where=where)
    try:
        atomic_write(out, group_file(named, groups_of(records, kept)))
    except OSError as error:
        raise ConfigurationError(f"--out {out} cannot be written: {error}") from error


def read_answers(records: GroupRecords) -> tuple[DataFrame, Counter[str]]:
    """Return a row for each recorded answer that may be learned, and the number of the others by reason.

    Left out are aborted answers and those without a reward, and prompts of the test split. A group that several steps
    trained on counts once.

    Raises:
        ConfigurationError: a record cannot be read.
    """
    import pandas  # not at the top, because it takes seconds

    groups: set[str] = set()
    rows, left_out = list[dict[str, Any]](), Counter[str]()
    for step in records.steps:
        for group in (recorded.group for recorded in records.groups(step)):
            if group.group_id not in groups:
                groups.add(group.group_id)
                found, prompt = [*_rows(group, step)], group.prompt
                left_out["without a reward"] += len(group.episodes) - len(found)
                if prompt.id.split("/")[-2:-1] == [Split.TEST.value]:
                    left_out["held-out prompts"] += len(found)
                else:
                    rows += found
    return pandas.DataFrame(rows), left_out


def _rows(group: Group, step: int) -> Iterator[dict[str, Any]]:
    """Yield the columns, and what identifies it, of each scored answer of a group."""
    scored = [
        (number, sequences)
        for number, sequences in enumerate(group.episodes)
        if sequences[0].reward is not None and all(s.finish_reason is not FinishReason.ABORT for s in sequences)
    ]
    row = orjson.loads(group.prompt.row) if group.prompt.row else {}
    shared = {f"row_{name}": value for name, value in row.items()}
    shared |= {"source": group.prompt.source, "category": group.prompt.category, "id": group.prompt.id, "step": step}
    for number, sequences in scored:
        first = sequences[0]
        rewards = [others[0].reward or 0.0 for _, others in scored if others[0].seat == first.seat]
        figures = (group.episode_figures or {}).get(-1 if first.episode is None else first.episode)
        was_cut = any(s.finish_reason is FinishReason.LENGTH for s in sequences)
        ids = (orjson.dumps([*group.prompt_ids, *s.completion_ids.tolist()]) for s in sequences)
        yield shared | {
            "reward": first.reward,
            **{f"component_{name}": value for name, value in first.scoring.components.items()},
            "prompt": group.prompt.prompt,
            "completion": sequences[-1].completion,
            "version": min(s.oldest_version for s in sequences),
            "tokens": sum(s.trained_tokens for s in sequences),
            "length": len(group.prompt_ids) + max(s.tokens for s in sequences),
            "finish": (FinishReason.LENGTH if was_cut else FinishReason.STOP).value,
            "turns": 1 if figures is None else figures.turns,
            "seat": first.seat,
            "rank": 1 + sum(reward > (first.reward or 0.0) for reward in rewards),
            "group_mean": statistics.fmean(rewards),
            "group_size": len(rewards),
            "_group": group.group_id,
            "_episode": number,
            "_ids": hash(tuple(ids)),
        }


def choose(answers: DataFrame, where: str, per_prompt: int, left_out: Counter[str]) -> DataFrame:
    """Return at most ``per_prompt`` answers of each prompt for which ``where`` holds, in the order of ``answers``.

    They are those of highest reward, and of these the newest. Answers that were cut off, and equal ones, are left out
    and counted.

    Raises:
        ConfigurationError: ``where`` is not an expression on the columns of ``answers``.
    """
    if answers.empty:
        return answers
    try:
        found = answers.query(where, engine="python") if where else answers
    # pandas raises errors of many types.
    except Exception as error:
        names = ", ".join(name for name in answers if not name.startswith("_"))
        raise ConfigurationError(f"{where!r}: {first_line(error)}; the answers have {names}") from error
    whole = found[found["finish"] != FinishReason.LENGTH.value]
    best = whole.sort_values(["reward", "step"], ascending=False, kind="stable")
    different = best.drop_duplicates("_ids")
    kept = different.groupby("id").head(per_prompt)
    left_out["cut off at a limit"] += len(found) - len(whole)
    left_out["equal to another"] += len(whole) - len(different)
    left_out["more than --per-prompt of a prompt"] += len(different) - len(kept)
    return kept.sort_index()


def groups_of(records: GroupRecords, kept: DataFrame) -> Iterator[Group]:
    """Yield the groups of the answers, each with these answers' sequences only, step by step."""
    episodes = kept.groupby("_group")["_episode"].agg(sorted).to_dict()
    for step in sorted(set(kept["step"])):
        for group in (recorded.group for recorded in records.groups(step)):
            sequences = [s for number in episodes.pop(group.group_id, ()) for s in group.episodes[number]]
            alone = {"sequences": sequences, "episode_figures": None, "episodes_failed": None, "failure_examples": None}
            if sequences:
                yield group.model_copy(update=alone)


def _print(answers: DataFrame, kept: DataFrame, left_out: Counter[str]) -> None:
    """Print how many answers were kept, and how many were left out, by reason."""
    print(f"answers: {len(answers):,}, kept: {len(kept):,}")
    for reason, count in sorted(left_out.items()):
        if count:
            print(f"left out: {count:,} {reason}")
