"""JSON bodies of requests, parsed by orjson within a limit of depth."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from services.http.problems import ProblemError

MAX_DEPTH = 64
"""Our deepest record has about ten levels; orjson itself refuses to write more than 254."""

# Possessive quantifiers make this linear on any input; an unterminated string takes the rest.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def json_depth(body: bytes) -> int:
    """Return the nesting depth of a JSON text's arrays and objects, 0 for a bare value, in linear time."""
    brackets = _STRINGS.sub(b"", body).translate(None, _NOT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)


class JsonRequest(Request):
    """A request whose body is parsed by orjson, which refuses NaN, infinities, lone surrogates and invalid UTF-8."""

    async def json(self) -> Any:
        """Return the parsed body.

        Raises:
            ProblemError: the body is nested more than MAX_DEPTH deep.
            orjson.JSONDecodeError: the body is not JSON.
        """
        if not hasattr(self, "_json"):
            body = await self.body()
            if (depth := json_depth(body)) > MAX_DEPTH:
                raise ProblemError(400, f"the body is nested {depth} levels deep; allowed are {MAX_DEPTH}")
            self._json = orjson.loads(body)
        return self._json


def is_json(request: Request) -> bool:
    """Return whether a request's body is said to be JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


class JsonRoute(APIRoute):
    """A route that takes JSON bodies only, as JsonRequest parses them."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Return the handler that FastAPI calls."""
        handle = super().get_route_handler()

        async def handler(http: Request) -> Response:
            request = JsonRequest(http.scope, http.receive)
            field = self.body_field
            if field is not None and not is_json(request) and (field.field_info.is_required() or await request.body()):
                raise ProblemError(415, "send the body as JSON, with the header 'Content-Type: application/json'")
            response: Response = await handle(request)
            return response

        return handler
