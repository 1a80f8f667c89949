"""A file of groups whose completions are to be trained on as they are: a head, then the groups in their byte form.

``grpo groups`` writes it from the record of a run. Nobody tokenises its texts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from services.protocol.base import WireModel
from services.protocol.groups import Group, GroupFormatError, first_part, joined, pack, pack_sequences, unpack
from services.protocol.groups import unpack_sequences as unpack_head


class GroupFileHead(WireModel):
    """The first part of a file of groups."""

    kind: Literal["selected groups"] = "selected groups"
    run: str
    model: str | None = None
    """The model that the run began as."""
    tokenizer: str
    """The digest of the tokenizer whose ids the groups have."""
    where: str
    """The expression that selected the completions."""


def parts(head: GroupFileHead, groups: Iterable[Group]) -> Iterator[bytes]:
    """Yield the bytes of a file of groups."""
    yield joined([pack_sequences(head.model_dump(), [])])
    for group in groups:
        yield joined([pack(group)])


def read(path: Path) -> tuple[GroupFileHead, Iterator[Group]]:
    """Return the head and the groups of a file; a group is read when it is asked for.

    Raises:
        OSError: the file cannot be read.
        GroupFormatError: it is another file, or damaged; the iterator raises this, too.
    """
    with path.open("rb") as file:
        try:
            head = GroupFileHead.model_validate(unpack_head(first_part(file))[0])
        except ValueError as error:
            raise GroupFormatError(f"{path} was not written by `grpo groups`: {error}") from error

    def groups() -> Iterator[Group]:
        with path.open("rb") as stream:
            first_part(stream)
            while stream.peek(1):
                yield unpack(first_part(stream))

    return head, groups()
