"""The store of samples: what a kill leaves, and what must not be mixed."""

import errno
import json
import os

import pytest

from evaluation.store import IDENTITY, SAMPLES, Kind, Sample, open_store
from services.core.errors import ConfigurationError, DependencyLostError
from services.protocol.rewards import FinishReason, RewardResult, RewardStatus

WHO = {"weights": "abc", "temperature": 1.0, "operations": ("+",)}


def sample(index: int, reward: float | None = 1.0, kind: Kind = Kind.SAMPLED) -> Sample:
    status = RewardStatus.SCORED if reward is not None else RewardStatus.ERROR
    return Sample(
        prompt_id="p",
        kind=kind,
        index=index,
        prompt="3+4=",
        ground_truth="7",
        completion="7\n\u2028",
        finish_reason=FinishReason.STOP,
        prompt_tokens=4,
        completion_tokens=2,
        server="http://s",
        seconds=0.1,
        result=RewardResult(reward=reward, status=status),
    )


def test_added_samples_are_there_the_next_time(tmp_path):
    with open_store(tmp_path, WHO) as store:
        store.add([sample(0, 0.0), sample(1, None)])
        store.add([sample(0), sample(0, kind=Kind.GREEDY)])  # a later line of a sample wins
        assert store.samples.keys() == {("p", Kind.SAMPLED, 0), ("p", Kind.SAMPLED, 1), ("p", Kind.GREEDY, 0)}
        written = dict(store.samples)
    with open_store(tmp_path, WHO) as store:
        assert store.samples == written
        assert [s.is_correct for s in store.samples.values()] == [True, None, True]


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_line_cut_off_by_a_kill_is_dropped_and_made_anew(tmp_path, cut):
    with open_store(tmp_path, WHO) as store:
        store.add([sample(0), sample(1)])
    file = tmp_path / SAMPLES
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    with open_store(tmp_path, WHO) as store:
        assert [key[2] for key in store.samples] == [0]
        store.add([sample(1)])
    assert file.read_bytes() == whole


def test_a_full_disk_is_named_with_what_to_do_and_keeps_what_was_written(tmp_path):
    def fill() -> None:
        with open_store(tmp_path, WHO) as store:
            store.add([sample(0)])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DependencyLostError, match=f"--output {tmp_path}: No space left on device; make room there"):
        fill()
    with open_store(tmp_path, WHO) as store:
        assert len(store.samples) == 1


def test_samples_of_another_evaluation_are_refused_with_the_difference(tmp_path):
    with open_store(tmp_path, WHO) as store:
        store.add([sample(0)])
    with (
        pytest.raises(ConfigurationError, match=r"temperature was 1\.0 and is 0\.7"),
        open_store(tmp_path, {**WHO, "temperature": 0.7}),
    ):
        pass
    with open_store(tmp_path, WHO) as store:  # the refusal left everything as it was
        assert len(store.samples) == 1


def test_an_evaluation_that_made_nothing_binds_nobody(tmp_path):
    with open_store(tmp_path, WHO):
        pass
    with open_store(tmp_path, {"weights": "other"}):
        pass
    assert json.loads((tmp_path / IDENTITY).read_text()) == {"weights": "other"}


def test_a_directory_that_is_in_use_or_holds_something_else_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / SAMPLES).write_text('{"step": 1}\n')
    (tmp_path / "file").write_text("")
    with open_store(tmp_path, WHO):
        for name, said in (".", "another process writes"), ("other", "line 1, is not a sample"), ("file", "--output"):
            with pytest.raises(ConfigurationError, match=said), open_store(tmp_path / name, WHO):
                pass
    assert (tmp_path / "other" / SAMPLES).read_text() == '{"step": 1}\n'
