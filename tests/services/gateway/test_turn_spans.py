"""Traces say which call of the model sampled which tokens."""

from __future__ import annotations

from services.gateway.tree import Call, Tree, Turn
from services.protocol.groups import TokenSequence
from services.protocol.rewards import FinishReason


def call(tree: Tree, parent: Turn | None, added: list[int], *sampled: list[int]) -> list[Turn]:
    """Add a call that continues ``parent`` with ``added``; return its turns, one for each of ``sampled``."""
    name = f"c{len(tree.calls)}"
    made = Call(name, parent, added, [], {}, {})
    for number, ids in enumerate(sampled):
        completion = TokenSequence(
            completion_ids=ids,
            logprobs=[-1.0] * len(ids),
            policy_versions=[1] * len(ids),
            finish_reason=FinishReason.STOP,
        )
        made.turns.append(Turn(made, completion, {"content": name}, f"{name}{number}".encode(), 0))
    tree.add(made)
    return made.turns


def spans(tree: Tree) -> list[list[tuple[int, list[int]]]]:
    """Return by sequence the calls and their tokens."""
    return [[(t.call, s.completion_ids[t.start : t.end].tolist()) for t in s.turns] for s in tree.sequences()]


def test_calls_with_one_prompt_have_one_place_as_choices_have() -> None:
    tree = Tree()
    votes = [call(tree, None, [1, 2], [10 + number])[0] for number in range(3)]
    call(tree, None, [1, 3], [20])
    [choice, _] = call(tree, votes[1], [4], [30], [31])
    call(tree, votes[1], [4], [32])
    call(tree, votes[2], [4], [33])
    call(tree, choice, [5], [40])
    places = {tuple(s.completion_ids[t.start : t.end].tolist()): t.number for s in tree.sequences() for t in s.turns}
    assert [places[10,], places[11,], places[12,], places[20,]] == [0, 0, 0, 1]
    assert [places[30,], places[31,], places[32,], places[33,], places[40,]] == [2, 2, 2, 3, 4]


def test_a_turn_is_in_the_sequence_that_is_trained_on_it() -> None:
    tree = Tree()
    [first] = call(tree, None, [1], [10])
    call(tree, first, [2], [20])
    call(tree, first, [3], [30], [31])
    call(tree, None, [4], [40])
    assert spans(tree) == [[(0, [10]), (1, [20])], [(2, [30])], [(2, [31])], [(3, [40])]]
