"""JSON bodies: of requests, parsed by orjson within a limit of depth, and of replies."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from services.http.problems import ProblemError

MAX_DEPTH = 64
"""Our deepest record has about ten levels; orjson itself refuses to write more than 254."""

# Possessive quantifiers make this linear on any input; an unterminated string takes the rest.
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*"?', re.DOTALL)
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
    """Return whether a request declares its body as JSON."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


class JsonResponse(Response):
    """A reply written by orjson, numpy arrays included. orjson writes NaN as null, so ``content`` must have none."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return ``content`` as JSON."""
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def model_response(model: BaseModel, status: int = 200) -> Response:
    """Return a reply from a valid model: serialised once, and not validated again as FastAPI would."""
    return Response(model.__pydantic_serializer__.to_json(model), status, media_type="application/json")


class JsonRoute(APIRoute):
    """A route that takes JSON bodies only, as JsonRequest parses them, and whose endpoint returns its reply as a value.

    The endpoint's annotation describes the reply on the OpenAPI page. An endpoint may also return a Response.
    """

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Any]], **options: Any) -> None:
        @functools.wraps(endpoint)
        async def respond(*positional: Any, **named: Any) -> Response:
            reply = await endpoint(*positional, **named)
            if isinstance(reply, Response):
                return reply
            return model_response(reply) if isinstance(reply, BaseModel) else JsonResponse(reply)

        super().__init__(path, respond, **options)

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
