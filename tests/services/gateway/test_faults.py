"""kill -9 of everything around episodes, at random points: their tokens equal those of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.core.endpoints import ENDPOINTS_VARIABLE
from services.protocol.groups import Group
from tests.ports import free_ports
from tests.services.conftest import REPOSITORY, RunningService, StartService
from tests.services.gateway.player import GROUP_SIZE, TURNS, Work
from tests.services.rollout_server.nodes import TOKEN, Nodes
from tests.waiting import IDLE_SECONDS, bytes_in, eventually

CALL = b"POST /sessions/"
COMPLETIONS = b"/chat/completions"
KINDS = ("gateway", "engine", "router", "collector", "connections")


class Relay:
    """The network between players and the gateway, which counts calls and can cut all connections."""

    def __init__(self, target: int) -> None:
        self.calls = 0
        self.port = 0
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()

    def has_passed(self, calls: int, player: subprocess.Popen[bytes]) -> bool:
        """Return True once so many calls were sent, or there will be no more."""
        return self.calls >= calls or _ended(player)

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
        else:
            self._open.add(far_writer)
            await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
            self._open.discard(far_writer)
        self._open.discard(writer)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(2**16):
                self.calls += data.count(COMPLETIONS) if data.startswith(CALL) else 0
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()


class World:
    """Two engines behind the router, and the gateway in front of them."""

    def __init__(self, start_service: StartService, directory: Path, model: Path) -> None:
        self.directory = directory
        self.model = model
        self.nodes = Nodes(directory, model, 2, environment={"ROLLOUT_MAX_RESTARTS": "100"})
        self._start_service = start_service
        [self._port] = free_ports(1)
        self.gateway: RunningService

    def start(self) -> None:
        self.start_gateway()
        self.nodes.start_all()
        self.gateway.wait_healthy()

    def start_gateway(self) -> None:
        self.gateway = self._start_service(
            "services.gateway",
            port=self._port,
            healthy=False,
            MODEL_NAME=str(self.model),
            GATEWAY_DIR=str(self.directory / "gateway"),
            JOBGROUP_TOKEN=TOKEN,
            **{ENDPOINTS_VARIABLE: json.dumps(self.endpoints)},
        )

    @property
    def endpoints(self) -> dict[str, str]:
        return {**self.nodes.endpoints, "gateway-0:8005": f"127.0.0.1:{self._port}"}

    async def play(self, name: str, prompts: int, faults: list[tuple[int, str]], draw: random.Random) -> list[Group]:
        """Play prompts, with a fault of a kind whenever so many calls were sent, and return the groups."""
        directory = self.directory / name
        directory.mkdir()
        async with Relay(self._port) as relay:
            work = Work(relay.port, TOKEN, str(self.model), str(directory), prompts)
            player = self._player(work)
            try:
                for calls, kind in faults:
                    await eventually(partial(relay.has_passed, calls, player), every=0.005)
                    await asyncio.sleep(draw.uniform(0, 0.05))
                    assert not _ended(player), f"the run is over before {kind} is killed"
                    if kind == "collector":
                        player.kill()
                        player.wait(IDLE_SECONDS)
                        player = self._player(work)
                    elif kind == "connections":
                        relay.cut()
                    else:
                        await asyncio.to_thread(self._kill, kind, draw.randrange(2))
                await eventually(lambda: _ended(player), "the player's end", progress=lambda: bytes_in(self.directory))
            finally:
                player.kill()
        assert player.returncode == 0, (directory / "log").read_text()[-3000:]
        return work.groups()

    def _kill(self, kind: str, rank: int) -> None:
        if kind == "gateway":
            self.gateway.kill()
            self.start_gateway()
        elif kind == "router":
            self.nodes.nodes[0].router.kill()
        else:
            for engine in self.nodes.nodes[rank].children("embedded_engine"):
                engine.kill()

    def _player(self, work: Work) -> subprocess.Popen[bytes]:
        with (Path(work.directory) / "log").open("ab") as log:
            command = [sys.executable, "-m", "tests.services.gateway.player", str(work.write())]
            return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ, stdout=log, stderr=log)


def _ended(player: subprocess.Popen[bytes]) -> bool:
    return player.poll() is not None


@pytest.fixture(scope="module")
def world(
    start_service_once: StartService, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    made = World(start_service_once, tmp_path_factory.mktemp("world"), tiny_model)
    try:
        made.start()
        yield made
    finally:
        made.nodes.stop()


def figures(group: Group) -> list[dict[str, Any]]:
    """Return the experiences of a group without their log-probabilities."""
    return [experience.model_dump(mode="json", exclude={"logprobs"}) for experience in group.sequences]


@pytest.mark.slow
async def test_whatever_is_killed_the_trained_tokens_stay_the_same(world: World) -> None:
    points, prompts = 2 * len(KINDS), 8
    draw = random.Random(points)
    kinds = [*KINDS, *KINDS]
    draw.shuffle(kinds)
    calls = prompts * GROUP_SIZE * (TURNS + 1)
    places = sorted(draw.sample(range(1, calls - 4), points))
    wanted = await world.play("undisturbed", prompts, [], draw)
    found = await world.play("disturbed", prompts, list(zip(places, kinds, strict=True)), draw)
    assert [group.prompt_ids for group in found] == [group.prompt_ids for group in wanted]
    assert [figures(group) for group in found] == [figures(group) for group in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours.sequences, theirs.sequences, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert sum(len(group.sequences) for group in wanted) == prompts * GROUP_SIZE * 2
