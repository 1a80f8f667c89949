"""Two workers behind the real router: a session's turns go to one of them as long as it lives, and both are used."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE
from services.gateway.calls import EngineClient
from services.gateway.sessions import Session
from services.protocol.groups import TokenSequence
from services.protocol.sessions import CreateSessionRequest
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.waiting import IDLE_SECONDS

pytestmark = pytest.mark.slow
SESSIONS = 16
TURNS = 4
SUFFIX = [5, 6]


@pytest.fixture(scope="module")
def two(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path_factory.mktemp("two"), tiny_model, count=2)
    try:
        yield nodes.start_all()
    finally:
        nodes.stop()


def counts(nodes: Nodes, ranks: range, name: str) -> list[int]:
    """A total of each worker."""
    replies = [nodes.get(nodes.worker(rank), "/server_info").json() for rank in ranks]
    return [int(reply["internal_states"][0][name]) for reply in replies]


async def turn(client: EngineClient, session: str, ids: list[int], number: int) -> TokenSequence:
    sampling = {"max_new_tokens": 10 + 7 * number, "ignore_eos": True}
    request = CreateSessionRequest(id=session, deadline_seconds=IDLE_SECONDS)
    return await client.sample(Session(request, time.time()), ids, sampling, f"{session}-{number}", [])


async def play(client: EngineClient, number: int) -> int:
    """A session whose agent takes its time between turns; return the tokens that had to be computed for its prompts."""
    pause, needed = random.Random(number), 0
    ids = [2 + (number * 7 + place * place) % 13 for place in range(20)]
    known = 0
    for index in range(TURNS):
        needed += len(ids) - known
        completion = await turn(client, f"session-{number}", ids, index)
        ids = [*ids, *completion.completion_ids.tolist(), *SUFFIX]
        known = len(ids) - len(SUFFIX) - 1
        await asyncio.sleep(pause.random() * 0.05)
    return needed


async def test_turns_reach_the_worker_that_has_the_session_and_both_workers_are_used(
    two: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENDPOINTS_VARIABLE, f'{{"rollout-server-0:30000": "{two.router.url[7:]}"}}')
    client = EngineClient(TOKEN)
    before = counts(two, range(2), "prompt_tokens")
    needed = await asyncio.gather(*(play(client, number) for number in range(SESSIONS)))
    computed = [now - then for now, then in zip(counts(two, range(2), "prompt_tokens"), before, strict=True)]
    # Fewer where sessions begin alike.
    assert sum(computed) <= sum(needed)
    assert min(computed) > sum(computed) / 4

    # A session outlives its worker.
    two.nodes[1].engine.kill()
    completions = await asyncio.gather(*(turn(client, f"session-{n}", [3, 4, 5], 0) for n in range(SESSIONS)))
    assert all(len(completion.completion_ids) == 10 for completion in completions)
    await client.close()
