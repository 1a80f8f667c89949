"""Deltas of policy versions, and a node's copy that follows them; no trainer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.core.errors import ConfigurationError
from services.core.files import CHANGES_FILE, RECORD_FILE
from services.weights import deltas
from services.weights.deltas import DAMAGE, FARTHEST, ModelCopy, Words, apply, changes, checksums
from services.weights.policy_store import DeltaRecord, PolicyStore, is_delta

pytestmark = pytest.mark.leaving

HOLD_SECONDS = 600.0


def weights(seed: int, size: int = 3 * FARTHEST + 7) -> dict[str, Words]:
    random = np.random.default_rng(seed)
    return {name: random.integers(0, FARTHEST, size, np.uint16) for name in ("a.weight", "b.weight")}


def step(before: dict[str, Words], seed: int) -> dict[str, Words]:
    """Changes a few words of one tensor, which no other seed changes."""
    after = {name: words.copy() for name, words in before.items()}
    after["a.weight"][seed::10_000] ^= np.uint16(1)
    return after


class Volume:
    """A store with an anchor and deltas, without a trainer."""

    def __init__(self, directory: Path) -> None:
        self.store = PolicyStore(directory / "policy")
        self.states: dict[int, dict[str, Words]] = {}
        self.chain: list[tuple[int, str]] = []
        self.reads: list[int] = []

    def publish(self, version: int, *, is_whole: bool = False) -> None:
        before = self.states.get(self.chain[-1][0]) if self.chain else None
        state = step(before, version) if before else weights(0)
        hidden = self.store.begin(version)
        if is_whole or before is None:
            self.chain = []
            save_file(state, hidden / "model.safetensors")
            (hidden / "config.json").write_text("{}")
        else:
            save_file(changes(before, state), hidden / CHANGES_FILE)
        self.chain = [*self.chain, (version, f"identity {version}")]
        record = DeltaRecord(chain=self.chain, sums=checksums(state))
        (hidden / RECORD_FILE).write_text(record.model_dump_json())
        self.store.commit(version)
        self.states[version] = state

    def versions(self) -> list[int]:
        return [policy.version for policy in self.store.published()]


def three_versions(directory: Path) -> Volume:
    """A volume with an anchor and two deltas."""
    volume = Volume(directory)
    for version in (1, 2, 3):
        volume.publish(version)
    return volume


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    return three_versions(tmp_path)


@pytest.fixture
def copy(volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCopy:
    real = deltas.load_file

    def load(path: Path) -> dict[str, Words]:
        volume.reads.append(int(path.parent.name[1:]))
        loaded: dict[str, Words] = real(path)
        return loaded

    monkeypatch.setattr(deltas, "load_file", load)
    return ModelCopy(volume.store, tmp_path / "copy")


def is_version(copy: ModelCopy, state: dict[str, Words]) -> bool:
    read = load_file(copy.path / "model.safetensors")
    return read.keys() == state.keys() and all(np.array_equal(read[name], words) for name, words in state.items())


@pytest.mark.parametrize("size", [1, 5, FARTHEST - 1, FARTHEST, FARTHEST + 1, 3 * FARTHEST + 7])
@pytest.mark.parametrize("places", [[0], [-1], [0, -1], []])
def test_a_delta_gives_every_bit_of_the_next_version(size: int, places: list[int]) -> None:
    before, after = weights(1, size), weights(1, size)
    after["a.weight"][places] ^= 1
    arrays = changes(before, after)
    assert bool(arrays) is bool(places)
    apply(before, arrays)
    assert all(np.array_equal(before[name], words) for name, words in after.items())


def test_a_delta_of_few_words_has_few_bytes(volume: Volume) -> None:
    whole = (volume.store.path(1) / "model.safetensors").stat().st_size
    assert (volume.store.path(2) / CHANGES_FILE).stat().st_size < whole / 1000
    assert [is_delta(volume.store.path(version)) for version in (1, 2, 3)] == [False, True, True]


def test_a_copy_reads_an_anchor_once_and_then_each_delta_once(volume: Volume, copy: ModelCopy) -> None:
    copy.become(volume.store.record(1))
    shutil.rmtree(volume.store.path(1))  # is read no more
    copy.become(volume.store.record(2))
    copy.become(volume.store.record(2))
    copy.become(volume.store.record(3))
    assert is_version(copy, volume.states[3])
    assert (copy.path / "config.json").is_file()
    assert volume.reads == [2, 3]


def test_a_copy_that_comes_late_reads_the_anchor_and_all_deltas(volume: Volume, copy: ModelCopy) -> None:
    copy.become(volume.store.record(3))
    assert is_version(copy, volume.states[3])
    assert volume.reads == [2, 3]


def test_a_copy_of_other_weights_begins_with_the_new_anchor(volume: Volume, copy: ModelCopy) -> None:
    copy.become(volume.store.record(3))
    volume.publish(4, is_whole=True)
    volume.publish(5)
    copy.become(volume.store.record(5))
    assert is_version(copy, volume.states[5])


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut_off, flip_a_bit, empty])
@pytest.mark.parametrize("file", ["v000001/model.safetensors", f"v000002/{CHANGES_FILE}", f"v000003/{CHANGES_FILE}"])
def test_a_damaged_file_is_refused_and_a_whole_version_helps(
    volume: Volume, copy: ModelCopy, file: str, damage: Callable[[Path], None]
) -> None:
    damage(volume.store.policy_dir / file)
    with pytest.raises(DAMAGE):
        copy.become(volume.store.record(3))
    assert copy.identity == "", "nobody takes it for a version"
    volume.publish(3, is_whole=True)
    copy.become(volume.store.record(3))
    assert is_version(copy, volume.states[3])


def test_a_damaged_record_is_refused(volume: Volume) -> None:
    cut_off(volume.store.path(3) / RECORD_FILE)
    with pytest.raises(DAMAGE):
        volume.store.record(3)


def test_a_copy_that_others_wrote_to_is_read_again(volume: Volume, copy: ModelCopy) -> None:
    copy.become(volume.store.record(2))
    flip_a_bit(copy.path / "model.safetensors")
    copy.become(volume.store.record(3))
    assert is_version(copy, volume.states[3])
    assert volume.reads == [2, 3, 2, 3]


def test_a_node_without_room_says_what_to_do(volume: Volume, copy: ModelCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(copy.path.parent)._replace(free=1000)
    monkeypatch.setattr(deltas.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigurationError, match=r"has no room for this node's copy .* unset PUBLISH_DELTA"):
        copy.become(volume.store.record(1))


def test_what_a_kept_or_held_delta_is_read_with_is_kept(volume: Volume) -> None:
    volume.store.prune(1, HOLD_SECONDS)
    assert volume.versions() == [1, 2, 3]
    hold = volume.store.hold(2)
    volume.publish(4, is_whole=True)
    volume.publish(5)
    volume.store.prune(1, HOLD_SECONDS)
    assert volume.versions() == [1, 2, 4, 5]
    volume.store.release(hold)
    volume.store.prune(1, HOLD_SECONDS)
    assert volume.versions() == [4, 5]


def test_a_record_that_the_volume_does_not_give_costs_no_version(volume: Volume) -> None:
    record = volume.store.path(3) / RECORD_FILE
    content = record.read_bytes()
    record.unlink()
    record.mkdir()  # which is not read, as a file of a volume whose server is gone
    with pytest.raises(IsADirectoryError):
        volume.store.is_complete(3)
    volume.store.prune(1, HOLD_SECONDS)
    assert volume.versions() == [1, 2, 3]
    record.rmdir()
    record.write_bytes(content[:20])  # nobody can read this version, so it needs no anchor
    volume.store.prune(1, HOLD_SECONDS)
    assert volume.versions() == [3]


def test_who_follows_no_deltas_finds_the_newest_whole_version(volume: Volume) -> None:
    newest, whole = volume.store.newest(), volume.store.newest(is_whole=True)
    assert newest is not None
    assert whole is not None
    assert (newest.version, whole.version) == (3, 1)


def test_a_version_is_there_when_everything_that_makes_it_is(volume: Volume) -> None:
    assert volume.store.is_complete(3)
    volume.store.remove(2)
    assert not volume.store.is_complete(3)
    volume.store.remove(2)  # as a second reader
