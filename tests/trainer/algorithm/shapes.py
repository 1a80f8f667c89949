"""Groups of many shapes, drawn by Hypothesis."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from services.protocol.groups import TokenSequence
from tests.sequences import trained_sequence
from trainer.algorithm.packing import TrainingGroup

fast = settings(max_examples=50)


@st.composite
def groups_of_many_shapes(draw: st.DrawFn, most: int = 8) -> list[TrainingGroup]:
    """Draw groups whose completions may begin like an earlier one of the group; elsewhere all tokens are different.

    So a token id names a node of its group's prefix tree. Some tokens are not trained on.
    """
    token = iter(range(1, 1_000_000))
    groups = []
    for g in range(draw(st.integers(0, most))):
        prompt = [next(token) for _ in range(draw(st.integers(1, 20)))]
        sequences: list[TokenSequence] = []
        for n in draw(st.lists(st.integers(0, 30), min_size=0, max_size=6)):
            earlier = draw(st.sampled_from([[], *(s.completion_ids.tolist() for s in sequences)]))
            ids = earlier[: draw(st.integers(0, len(earlier)))] + [next(token) for _ in range(n)]
            loss_mask = draw(st.none() | st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            sequences.append(trained_sequence(ids, [-t / 1e6 for t in ids], [t / 1e3 for t in ids], loss_mask))
        groups.append(TrainingGroup(prompt, sequences, f"group-{g}", weight=g + 0.5, is_replayed=g % 2 == 1))
    return groups


def prefixes(group: TrainingGroup) -> set[tuple[int, ...]]:
    """Return the distinct prefixes that a forward pass over the group's completions reads, one after the other."""
    reads = [group.prompt_ids + s.completion_ids[:-1].tolist() for s in group.sequences]
    return {tuple(read[:end]) for read in reads for end in range(1, len(read) + 1)}
