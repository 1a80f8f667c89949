"""With JOBGROUP_TOKEN nothing answers strangers, and nothing is unpickled."""

import pytest

from services.core.endpoints import DATA_PORT, ENGINE_PORT, REPLAY_PORT, REWARD_PORT, ROUTER_PORT, STATUS_PORT
from tests.cluster.strangers import MARKER, ROUTER, SERVICES

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

# What is served over HTTP. Beside it only the trainer listens, for its own ranks and for the workers' weight updates.
SERVED = {
    "data-server-0": {DATA_PORT},
    "reward-server-0": {REWARD_PORT},
    "replay-buffer-0": {REPLAY_PORT},
    "rollout-server-0": {ROUTER_PORT, ENGINE_PORT},
    "rollout-server-1": {ENGINE_PORT},
}


def test_no_route_answers_strangers(guarded, strangers):
    asked = {question.url.split("/")[2] for question, _ in strangers.refused}
    assert len(asked) == len(SERVICES) + 1, "every service, and the router"
    let_in = [f"{q.method} {q.url} {a and a.status}" for q, a in strangers.refused if a is None or a.status != 401]
    assert let_in == []


def test_routes_answer_requests_with_the_token(guarded, strangers):
    refused = [(question.url, answer) for question, answer in strangers.answered if answer and answer.status == 401]
    assert not refused
    good = {question.url.split("/")[2] for question, answer in strangers.answered if answer and answer.status == 200}
    assert len(good) == len(SERVICES) + 1


def test_nothing_else_listens(guarded):
    for node, ports in SERVED.items():
        # A worker of a broadcast group also has gloo's connections, on ports that the system chose.
        assert {port for port in guarded.listening[node] if port < 32768} == ports, node
    assert STATUS_PORT in guarded.listening["ppo-trainer-0"]


def test_nothing_pickled_is_accepted(guarded, strangers):
    assert strangers.pickled
    assert not (guarded.cluster.volume / MARKER.rpartition("/")[2]).exists()
    failed = [(q.url, a) for q, a in strangers.pickled if a is not None and a.status >= 500 and ROUTER not in q.url]
    assert not failed
