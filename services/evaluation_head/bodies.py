"""Bodies of POST /evaluate whose states are bytes: raw float32, and MessagePack with the fields of the JSON body.

Both have the states as float32 in little-endian byte order and row-major (C) order, with their shape beside them. A
reader gives the request's other fields and the states, and refuses what the JSON route refuses.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import msgpack
import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from services.evaluation_head.policy import StatesRefusedError
from services.http.problems import ProblemError
from services.protocol.evaluation import EvaluateRequest

RAW = "application/octet-stream"
MSGPACK = "application/msgpack"
_SHAPE = re.compile(r"[0-9]{1,9}(,[0-9]{1,9}){0,8}")


class BinaryRoute(APIRoute):
    """A route for requests whose body is raw float32 or MessagePack; others pass on to the next route of the path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the route takes the request."""
        return super().matches(scope) if media_type(scope) in (RAW, MSGPACK) else (Match.NONE, {})


def media_type(scope: Scope) -> str:
    """Return the media type of a request's body without its parameters, "" where it has none."""
    given = Headers(scope=scope).get("content-type", "") if scope["type"] == "http" else ""
    return given.partition(";")[0].strip().lower()


class BinaryRequest(NamedTuple):
    """A request, and its states [count, *shape]. In ``request`` zeros stand for the states; None: only reports."""

    request: EvaluateRequest
    states: NDArray[np.float32] | None


async def read_request(http: Request) -> BinaryRequest:
    """Read a request of a BinaryRoute. A raw body has its shape and the other fields in the query.

    Raises:
        ProblemError: the body is not MessagePack (400); shape and bytes disagree, or a number is not finite (422).
        RequestValidationError: a field is not allowed.
    """
    body = await http.body()
    fields: dict[str, Any]
    if media_type(http.scope) == RAW:
        fields = {**http.query_params, "states": body}
        if _SHAPE.fullmatch(fields.get("shape", "")):
            fields["shape"] = [int(size) for size in fields["shape"].split(",")]
    else:
        fields = _unpacked(body)
    states = _states(fields)
    if states is not None:
        # So that the model checks their number, and the number of episodes.
        fields["states"] = [0.0] * len(states)
    try:
        return BinaryRequest(EvaluateRequest.model_validate(fields), states)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from error


def _unpacked(body: bytes) -> dict[str, Any]:
    try:
        fields = msgpack.unpackb(body)
    except (ValueError, msgpack.UnpackException) as error:
        raise ProblemError(400, f"the body is not valid MessagePack: {error!r}") from error
    if not isinstance(fields, dict):
        raise ProblemError(422, "the body must be a map with the fields of the JSON body, and 'shape' beside 'states'")
    return fields


def _states(fields: dict[str, Any]) -> NDArray[np.float32] | None:
    """Take ``states`` and ``shape`` out of a request's fields and return the array; None where there is neither.

    Raises:
        StatesRefusedError: they do not fit together, or a number is not finite.
    """
    if "state" in fields:
        raise StatesRefusedError("state is for JSON; send the bytes of one state as states, with a shape such as 1,4")
    if not fields.keys() & {"states", "shape"}:
        return None
    content, shape = fields.pop("states", None), fields.pop("shape", None)
    _check_form(content, shape)
    states = np.frombuffer(content, "<f4").reshape(shape).astype(np.float32, copy=False)
    finite = np.isfinite(states).reshape(len(states), -1).all(axis=1)
    if not finite.all():
        raise StatesRefusedError(f"state {int(finite.argmin())} has NaN or an infinity; needed are finite float32")
    return states


def _check_form(content: object, shape: object) -> None:
    if not isinstance(shape, list) or not shape or not all(type(size) is int and size > 0 for size in shape):
        raise StatesRefusedError(
            f"shape is {repr(shape)[:60]}; needed are the number of states and the shape of one, as in ?shape=64,4 of "
            "a raw body or [64, 4] in MessagePack"
        )
    needed = 4 * math.prod(shape)
    if not isinstance(content, bytes) or len(content) != needed:
        given = f"{len(content)} bytes" if isinstance(content, bytes) else type(content).__name__
        raise StatesRefusedError(f"states are {given}; {shape} of float32 are {needed} bytes")
