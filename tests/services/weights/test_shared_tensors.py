"""Weights on a GPU that trainer and engine share: what tells the engine where they are."""

from __future__ import annotations

import base64
import os
import pickle

import pytest

from services.core.endpoints import is_own_address
from services.weights.shared_tensors import BucketError, unpack_bucket


def test_nothing_of_a_pickle_is_executed() -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    with pytest.raises(BucketError, match="is not allowed"):
        unpack_bucket(base64.b64encode(pickle.dumps({"flattened_tensor": Attack(), "metadata": []})).decode())
    for text in (base64.b64encode(b"no pickle").decode(), "?"):
        with pytest.raises(BucketError):
            unpack_bucket(text)


def test_a_host_knows_its_own_addresses() -> None:
    assert is_own_address("127.0.0.1")
    assert is_own_address("localhost")
    assert not is_own_address("192.0.2.1")  # an address for documents
    assert not is_own_address("no-such-host.invalid")
