"""Query parameters read as one model, for routes where FastAPI's reading of each by itself would cost too much."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

Query = TypeVar("Query", bound=BaseModel)


def read_query(request: Request, model: type[Query]) -> Query:
    """The query of a request.

    Raises:
        RequestValidationError: it does not fit; the service answers 422 with a problem document.
    """
    given = request.query_params
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        problems = [{**problem, "loc": ("query", *problem["loc"])} for problem in error.errors(include_input=False)]
        raise RequestValidationError(problems) from None


def query_parameters(model: type[BaseModel]) -> list[dict[str, Any]]:
    """The parameters of ``model`` as an OpenAPI page lists them."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.get("$defs", {})

    def resolved(field: dict[str, Any]) -> dict[str, Any]:
        name = field.get("$ref", "").rpartition("/")[2]
        return {**definitions[name], **{k: v for k, v in field.items() if k != "$ref"}} if name else field

    return [
        {"name": name, "in": "query", "required": name in schema.get("required", []), "schema": resolved(field)}
        for name, field in schema["properties"].items()
    ]
