"""The clients of what is outside the job group ask the proxy of the environment, unless NO_PROXY covers the host."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast
from unittest.mock import MagicMock

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import FastAPI

from evaluation.openai_engine import OpenAIEngine
from services.clients.agent_episodes import RetryingTransport
from services.clients.teacher import TeacherClient
from services.core.endpoints import ENDPOINTS_VARIABLE, NO_PROXY_VARIABLES, PORTS, PROXY_VARIABLES, Task
from services.core.errors import ConfigurationError, DependencyLostError
from services.core.settings import Settings
from services.core.tasks import Stopwatch
from services.environment_server.openenv_environment import OpenEnvEnvironment
from services.http.client import HttpClient, RequestRefusedError, ssl_context
from services.http.server import run_service
from services.reward_server.judging import Judge
from services.reward_server.settings import RewardSettings
from services.rollout_server import __main__ as rollout_server
from tests.waiting import IDLE_SECONDS
from trainer import __main__ as trainer_program
from trainer import collector
from trainer.config import TrainerSettings
from trainer.rollouts.game import FixedModel

REFUSED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
SECONDS = IDLE_SECONDS


@asynccontextmanager
async def recording(**options: Any) -> AsyncIterator[tuple[int, list[str]]]:
    """Serve 404 to all requests; yield the port, and the first lines of the requests so far."""
    lines: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            lines.append((await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[0])
            writer.write(REFUSED)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, **options) as listening:
        yield listening.sockets[0].getsockname()[1], lines


async def judge(url: str) -> None:
    settings = RewardSettings.load(reward_fn="judge_group", judge_url=f"{url}/v1", judge_model="m")
    await Judge(settings).check()


async def teacher(url: str) -> None:
    async with TeacherClient(url, 8, deadline=SECONDS) as client:
        await client.score([1, 2], 1)


async def opponent(url: str) -> None:
    async with FixedModel(TrainerSettings.load(opponent=f"{url}/v1", rollout="environment")) as model:
        await model.wait_healthy(SECONDS)


async def evaluated(url: str) -> None:
    async with OpenAIEngine(f"{url}/v1", "m", None, is_chat=True, places=1, seconds=SECONDS) as client:
        await client.send_once("GET", "/models", seconds=SECONDS)


async def crowd(url: str) -> None:
    async with HttpClient(url, max_connections=None) as client:
        await client.send_once("GET", "/", seconds=SECONDS)


async def agent(url: str) -> None:
    """Ask as an agent in Python does with the client that it is given."""
    transport = RetryingTransport(SECONDS, Stopwatch())
    async with httpx.AsyncClient(transport=transport) as client:
        await client.get(url)


async def openenv(url: str) -> None:
    await OpenEnvEnvironment(url, cast(Any, SimpleNamespace(state=None, action=None))).reset(0)


@pytest.fixture(autouse=True)
def names_are_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXY_VARIABLES, "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    original = asyncio.BaseEventLoop.getaddrinfo

    async def resolve(loop: asyncio.BaseEventLoop, host: str | bytes, *args: object, **options: object) -> object:
        return await original(loop, "127.0.0.1", *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolve)


CLIENTS = [judge, teacher, opponent, evaluated, crowd, agent, openenv]


@pytest.mark.parametrize("ask", CLIENTS)
@pytest.mark.parametrize("exempt", ["", "somewhere", "test", "0.0.0.0/0"])
async def test_what_is_outside_is_asked_through_the_proxy_unless_it_is_exempt(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[str], Awaitable[None]], exempt: str
) -> None:
    async with recording() as (port, direct), recording() as (proxy, proxied):
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy}")
        monkeypatch.setenv("NO_PROXY", exempt)
        with contextlib.suppress(RequestRefusedError, ConfigurationError, DependencyLostError):
            await ask(f"http://outside.test:{port}")
    if exempt == "test":
        assert not proxied
        assert direct
    else:
        assert f"outside.test:{port}" in proxied[0]
        assert not direct


async def test_an_error_names_server_and_proxy_without_their_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    async with recording() as (proxy, proxied):
        monkeypatch.setenv("https_proxy", f"http://user:secret@127.0.0.1:{proxy}")
        async with HttpClient("https://name:secret@outside.test/v1", service="judge") as client:
            for asking in (client.send_once("GET", "/x", seconds=SECONDS), client.request("GET", "/x", deadline=0.2)):
                with pytest.raises(DependencyLostError) as lost:
                    await asking
                assert f"through the proxy http://127.0.0.1:{proxy} " in str(lost.value)
                assert "https://outside.test/v1" in str(lost.value)
                assert "secret" not in str(lost.value)
    assert set(proxied) == {"CONNECT outside.test:443 HTTP/1.1"}


@pytest.mark.parametrize(
    "proxy", ["socks5://user:secret@proxy:1080", "ftp://user:secret@proxy", "http://user:secret@proxy:x"]
)
async def test_a_proxy_that_cannot_be_used_is_refused_where_it_would_be_asked(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(ConfigurationError, match="NO_PROXY") as refused:
        HttpClient("http://outside.test")
    assert "secret" not in str(refused.value)
    HttpClient("http://127.3.4.5:1")


class StartedError(Exception):
    """Ends a component where it would begin its work."""


def begin(*_: Any, **__: Any) -> NoReturn:
    raise StartedError


STARTS: dict[str, tuple[str, Callable[[], object]]] = {
    "service": ("services.http.server.serve", lambda: run_service(lambda _: FastAPI(), Task.GATEWAY, Settings)),
    "rollout-server": ("services.http.provenance.write_record", rollout_server.main),
    "collector": ("services.http.provenance.write_record", collector.main),
    "trainer": ("trainer.__main__.ranks_per_node", trainer_program.main),
}


@pytest.mark.parametrize("component", STARTS)
def test_every_component_tells_the_clients_of_its_agents_and_children_which_hosts_are_near(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, component: str
) -> None:
    work, start = STARTS[component]
    for name, value in {"SHARED_DIR": str(tmp_path), "NO_PROXY": "intranet", "no_proxy": "", "RANK": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK")
    tasks = {f"{task}-0:{port}": f"127.28.76.4:{port}" for task, ports in PORTS.items() for port in ports}
    monkeypatch.setenv(ENDPOINTS_VARIABLE, json.dumps(tasks))
    monkeypatch.setattr(sys, "argv", [component])
    for name in ("services.core.logs.configure", "trainer.__main__.set_compiler", "services.http.server.listen"):
        monkeypatch.setattr(name, MagicMock())
    monkeypatch.setattr(work, begin)
    with pytest.raises(StartedError):
        start()
    for name in NO_PROXY_VARIABLES:
        assert {"intranet", "127.28.76.4", "127.0.0.1", "localhost"} <= {*os.environ[name].split(",")}


# --- certificates ----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_certificates(tmp_path: Path) -> Path:
    """A file with a certificate that this machine has made for outside.test, and its key."""
    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "own")]),
    )
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("outside.test"), x509.IPAddress(ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    file = tmp_path / "own.pem"
    form = serialization.Encoding.PEM
    private = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(private + signed.public_bytes(form))
    return file


@pytest.fixture
def certificates_are_read_anew() -> Iterator[None]:
    ssl_context.cache_clear()
    yield
    ssl_context.cache_clear()


@pytest.mark.usefixtures("certificates_are_read_anew")
@pytest.mark.parametrize("is_known", [True, False])
async def test_a_certificate_of_ones_own_is_believed_by_ssl_cert_file(
    monkeypatch: pytest.MonkeyPatch, own_certificates: Path, is_known: bool
) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(own_certificates)
    if is_known:
        monkeypatch.setenv("SSL_CERT_FILE", str(own_certificates))
    else:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with recording(ssl=server) as (port, lines), HttpClient(f"https://outside.test:{port}") as client:
        if is_known:
            assert (await client.send_once("GET", "/x", seconds=SECONDS)).status_code == 404
        else:
            with pytest.raises(DependencyLostError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.send_once("GET", "/x", seconds=SECONDS)
    assert lines == (["GET /x HTTP/1.1"] if is_known else [])


@pytest.mark.usefixtures("certificates_are_read_anew")
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_wrong_ssl_cert_file_is_refused_only_where_certificates_are_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "corp.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises(ConfigurationError, match=f"SSL_CERT_FILE={file} "):
        HttpClient("https://outside.test")
    HttpClient("http://reward-server-0.grpo:8002")
