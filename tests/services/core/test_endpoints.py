"""Where components listen and reach each other with IPv4 and IPv6, and which requests go through a proxy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request

import httpx
import pytest

from services.core.endpoints import (
    ENDPOINTS_VARIABLE,
    NO_PROXY_VARIABLES,
    Endpoint,
    Task,
    ask_directly,
    bind_address,
    endpoint,
    exempt_from_proxies,
    proxy_of,
    reached_at,
)

PROXY = "http://proxy.corp:3128"
NODES = {
    ENDPOINTS_VARIABLE: json.dumps({"gateway-0:8005": "127.28.76.4:8005", "reward-server-0:8002": "[fd00::7]:8002"}),
    "SKYPILOT_JOBGROUP_NAME": "grpo",
    "SKYPILOT_NODE_IPS": "10.4.0.7\n10.4.0.8",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NO_PROXY_VARIABLES, *NODES, "SKYPILOT_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)


def given(monkeypatch: pytest.MonkeyPatch, *variables: dict[str, str]) -> None:
    for some in variables:
        for name, value in some.items():
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("url", "variables", "proxy"),
    [
        # This machine, and the job group, whatever the user exempts.
        ("http://localhost:1", {}, None),
        ("http://LOCALHOST:1/x", {"NO_PROXY": "intranet"}, None),
        ("http://127.28.76.4:1", {}, None),
        ("https://[::1]:1/v1", {}, None),
        ("http://10.4.0.8:30001", {}, None),
        ("http://[fd00::7]:1", {}, None),
        ("http://rollout-server-3.grpo:30000", {"no_proxy": "x"}, None),
        # Every other address, also one that a user gave.
        ("https://api.openai.com/v1", {}, PROXY),
        ("http://10.4.0.9:30000", {}, PROXY),
        ("http://[fd00::8]:1", {}, PROXY),
        ("http://notlocalhost:1", {}, PROXY),
        ("http://rollout-server-3.grpo.corp:1", {}, PROXY),
        ("http://user:localhost@elsewhere:1", {}, PROXY),
        # Those that the user exempts, by either variable.
        ("http://10.4.0.9:30000", {"NO_PROXY": "10.4.0.0/16"}, None),
        ("http://10.5.0.9:30000", {"NO_PROXY": "10.4.0.0/16"}, PROXY),
        ("http://[fd00::8]:1", {"no_proxy": "fd00::/8"}, None),
        ("https://a.corp", {"NO_PROXY": "b.corp, corp"}, None),
        ("https://a.corp", {"NO_PROXY": "*.corp"}, None),
        ("https://acorp", {"NO_PROXY": "corp"}, PROXY),
        ("https://a.corp:8443", {"NO_PROXY": "a.corp:8443"}, None),
        ("https://a.corp:8444", {"NO_PROXY": "a.corp:8443"}, PROXY),
    ],
)
@pytest.mark.parametrize("name", ["HTTP_PROXY http_proxy", "ALL_PROXY", "all_proxy"])
def test_requests_within_the_job_group_and_the_exempt_are_direct_and_others_go_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, url: str, variables: dict[str, str], proxy: str | None, name: str
) -> None:
    names = name.replace("HTTP", "HTTPS").replace("http", "https") if url.startswith("https") else name
    given(monkeypatch, NODES, variables, dict.fromkeys(names.split(), PROXY))
    assert proxy_of(url) == proxy


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({}, None),
        ({"HTTPS_PROXY": PROXY}, None),
        ({"HTTP_PROXY": "", "ALL_PROXY": PROXY}, PROXY),
        ({"HTTP_PROXY": "http://other", "http_proxy": PROXY}, PROXY),
        ({"HTTP_PROXY": PROXY, "ALL_PROXY": "socks5://other"}, PROXY),
        ({"HTTP_PROXY": "proxy.corp:3128"}, PROXY),
        ({"all_proxy": "socks5h://proxy.corp"}, "socks5h://proxy.corp"),
    ],
)
def test_the_proxy_is_that_of_the_scheme(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], proxy: str | None
) -> None:
    given(monkeypatch, variables)
    assert proxy_of("http://judge.invalid/v1") == proxy


def test_a_process_tells_every_client_library_and_child_which_hosts_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, NODES, {"no_proxy": "intranet,10.0.0.0/8", "NO_PROXY": "", "http_proxy": PROXY})
    ask_directly("slurm-node")
    before = dict(os.environ)
    ask_directly()
    assert dict(os.environ) == before, "nothing is added twice"
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]
    hosts = os.environ["no_proxy"].split(",")
    assert hosts[:2] == ["intranet", "10.0.0.0/8"]
    assert {"localhost", "127.0.0.1", "127.28.76.4", "fd00::7", "10.4.0.7", ".grpo", "slurm-node"} <= set(hosts)
    pools = httpx.Client()  # as OpenAI's and Anthropic's clients make it
    for host, is_near in [
        *(
            ("127.28.76.4", True),
            ("127.0.0.1", True),
            ("gateway-0.grpo", True),
            ("[fd00::7]", True),
            ("intranet", True),
        ),
        *(("127.28.76.5", False), ("gateway.elsewhere", False)),
    ]:
        direct = pools._transport_for_url(httpx.URL(f"http://{host}:8005/v1")) is pools._transport
        assert direct == is_near, host
        assert bool(urllib.request.proxy_bypass(host.strip("[]"))) == is_near, host
    child = "import os; print(os.environ['NO_PROXY'])"
    printed = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True).stdout
    assert printed.strip().split(",") == hosts
    monkeypatch.setenv("NO_PROXY", "*")
    assert exempt_from_proxies("x") == dict.fromkeys(NO_PROXY_VARIABLES, "*")


@pytest.mark.parametrize(
    ("mapped", "url"),
    [
        ("[::1]:8000", "http://[::1]:8000"),
        ("::1:8000", "http://[::1]:8000"),
        ("[fd00::7]:9", "http://[fd00::7]:9"),
        ("127.0.0.3:9", "http://127.0.0.3:9"),
        ("node-7:9", "http://node-7:9"),
    ],
)
def test_an_address_of_either_protocol_has_a_url(monkeypatch: pytest.MonkeyPatch, mapped: str, url: str) -> None:
    given(monkeypatch, {ENDPOINTS_VARIABLE: json.dumps({"data-server-0:8000": mapped})})
    assert endpoint(Task.DATA_SERVER).url == url
    assert bind_address(Task.DATA_SERVER) == endpoint(Task.DATA_SERVER)


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, "127.0.0.1"),
        ({"SKYPILOT_NODE_RANK": "0"}, "0.0.0.0"),
        ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.4.0.7\n10.4.0.8"}, "0.0.0.0"),
        ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "fd00::7\nfd00::8"}, "::"),
        ({"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "fd00::7\n10.4.0.8"}, "0.0.0.0"),
    ],
)
def test_a_node_listens_on_all_interfaces_of_the_protocol_that_nodes_have(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], host: str
) -> None:
    given(monkeypatch, variables)
    bind, usual = bind_address(Task.DATA_SERVER), Endpoint("data-server-0.grpo", 8000)
    assert bind == Endpoint(host, 8000)
    assert reached_at(bind, usual) == (bind if host == "127.0.0.1" else usual)
