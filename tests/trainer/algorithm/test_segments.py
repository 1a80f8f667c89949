"""Segments begin from the state of the token before them on their path, whatever else is in the micro-batch."""

from __future__ import annotations

import torch
from hypothesis import given

from tests.trainer.algorithm.shapes import fast, groups_of_many_shapes
from tests.trainer.tiny import random_groups
from trainer.algorithm.attention_layout import AttentionLayout, TreeMask, runs
from trainer.algorithm.packing import TrainingGroup, pack
from trainer.algorithm.segments import HISTORY, Segments

Path = tuple[int, ...]


def scanned(segments: Segments) -> list[Path]:
    """Return the tokens that each token's state has seen, if the segments are computed as they say."""
    outputs: list[Path] = []
    states: list[Path] = []
    for scans in segments.depths:
        after: list[Path] = []
        for scan in scans:
            parents = [()] * len(scan.rows) if scan.parents is None else [states[i] for i in scan.parents.tolist()]
            for state, row, padding in zip(parents, scan.rows.tolist(), scan.is_padding.tolist(), strict=True):
                assert padding == sorted(padding), "padding is on the right"
                for token, is_padding in zip(row, padding, strict=True):
                    state = state if is_padding else (*state, token)
                    outputs.append(state)
                after.append(state)
        states = after
    return [outputs[place] for place in segments.unpack.tolist()]


@fast
@given(groups=groups_of_many_shapes())
def test_a_state_has_seen_the_path_of_its_token(groups: list[TrainingGroup]) -> None:
    batch = pack([group for group in groups if group.sequences])
    assert batch.segments is not None
    paths: list[Path] = [()] * len(batch.input_ids)
    for path, own in runs(batch.layout.ends):
        for place in range(len(path) - own, len(path)):
            paths[int(path[place])] = tuple(path[: place + 1].tolist())
    assert scanned(batch.segments) == paths
    history, places = batch.segments.history.tolist(), batch.segments.places.tolist()
    zeros = (len(paths),) * HISTORY
    for place, seen in zip(places, paths, strict=True):
        assert tuple(history[place - HISTORY : place + 1]) == (zeros + seen)[-HISTORY - 1 :]


def test_segments_of_similar_lengths_share_a_call() -> None:
    ends = torch.tensor([400] * 100 + [150] * 50 + [213] * 63 + [400] * 187)
    depths = Segments.of(ends).depths
    assert [[tuple(scan.rows.shape) for scan in scans] for scans in depths] == [[(1, 100)], [(2, 63), (1, 187)]]


def test_padding_of_a_row_is_one_segment() -> None:
    """Each of up to 255 tokens as a root would have a state of its own."""
    groups = random_groups(1)
    alone, padded = pack(groups, AttentionLayout).segments, pack(groups, TreeMask).segments
    assert alone is not None
    assert padded is not None
    assert sum(len(s.rows) for s in padded.depths[0]) == sum(len(s.rows) for s in alone.depths[0]) + 1
