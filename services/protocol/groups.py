"""Sequences of tokens and groups of them: generated, scored, stored and trained on.

The numbers of a sequence are arrays with one entry a token. They are made once, where the tokens are sampled; the wire,
the replay buffer, the record of a step and the ranks carry them as the bytes of ``pack``, and packing reads them.
"""

from __future__ import annotations

import math
import statistics
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from services.protocol.base import MAX_SEQUENCES, MAX_TOKENS, Count, Finite, WireModel
from services.protocol.chat import EpisodeFigures, Message
from services.protocol.prompts import Prompt
from services.protocol.rewards import FinishReason, RewardResult

TEACHER = "teacher_logprobs"
"""The array of a sequence with a teacher's log-probabilities, 0 outside the loss mask. A sequence that no teacher has
scored lacks it."""
LARGEST_LOGPROB = 1e-3
"""Engines in bfloat16 return log-probabilities slightly above zero."""


def _array(value: Any, kinds: str, dtype: type[np.generic]) -> NDArray[Any]:
    """Return a list or an array as an array that cannot be written; ``kinds`` are numpy's kinds of types it may have.

    Raises:
        ValueError: it is something else, or has too many entries.
    """
    if not isinstance(value, list | tuple | np.ndarray):
        raise ValueError(f"a list with one entry a token is needed, got {type(value).__name__}")
    if len(value) > MAX_TOKENS:
        raise ValueError(f"{len(value)} entries; allowed are {MAX_TOKENS}")
    array = np.asarray(value) if len(value) else np.empty(0, dtype)
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise ValueError(f"one {dtype.__name__} a token is needed, got {array.dtype} of shape {array.shape}")
    return array


def _frozen(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    result = array.astype(dtype, copy=array.flags.writeable)
    result.flags.writeable = False
    return result


def _counts(value: Any) -> NDArray[np.int32]:
    array = _array(value, "iu", np.int32)
    if len(array) and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
        raise ValueError(f"entries from 0 to 2**31 - 1 are allowed, got {array.min()} to {array.max()}")
    return _frozen(array, np.int32)


def _numbers(value: Any) -> NDArray[np.float64]:
    array = _array(value, "fiu", np.float64)
    if not np.isfinite(array).all():
        raise ValueError("every entry must be finite")
    return _frozen(array, np.float64)


def _flags(value: Any) -> NDArray[np.bool_]:
    return _frozen(_array(value, "b", np.bool_), np.bool_)


_AS_LIST = PlainSerializer(lambda array: array.tolist(), when_used="json")
_INTEGERS = WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}})
_NUMBERS = WithJsonSchema({"type": "array", "items": {"type": "number"}})
_BOOLEANS = WithJsonSchema({"type": "array", "items": {"type": "boolean"}})

Counts = Annotated[NDArray[np.int32], PlainValidator(_counts), _AS_LIST, _INTEGERS]
"""Token ids or policy versions, [L]."""
Numbers = Annotated[NDArray[np.float64], PlainValidator(_numbers), _AS_LIST, _NUMBERS]
Flags = Annotated[NDArray[np.bool_], PlainValidator(_flags), _AS_LIST, _BOOLEANS]


_ARRAYS = {"completion_ids", "logprobs", "policy_versions", "loss_mask", "advantages", "arrays"}
"""The fields of a sequence that are arrays."""


class Turn(WireModel):
    """A turn of an episode: completion tokens ``start`` to ``end`` (exclusive), and the reward that follows them.

    ``number`` counts the model's turns in the episode from 0 on, in the order in which they were taken. Calls with the
    same prompt have the same number, as the choices of one call do: each samples the same turn again. ``call`` is the
    call of the episode that sampled it, from 0 on.
    ``reward`` is that of the turn and of those after it that other sequences have, up to this sequence's next turn. So
    the rewards of a sequence's turns from one on sum to what the episode earned from that turn on. It is None where no
    reward was given for turns.
    """

    number: Count
    start: Count
    end: Count
    reward: Finite | None = None
    call: Count | None = None


class Tokens(WireModel):
    """Tokens after a prompt, [L], with what was noted of each when it was sampled.

    ``logprobs`` are the behaviour policy's log-probabilities: of the temperature-scaled distribution, before any top-p
    or top-k cut. ``policy_versions`` has the version that sampled each token. ``loss_mask`` is False at tokens that the
    policy did not sample, such as a tool's results: they are read, not trained on, and their log-probability and
    version mean nothing. Without it the policy sampled every token. ``turns`` are the turns that are trained on in this
    sequence, in order, where there are several or they have rewards.
    """

    completion_ids: Counts
    logprobs: Numbers
    policy_versions: Counts
    loss_mask: Flags | None = None
    finish_reason: FinishReason
    turns: list[Turn] | None = Field(default=None, max_length=MAX_SEQUENCES)

    def __eq__(self, other: object) -> bool:
        """Return whether everything is equal, the arrays to the bit."""
        if not isinstance(other, type(self)):
            return NotImplemented
        mine, theirs = ({name: x.tobytes() for name, x in one.per_token.items()} for one in (self, other))
        return mine == theirs and self.model_dump(exclude=_ARRAYS) == other.model_dump(exclude=_ARRAYS)

    def __hash__(self) -> int:
        """Return the hash of the token ids, which equal sequences have in common."""
        return hash(self.completion_ids.tobytes())

    @model_validator(mode="after")
    def _one_entry_per_token(self) -> Self:
        for name, values in self.per_token.items():
            if len(values) != self.tokens:
                raise ValueError(f"{self.tokens} completion_ids but {len(values)} {name}: give one a token")
        if (largest := self.trained(self.logprobs).max(initial=-math.inf)) > LARGEST_LOGPROB:
            raise ValueError(f"logprobs must be <= 0, got {largest}")
        place = 0
        for turn in self.turns or ():
            if not place <= turn.start < turn.end <= self.tokens:
                raise ValueError(f"turn {turn.number}, tokens {turn.start} to {turn.end}, overlaps another or the end")
            place = turn.end
        return self

    @property
    def per_token(self) -> dict[str, NDArray[Any]]:
        """The arrays by name."""
        named = {name: getattr(self, name) for name in ("completion_ids", "logprobs", "policy_versions", "loss_mask")}
        return {name: values for name, values in named.items() if values is not None}

    @property
    def tokens(self) -> int:
        """The number of tokens, L."""
        return len(self.completion_ids)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Which of the L tokens are trained on."""
        return np.ones(self.tokens, np.bool_) if self.loss_mask is None else self.loss_mask

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that the policy sampled, which are those of the loss."""
        return self.tokens if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))

    def trained(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return those of L ``values`` whose token is trained on."""
        return values if self.loss_mask is None else values[self.loss_mask]

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled a token of this completion."""
        sampled = self.trained(self.policy_versions)
        return int((sampled if len(sampled) else self.policy_versions).min(initial=2**31 - 1))


class TokenSequence(Tokens):
    """A completion as the engine returned it, or a sequence of an agent's episode; with its result once it is scored.

    ``completion`` is its text. ``episode`` is the number within the group of the episode that the sequence belongs to;
    all sequences of an episode have the same reward. A sequence without it is an episode of its own. ``messages`` is
    the sequence's conversation, for people to read. ``seat`` is the seat of a game that the sequence played; rewards
    are compared with those of the same seat only. ``advantages`` is None until they are computed, unless the sequence
    brings its own. ``arrays`` has further numbers of each token by name, such as a critic's ``values`` and ``returns``.
    """

    completion: str = ""
    result: RewardResult | None = None
    episode: Count | None = None
    seat: Count | None = None
    messages: list[Message] | None = None
    advantages: Numbers | None = None
    arrays: dict[str, Numbers] = Field(default_factory=dict)

    @property
    def per_token(self) -> dict[str, NDArray[Any]]:
        """The arrays by name."""
        advantages = {} if self.advantages is None else {"advantages": self.advantages}
        return {**super().per_token, **advantages, **self.arrays}

    @property
    def reward(self) -> float | None:
        """The reward, or None where the completion could not be scored."""
        return None if self.result is None else self.result.reward

    @property
    def scoring(self) -> RewardResult:
        """The result of scoring, which every sequence of a group has."""
        assert self.result is not None
        return self.result

    @classmethod
    def trusted(cls, fields: dict[str, Any]) -> TokenSequence:
        """Return the sequence of ``unpack_sequences``'s fields, whose arrays were checked before they were packed."""
        turns, result = fields.get("turns"), fields.get("result")
        return cls.model_construct(
            **fields
            | {
                "finish_reason": FinishReason(fields["finish_reason"]),
                "turns": None if turns is None else [Turn(**turn) for turn in turns],
                "result": None if result is None else RewardResult(**result),
            }
        )

    def then(self, further: TokenSequence) -> TokenSequence:
        """Return a completion in one piece, given the tokens that were sampled after this one's."""
        if not self.tokens:
            return further
        return TokenSequence(
            completion=self.completion + further.completion,
            completion_ids=np.concatenate([self.completion_ids, further.completion_ids]),
            logprobs=np.concatenate([self.logprobs, further.logprobs]),
            policy_versions=np.concatenate([self.policy_versions, further.policy_versions]),
            finish_reason=further.finish_reason,
        )


EMPTY = TokenSequence(completion_ids=[], logprobs=[], policy_versions=[], finish_reason=FinishReason.ABORT)
"""The beginning of every completion."""


def by_episode(sequences: Sequence[TokenSequence]) -> list[list[TokenSequence]]:
    """Return the sequences of a group by episode, in the order of each episode's first sequence."""
    episodes: dict[int, list[TokenSequence]] = {}
    for place, sequence in enumerate(sequences):
        # No episode has a negative number.
        number = -1 - place if sequence.episode is None else sequence.episode
        episodes.setdefault(number, []).append(sequence)
    return list(episodes.values())


class Group(WireModel):
    """A prompt with its G scored completions, or with the sequences of its G episodes, which continue its token ids.

    A group of episodes has their figures by number, where a trace was received, and ``episodes_failed``: by reason, how
    many of them have no reward, and also those of prompts that got no group since the maker's last group.
    ``failure_examples`` has for each reason what one of those episodes says.
    """

    group_id: str = Field(min_length=1, max_length=200)
    prompt: Prompt
    sequences: list[TokenSequence] = Field(min_length=1, max_length=MAX_SEQUENCES)
    episode_figures: dict[Count, EpisodeFigures] | None = None
    episodes_failed: dict[str, Count] | None = None
    failure_examples: dict[str, str] | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if not self.prompt.prompt_ids:
            raise ValueError("prompt.prompt_ids is empty: the first completion token is predicted from the prompt")
        if any(sequence.result is None for sequence in self.sequences):
            raise ValueError("a sequence has no result: score it, or say why it cannot be scored")
        for sequences in self.episodes:
            if len({e.reward for e in sequences}) > 1:
                raise ValueError(f"the sequences of episode {sequences[0].episode} have different rewards")
        return self

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's token ids."""
        return self.prompt.prompt_ids

    @property
    def episodes(self) -> list[list[TokenSequence]]:
        """The sequences by episode; a completion is an episode of one sequence."""
        return by_episode(self.sequences)

    @property
    def policy_version(self) -> int:
        """The oldest policy version that sampled any token of the group; staleness is counted from it."""
        return min(sequence.oldest_version for sequence in self.sequences)

    @property
    def rewards(self) -> list[float]:
        """One reward an episode, NaN where it could not be scored."""
        return [math.nan if first.reward is None else first.reward for first, *_ in self.episodes]


# --- groups as bytes --------------------------------------------------------------------------------------------------

FORMAT = 3
"""The version of the byte form: in its first byte, then the length of the header, and a checksum of that length and of
all that follows."""
_PREFIX = struct.Struct("<BII")


class GroupFormatError(ValueError):
    """The bytes are those of another version of this program, or damaged."""


def pack(group: Group) -> bytes:
    """Return a group as bytes, from which ``unpack`` makes it again, equal to the bit."""
    return pack_sequences(group.model_dump(mode="json", exclude={"sequences"}), group.sequences)


def unpack(data: bytes | memoryview) -> Group:
    """Return a packed group, checked field by field; its arrays are views of ``data``.

    Raises:
        GroupFormatError: another version of this program packed the group, or its bytes are damaged.
        ValidationError: a field is not valid.
    """
    header, sequences = unpack_sequences(data)
    return Group.model_validate({**header, "sequences": sequences})


def pack_sequences(header: Mapping[str, Any], sequences: Sequence[TokenSequence]) -> bytes:
    """Return sequences as bytes, with a ``header`` of values for JSON.

    A column has the joined arrays of one name. Float64 becomes float32 where that is exact. Of integers and flags that
    are constant within each sequence, as a policy version mostly is, only one a sequence is kept, in the header.
    """
    arrays = [sequence.per_token for sequence in sequences]
    columns: list[list[Any]] = []
    parts: list[bytes] = []
    for name in dict.fromkeys(name for of_sequence in arrays for name in of_sequence):
        by_sequence = [of_sequence.get(name) for of_sequence in arrays]
        joined = np.concatenate([values for values in by_sequence if values is not None])
        if joined.dtype.kind == "f":
            # A number beyond float32's range becomes infinite here, differs, and is kept as float64.
            with np.errstate(over="ignore"):
                short = joined.astype(np.float32)
            joined = short if np.array_equal(short, joined) else joined
        elif all(values is None or (values == values[:1]).all() for values in by_sequence):
            constants = [None if values is None else values[:1].tolist() for values in by_sequence]
            columns.append([name, joined.dtype.str, constants])
            continue
        columns.append([name, joined.dtype.str, [values is not None for values in by_sequence]])
        parts.append(joined.tobytes())
    dumps = (s.model_dump(mode="json", exclude=_ARRAYS) | {"tokens": s.tokens} for s in sequences)
    fields = [{name: value for name, value in dump.items() if value is not None} for dump in dumps]
    text = orjson.dumps({**header, "sequences": fields, "columns": columns})
    body = b"".join((text, *parts))
    return _PREFIX.pack(FORMAT, len(text), zlib.crc32(body, len(text))) + body


def unpack_sequences(data: bytes | memoryview) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the sequences' fields, of which only the checksum is checked.

    Raises:
        GroupFormatError: another version of this program packed them, or the bytes are damaged.
    """
    check_format(data)
    length = _PREFIX.unpack_from(data)[1]
    place = _PREFIX.size + length
    header: dict[str, Any] = orjson.loads(memoryview(data)[_PREFIX.size : place])
    sequences: list[dict[str, Any]] = header.pop("sequences")
    lengths = [sequence.pop("tokens") for sequence in sequences]
    for name, dtype, entries in header.pop("columns"):
        for sequence, tokens, entry in zip(sequences, lengths, entries, strict=True):
            if entry is None or entry is False:
                continue
            if entry is True:
                values = np.frombuffer(data, dtype, tokens, place)
                place += values.nbytes
            else:
                values = np.repeat(np.array(entry, dtype), tokens) if tokens else np.empty(0, dtype)
            target = sequence if name in _ARRAYS else sequence.setdefault("arrays", {})
            target[name] = values.astype(np.float64) if values.dtype.kind == "f" else values
    return header, sequences


def check_format(data: bytes | memoryview) -> None:
    """Check that ``data`` are the whole bytes of a group in this version's form.

    Raises:
        GroupFormatError: they are not.
    """
    if len(data) < _PREFIX.size or data[0] != FORMAT:
        actual = f"format {data[0]}" if len(data) else "no bytes"
        raise GroupFormatError(f"a group has {actual}; this program reads format {FORMAT}, so begin a new run")
    _, length, checksum = _PREFIX.unpack_from(data)
    if zlib.crc32(memoryview(data)[_PREFIX.size :], length) != checksum:
        raise GroupFormatError("a group is damaged: its checksum differs")


def split(data: bytes | memoryview) -> Iterator[memoryview]:
    """Yield the parts of ``joined`` bytes."""
    view, place = memoryview(data), 0
    while place < len(view):
        is_whole = len(view) - place >= _LENGTH.size
        (length,) = _LENGTH.unpack_from(view, place) if is_whole else (0,)
        place += _LENGTH.size
        if length > len(view) - place or not is_whole:
            raise GroupFormatError("the last part is cut off")
        yield view[place : place + length]
        place += length


def first_part(stream: BinaryIO) -> bytes:
    """Return the first part of a file of ``joined`` bytes, or the next one, without reading the others."""
    (length,) = _LENGTH.unpack(stream.read(_LENGTH.size).ljust(_LENGTH.size, b"\0"))
    return stream.read(length)


_LENGTH = struct.Struct("<I")


def joined(parts: Sequence[bytes | memoryview]) -> bytes:
    """Return parts as one piece of bytes, each after its length."""
    return b"".join(piece for part in parts for piece in (_LENGTH.pack(len(part)), part))


class GroupFileHead(WireModel):
    """The first part of a file of groups whose completions are trained on as they are, which ``grpo groups`` writes."""

    kind: Literal["selected groups"] = "selected groups"
    run: str
    model: str | None = None
    """The model that the run began as."""
    tokenizer: str
    """The digest of the tokenizer whose ids the groups have."""
    where: str
    """The expression that selected the completions."""


def group_file(head: GroupFileHead, groups: Iterable[Group]) -> Iterator[bytes]:
    """Yield the bytes of a file of groups."""
    yield joined([pack_sequences(head.model_dump(), [])])
    for group in groups:
        yield joined([pack(group)])


def read_group_file(path: Path) -> tuple[GroupFileHead, Iterator[Group]]:
    """Return the head and the groups of a file; a group is read when it is asked for.

    Raises:
        OSError: the file cannot be read.
        GroupFormatError: it is another file, or damaged; the iterator raises this, too.
    """
    with path.open("rb") as file:
        try:
            head = GroupFileHead.model_validate(unpack_sequences(first_part(file))[0])
        except ValueError as error:
            raise GroupFormatError(f"{path} was not written by `grpo groups`: {error}") from error

    def groups() -> Iterator[Group]:
        with path.open("rb") as stream:
            first_part(stream)
            while stream.peek(1):
                yield unpack(first_part(stream))

    return head, groups()


def environment_figures(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean over episodes of each figure that the environment gives; nothing without an environment."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for group in groups:
        for episode in (group.episode_figures or {}).values():
            for name, value in episode.figures.items():
                by_name[name].append(value)
    return {f"environment_{name}": statistics.fmean(values) for name, values in by_name.items()}
