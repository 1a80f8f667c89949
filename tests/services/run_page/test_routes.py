"""The page's routes: the page without a token, its data only with one."""

import pytest
from pydantic import SecretStr

from scripts.view import create_view_app
from services.core.settings import Settings
from services.run_page.directory import Run
from services.run_page.routes import PUBLIC
from tests.services.run_page.runs import write_run


@pytest.fixture
def runs(tmp_path):
    return [Run(write_run(tmp_path / name, 5)) for name in ("one", "two")]


async def test_the_page_needs_nothing_from_elsewhere(serving, runs):
    async with serving(create_view_app(Settings(), runs)) as client:
        for path in PUBLIC:
            reply = await client.get(path)
            assert reply.status_code == 200
            assert "default-src 'none'" in reply.headers["content-security-policy"]
            text = reply.text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in text
            assert "http://" not in text.replace('"http://"', "")
            # The one way from text to markup that would let a completion become part of the page.
            assert "innerHTML" not in text


async def test_a_run_is_told_whole(serving, runs):
    async with serving(create_view_app(Settings(), runs)) as client:
        reply = (await client.get("/api/runs")).json()
        assert reply["live"] is False
        assert [run["name"] for run in reply["runs"]] == ["one", "two"]
        assert reply["runs"][0]["summary"]["status"] == "succeeded"
        metrics = (await client.get("/api/metrics", params={"run": "two"})).json()
        assert metrics["columns"]["step"] == [1, 2, 3, 4, 5]
        assert metrics["reward_counts"] == [[[0.0, 20], [1.0, 12]]] * 5
        after = {"run": "two", "file": metrics["file"], "offset": metrics["offset"]}
        assert (await client.get("/api/metrics", params=after)).json()["columns"] == {}
        groups = (await client.get("/api/groups", params={"run": "two", "step_to": 1, "spread": "mixed"})).json()
        assert [group["step"] for group in groups["groups"]] == [1]
        held_out = (await client.get("/api/groups", params={"run": "two", "source": "evaluation"})).json()["groups"]
        assert [(group["step"], len(group["completions"])) for group in held_out] == [(0, 1), (0, 1)]
        assert (await client.get("/api/now")).json() is None


async def test_unknown_runs_files_and_options_are_refused_in_words(serving, runs):
    async with serving(create_view_app(Settings(), runs)) as client:
        assert "'three'" in (await client.get("/api/metrics", params={"run": "three"})).json()["detail"]
        assert (await client.get("/static/..%2froutes.py")).status_code == 404
        assert (await client.get("/static/page.html")).status_code == 404
        misspelt = await client.get("/api/groups", params={"run": "one", "stepfrom": 1})
        assert misspelt.status_code == 422
        assert "stepfrom" in misspelt.json()["detail"]
        assert (await client.get("/api/metrics", params={"run": "one", "offset": -1})).status_code == 422
        assert (await client.get("/api/groups", params={"run": "one", "prompt_key": "words"})).status_code == 422


async def test_with_a_token_the_page_loads_without_it_and_its_data_does_not(serving, runs):
    app = create_view_app(Settings(jobgroup_token=SecretStr("secret")), runs)
    async with serving(app) as client:
        page = await client.get("/")
        assert page.status_code == 200
        assert 'data-asks-token="true"' in page.text
        for path in ("/api/runs", "/api/metrics?run=one", "/api/groups?run=one", "/api/now", "/stats", "/metrics"):
            assert (await client.get(path)).status_code == 401
        authorised = {"Authorization": "Bearer secret"}
        assert (await client.get("/api/runs", headers=authorised)).status_code == 200
