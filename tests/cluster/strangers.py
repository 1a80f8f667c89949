"""Asks every route of a run with JOBGROUP_TOKEN: without the token, with a wrong one, and with the right one."""

from __future__ import annotations

import pickle
import re
import uuid
from dataclasses import dataclass, field, replace

from services.core.endpoints import DATA_PORT, ENGINE_PORT, REPLAY_PORT, REWARD_PORT, ROUTER_PORT, STATUS_PORT
from tests.cluster.cluster import Answer, Cluster, Question

SERVICES = {
    "data-server-0": DATA_PORT,
    "reward-server-0": REWARD_PORT,
    "replay-buffer-0": REPLAY_PORT,
    "ppo-trainer-0": STATUS_PORT,
    "rollout-server-0": ENGINE_PORT,
    "rollout-server-1": ENGINE_PORT,
}
ROUTER = f"http://rollout-server-0.grpo:{ROUTER_PORT}"
# Of the router's own documentation; it has no OpenAPI page.
ROUTER_ROUTES = [
    ("POST", "/generate"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/rerank"),
    ("GET", "/v1/models"),
    ("GET", "/get_model_info"),
    ("GET", "/model_info"),
    ("GET", "/get_server_info"),
    ("GET", "/server_info"),
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("GET", "/workers/x"),
    ("DELETE", "/workers/x"),
    ("POST", "/flush_cache"),
    ("GET", "/get_loads"),
    ("GET", "/list_workers"),
    ("POST", "/add_worker"),
    ("POST", "/remove_worker"),
]
TOKEN = uuid.uuid4().hex
MARKER = "/shared/a-pickle-was-executed"
PICKLE_TYPES = ["application/json", "application/octet-stream", "application/x-pickle", "text/plain"]


class Payload:
    """Leaves a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (MARKER, "w")


@dataclass
class Strangers:
    """What was asked, and what was answered."""

    refused: list[tuple[Question, Answer | None]] = field(default_factory=list)
    """Without the token, or with a wrong one."""
    answered: list[tuple[Question, Answer | None]] = field(default_factory=list)
    """GETs with the token."""
    pickled: list[tuple[Question, Answer | None]] = field(default_factory=list)
    """POSTs of a pickle, with the token."""

    def try_everything(self, cluster: Cluster) -> None:
        """Asks, pickles last."""
        routes = [Question(f"{ROUTER}{path}", method) for method, path in ROUTER_ROUTES]
        for node, port in SERVICES.items():
            routes += routes_of(cluster, f"http://{node}.grpo:{port}")
        strange = [replace(q, token=wrong) for q in routes for wrong in (None, "", TOKEN[:-1], TOKEN + "x")]
        self.refused = list(zip(strange, cluster.ask(*strange), strict=True))
        friendly = [replace(q, token=TOKEN) for q in routes if q.method == "GET"]
        self.answered = list(zip(friendly, cluster.ask(*friendly), strict=True))
        payload = pickle.dumps(Payload(), protocol=0)
        hostile = [
            replace(q, token=TOKEN, body=payload, content_type=kind)
            for q in routes
            if q.method == "POST"
            for kind in PICKLE_TYPES
        ]
        self.pickled = list(zip(hostile, cluster.ask(*hostile), strict=True))


def routes_of(cluster: Cluster, url: str) -> list[Question]:
    """Every route on a service's OpenAPI page, beside those that no page lists; /health is for everybody."""
    (page,) = cluster.ask(Question(f"{url}/openapi.json", token=TOKEN))
    assert page is not None
    assert page.status == 200, f"{url}: {page}"
    listed = [
        (method.upper(), re.sub(r"\{[^}]*\}", "x", path))
        for path, methods in page.json["paths"].items()
        for method in methods
    ]
    unlisted = [("GET", path) for path in ("/openapi.json", "/docs", "/redoc", "/metrics", "/stats", "/no-such-route")]
    routes = dict.fromkeys(listed + unlisted)
    return [Question(url + path, method) for method, path in routes if path != "/health"]
