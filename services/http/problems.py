"""RFC 9457 problem documents: the form in which every service refuses a request and says why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, NoReturn

import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from services.protocol.base import Problem

PROBLEM_MEDIA_TYPE = "application/problem+json"
_PROBLEM = {PROBLEM_MEDIA_TYPE: {"schema": Problem.model_json_schema()}}

PROBLEM_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request is refused and changed nothing.", "content": _PROBLEM},
    "5XX": {"description": "The service cannot answer now.", "content": _PROBLEM},
}
"""The refusals of every operation, for the OpenAPI page."""

_MAX_ERRORS = 20
_ANTHROPIC_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_ANTHROPIC_TYPES |= {429: "rate_limit_error", 500: "api_error", 503: "overloaded_error", 507: "api_error"}


class ProblemError(HTTPException):
    """An error by which a route refuses a request; ``detail`` says what is wrong, where, and what to do."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None, **members: Any) -> None:
        super().__init__(status, detail, dict(headers) if headers else None)
        self.members = members


def refuse(status: int, detail: str, code: str) -> NoReturn:
    """Raise ProblemError with ``code`` in OpenAI's error; the header keeps OpenAI's clients from asking again."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error"
    raise ProblemError(status, detail, {"X-Should-Retry": "false"}, error={"type": kind, "code": code, "param": None})


def invalid_body(error: ValidationError) -> ProblemError:
    """Return the refusal, 400, of a body that is not valid, with its first mistakes."""
    mistakes = (f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()[:3])
    return ProblemError(400, "; ".join(map(printable, mistakes)))


def unknown_source(name: str, sources: Iterable[str]) -> ProblemError:
    """Return the refusal of a request for a source that is not in ``sources``, which has "" alone without SOURCES."""
    names = ", ".join(sources)
    there = f"there are {names}; give one of these" if names else "this run has none; leave it out"
    return ProblemError(422, f"source {name!r} is not in SOURCES: {there}")


def problem_response(
    status: int, detail: str, *, instance: str | None = None, headers: Mapping[str, str] | None = None, **members: Any
) -> Response:
    """Return a problem document as a response; ``members`` are members in addition to those of RFC 9457."""
    # Agents' clients read the member "error", Anthropic's also "type".
    if instance is not None and "/v1/messages" in instance:
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
        members |= {"type": "error", "error": {**members.get("error", {}), "type": kind, "message": detail}}
    elif instance is not None and "/v1/" in instance:
        members["error"] = {"message": detail, **members.get("error", {})}
    document: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        **({"instance": instance} if instance is not None else {}),
        **members,
    }
    return Response(orjson.dumps(document), status, dict(headers) if headers else None, PROBLEM_MEDIA_TYPE)


def install(app: Starlette) -> None:
    """Make every refusal of ``app`` a problem document."""
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = error.detail
    if error.status_code == 404 and detail == HTTPStatus.NOT_FOUND.phrase:
        detail = f"no route {printable(request.url.path)}; the routes are listed at /docs"
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        detail = f"{printable(request.method)} is not allowed here; allowed: {allowed}"
    members = error.members if isinstance(error, ProblemError) else {}
    return problem_response(
        error.status_code, detail, instance=printable(request.url.path), headers=error.headers, **members
    )


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    malformed = next((e for e in errors if e["type"] == "json_invalid"), None)
    if malformed is not None:
        reason = malformed.get("ctx", {}).get("error", "not JSON")
        return problem_response(400, f"the body is not valid JSON: {reason}", instance=printable(request.url.path))
    # The input itself is left out: it may be large, secret, or not printable.
    listed = [
        {"where": ".".join(printable(str(part)) for part in e["loc"]), "what": printable(e["msg"]), "type": e["type"]}
        for e in errors[:_MAX_ERRORS]
    ]
    detail = "; ".join(f"{e['where']}: {e['what']}" for e in listed[:3])
    more = f" (and {len(errors) - 3} more)" if len(errors) > 3 else ""
    return problem_response(422, detail + more, instance=printable(request.url.path), errors=listed)


def printable(text: str) -> str:
    """Return ``text`` without lone surrogates, cut to a length fit for a message."""
    clean = text.encode("utf-8", "replace").decode()
    return clean if len(clean) <= 500 else clean[:500] + "..."
