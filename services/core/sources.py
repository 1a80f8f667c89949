"""The sources of a run: several tasks in one run, each with a dataset, a ratio and settings of its own.

The file that SOURCES names lists them::

    - name: sums
      ratio: 2
      dataset: arithmetic
      reward_fn: math
    - name: guessing
      rollout: environment
      dataset: seeds
      environment: guessing

What a source does not set, the run's variables say. Without SOURCES those variables are the only source.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from services.core.errors import ConfigurationError
from services.core.removed import removed_among

OWN = frozenset(
    {
        *("dataset", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_test", "dataset_held_out"),
        *("prompt_column", "ground_truth_column", "ground_truth_format", "prompt_style", "system_prompt"),
        *("instruction", "curriculum", "reward_fn", "accuracy_fn", "judge_rubric"),
        *("rollout", "group_size", "max_new_tokens"),
        *("agent", "agent_command", "agent_max_turns", "agent_max_tokens", "agent_seconds", "agent_columns"),
        *("environment", "opponent"),
        *("teacher_model", "teacher_url"),
    }
)
"""The variables, in lower case, that a source may set for itself."""

_FORMS = {
    "name": "at most 40 lower-case letters, digits, '_', '.' and '-', of which the first is a letter or a digit",
    "ratio": "a number above 0 and at most 1e6",
    "eval_only": "true or false",
}


class Source(BaseModel):
    """A source: its name, which the ids of its prompts begin with, its share of the groups, and variables of its own.

    ``ratio`` is relative to the other sources' ratios. An ``eval_only`` source is evaluated and never trained on.
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,39}$")]
    ratio: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    eval_only: bool = False

    @property
    def settings(self) -> dict[str, str]:
        """The source's own variables, in lower case, as the environment would have them: text, or JSON as text."""
        own: dict[str, Any] = self.model_extra or {}
        return {name: value if isinstance(value, str) else json.dumps(value) for name, value in own.items()}


MAIN = Source.model_construct(name="")
"""The only source of a run without SOURCES. Its name is empty, since no prompt, metric or column has one there."""


def load_sources(path: Path) -> list[Source]:
    """Return the sources of a file, sorted by name.

    Raises:
        ConfigurationError: it cannot be read, or a source in it is not valid; the message has the source and a remedy.
    """
    where = f"SOURCES {path}"
    # Variables stay as they are written, as in the environment: YAML would read `curriculum: off` as false.
    listed, written = read_yaml(path, where), read_yaml(path, where, as_text=True)
    if not isinstance(listed, list) or not listed or not all(isinstance(values, dict) for values in listed):
        raise ConfigurationError(f"{where}: write a list of sources, each as `- name: ...`")
    sources: dict[str, Source] = {}
    for number, (values, texts) in enumerate(zip(listed, written, strict=True), 1):
        own = {name: text for name, text in texts.items() if name in OWN and isinstance(text, str)}
        source = _source(values | own, f"{where}, source {number}")
        if source.name in sources:
            raise ConfigurationError(f"{where}: two sources are named {source.name!r}; give each its own name")
        sources[source.name] = source
    if all(source.eval_only for source in sources.values()):
        raise ConfigurationError(f"{where}: every source is eval_only; train on at least one")
    return [sources[name] for name in sorted(sources)]


def _source(values: Mapping[str, Any], where: str) -> Source:
    for name in values:
        if name not in OWN and name not in Source.model_fields:
            reason = next(iter(removed_among([str(name)])), f"{name!r} is not a key of a source")
            allowed = ", ".join([*Source.model_fields, *sorted(OWN)])
            raise ConfigurationError(
                f"{where}: {reason}; allowed are {allowed}; every other variable is the same for all sources"
            )
    try:
        return Source.model_validate(values)
    except ValidationError as error:
        key = str(error.errors()[0]["loc"][0])
        raise ConfigurationError(f"{where}: {key} is {values.get(key)!r}; give {_FORMS[key]}") from error


class _UniqueKeys:
    """Refuses a key that is there twice, of which YAML, and SkyPilot, would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)  # type: ignore[misc]


class _Loader(_UniqueKeys, yaml.SafeLoader):
    pass


class _TextLoader(_UniqueKeys, yaml.BaseLoader):
    pass


def read_yaml(path: Path, where: str, *, as_text: bool = False, has_several: bool = False) -> Any:
    """Return the content of a YAML file, ``as_text`` with every scalar as it is written.

    A file that ``has_several`` documents gives a list of them.

    Raises:
        ConfigurationError: it cannot be read; the message begins with ``where``.
    """
    loader = _TextLoader if as_text else _Loader
    try:
        text = path.read_text("utf-8")
        return [*yaml.load_all(text, loader)] if has_several else yaml.load(text, loader)
    except OSError as error:
        raise ConfigurationError(
            f"{where} cannot be read, seen from {Path.cwd()} ({error.strerror}); give a YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{where} is not YAML: {' '.join(str(error).split())}; correct it") from error


class Schedule:
    """The source of every group of a run, by the group's place in it: a pure function of the ratios.

    Of the first T groups each source has floor(T w) or ceil(T w), where w is its share of the ratios' sum: the quota
    method of apportionment (Balinski and Young 1975, Amer. Math. Monthly 82, 701). So where BATCH_SIZE times w is an
    integer, every step has exactly that many.
    """

    def __init__(self, ratios: Mapping[str, float]) -> None:
        """Make the schedule of ``ratios`` by name, all positive."""
        exact = {name: Fraction(str(ratio)) for name, ratio in sorted(ratios.items())}
        unit = math.lcm(*(ratio.denominator for ratio in exact.values()))
        self._ratios = {name: int(ratio * unit) for name, ratio in exact.items()}
        # After as many groups every source has had a whole number of them, and the schedule repeats.
        self._period = sum(self._ratios.values()) // math.gcd(*self._ratios.values())
        self._places: list[str] = []
        self._counts = dict.fromkeys(exact, 0)

    @property
    def shares(self) -> dict[str, Fraction]:
        """The share of all groups that each source has, by name."""
        total = sum(self._ratios.values())
        return {name: Fraction(ratio, total) for name, ratio in self._ratios.items()}

    def source(self, place: int) -> str:
        """Return the name of the source of the group at ``place``, from 0 on."""
        total, common = sum(self._ratios.values()), math.lcm(*self._ratios.values())
        while len(self._places) <= place % self._period:
            groups = len(self._places) + 1
            eligible = [name for name, ratio in self._ratios.items() if self._counts[name] * total < groups * ratio]
            # The source whose next group is due first, (count + 1) / ratio; the first by name of several.
            name = min(eligible, key=lambda name: (self._counts[name] + 1) * (common // self._ratios[name]))
            self._counts[name] += 1
            self._places.append(name)
        return self._places[place % self._period]

    def counts(self, start: int, end: int) -> dict[str, int]:
        """Return how many of the groups at ``start`` to ``end`` (exclusive) each source has."""
        names: Sequence[str] = [self.source(place) for place in range(start, end)]
        return {name: names.count(name) for name in self._ratios}
