"""Presets of AGENT_COMMAND: what a harness gets, how it ends, and the real programs, played to their end."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from evaluation.store import Sample
from scripts.models import find_gguf
from services import harnesses
from services.agents import AgentFailedError
from services.core.errors import ConfigurationError
from services.harnesses import PREFIX, PRESETS, Harness, Preset, check_context, harness_of, program_of
from services.relay import Relay
from tests.evaluation.agent_play import SETTINGS, Ground, call, ground_on
from tests.services.gateway.conftest import make_model
from tests.services.test_programs import SECRETS, is_running
from tests.waiting import wait_until

LIMITS = SETTINGS.model_copy(update={"agent_max_turns": 4, "agent_seconds": 120.0, "max_new_tokens": 600})
CONTEXT = 65_536


@pytest.fixture
async def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ground]:
    """A gateway whose model has room for the prompts of harnesses."""
    async with ground_on(roomy_model(tmp_path / "model"), tmp_path / "gateway", monkeypatch) as made:
        yield made


def roomy_model(path: Path) -> Path:
    """A model with room for the prompts of harnesses in single bytes."""
    model = make_model(path, "qwen2.5")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return model


async def play(ground: Ground, harness: Harness, says: list[str]) -> Sample:
    preset = Preset(f"{PREFIX}{harness.name}", harness, LIMITS.agent_max_turns, LIMITS.max_new_tokens)
    async with Relay(preset) as agent:
        return await ground.play(agent, says, settings=LIMITS)


ASKS = """
import json, os, sys, time, urllib.request
def ask():
    body = json.dumps({"messages": [{"role": "user", "content": sys.argv[1]}], "model": "policy"}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["KEY"]}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def scripted(tmp_path: Path, code: str, **fields: Any) -> Harness:
    """A harness in Python that asks the model by ``ask()``, and whose output is the answer."""
    program = tmp_path / "harness"
    program.write_text(f"{ASKS}{code}")
    command = shlex.join([sys.executable, "-S", str(program)])
    return Harness(
        name="scripted",
        command=f"URL=$url KEY=$key SIZES='$context $output $turns' {command} $task",
        package="scripted",
        version="1.0.0",
        memory_mb=0,
        first_prompt=100,
        answer=lambda output, _home: output,
        **fields,
    )


SEEN = """
print(ask())
facts = {"cwd": os.getcwd(), "files": os.listdir(), "input": sys.stdin.read(), "environment": dict(os.environ)}
facts["configuration"] = open(os.path.expanduser("~/.own/config")).read()
try:
    os.fstat(3)
except OSError:
    facts["reward_fd"] = "closed"
with open(FILE, "a") as file:
    print(json.dumps(facts), file=file)
"""


def seen_in(file: Path) -> list[dict[str, Any]]:
    """What each episode saw, and whether its home directory is still there."""
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    return [facts | {"home_is_left": Path(facts["environment"]["HOME"]).exists()} for facts in episodes]


async def test_a_harness_has_a_home_of_its_own_and_neither_our_variables_nor_input_nor_a_place_for_rewards(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SECRETS, "HTTPS_PROXY", "OPENCODE_CONFIG", "CLAUDE_CODE_USE_BEDROCK"):
        monkeypatch.setenv(name, "ours")
    seen = tmp_path / "seen"
    harness = scripted(tmp_path, SEEN.replace("FILE", repr(str(seen))), files={".own/config": "at $url"})
    for _ in range(2):
        sample = await play(ground, harness, ["#### 42"])
        assert (sample.result.reward, sample.turns, ground.engine.asked[-1].count("What is 6 times 7?")) == (1.0, 1, 1)
    episodes = seen_in(seen)
    for facts in episodes:
        variables = facts["environment"]
        own = {"HOME", "TMPDIR", "URL", "KEY", "SIZES"}
        assert set(variables) - {"PWD", "OLDPWD", "SHLVL", "_", "LC_CTYPE"} == own | {*harnesses._KEPT} & {*os.environ}
        assert (facts["input"], facts["files"], facts["reward_fd"]) == ("", [], "closed")
        assert facts["configuration"] == f"at {variables['URL']}"
        assert variables["SIZES"] == f"{CONTEXT} 600 3", "one turn below AGENT_MAX_TURNS"
        assert facts["cwd"].endswith(f"{variables['HOME']}/work")
        assert not facts["home_is_left"]
    assert len({facts["environment"]["HOME"] for facts in episodes}) == 2


async def test_a_harness_that_asks_on_is_ended_once_its_calls_are_refused(ground: Ground, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
open({str(pids)!r}, "w").write(str(os.getpid()))
while True:
    try:
        ask()
    except urllib.error.HTTPError:
        time.sleep(1)
"""
    sample = await play(ground, scripted(tmp_path, code), [])
    assert (sample.is_over_limit, sample.turns) == (True, LIMITS.agent_max_turns)
    assert "AGENT_MAX_TURNS" in str(sample.result.reason), "and not by its time"
    wait_until(lambda: not is_running(int(pids.read_text())), "the harness has ended")


async def test_a_conversation_that_outgrows_the_context_is_over_the_limit_and_a_task_that_does_has_no_reward(
    ground: Ground, tmp_path: Path
) -> None:
    outgrows = "sys.argv[1] *= 30000; ask()"
    sample = await play(ground, scripted(tmp_path, f"ask(); {outgrows}"), [])
    assert (sample.is_over_limit, sample.turns) == (True, 1)
    with pytest.raises(AgentFailedError, match=str(CONTEXT)):
        await play(ground, scripted(tmp_path, outgrows), [])


@pytest.mark.parametrize("code", ["sys.exit(1)", "ask(); sys.exit(1)"])
async def test_a_harness_that_fails_gives_no_reward(ground: Ground, tmp_path: Path, code: str) -> None:
    with pytest.raises(Exception, match="preset:scripted exited with code 1"):
        await play(ground, scripted(tmp_path, code), [])


def test_only_the_pinned_version_counts_as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harnesses, "HARNESSES", tmp_path)
    for name, harness in PRESETS.items():
        record, program = tmp_path / harness.record.replace("*", "3.11"), tmp_path / harness.program
        with pytest.raises(ConfigurationError, match=f"make harnesses PRESETS={name}"):
            program_of(PREFIX + name, 4, 64)
        if harness.is_python:
            record.mkdir(parents=True)
        else:
            record.parent.mkdir(parents=True)
            record.write_text('{"version": "0.0.1"}')
            assert not harness.is_installed
            record.write_text(json.dumps({"version": harness.version}))
        assert not harness.is_installed
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch()
        assert isinstance(program_of(PREFIX + name, 4, 64), Preset)


def test_a_configuration_names_the_gateway_the_limits_and_no_tool_that_it_would_refuse() -> None:
    made = {
        name: Preset(f"{PREFIX}{name}", harness, 4, 64).prepare(Path("/h"), "text", "http://gateway", "key", 4096)
        for name, harness in PRESETS.items()
    }
    codex = tomllib.loads(made["codex"][2][".codex/config.toml"])
    assert codex["model_providers"][codex["model_provider"]]["base_url"] == "http://gateway"
    assert (codex["model_context_window"], codex["web_search"], codex["features"]["multi_agent"]) == (
        4096,
        "disabled",
        False,
    )
    mini = yaml.safe_load(made["mini-swe-agent"][2]["mini.yaml"])
    assert (mini["model"]["model_kwargs"]["api_base"], mini["agent"]["step_limit"]) == ("http://gateway", 3)
    opencode = json.loads(made["opencode"][1]["OPENCODE_CONFIG_CONTENT"])
    gateway = opencode["provider"]["gateway"]
    assert gateway["options"] == {"baseURL": "http://gateway", "apiKey": "key"}
    assert gateway["models"]["policy"]["limit"] == {"context": 4096, "output": 64}
    assert {*opencode["permission"].values()} == {"deny", "allow"}
    words, variables, _ = made["claude-code"]
    assert variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "64"
    assert words[-4:] == ["--max-turns", "3", "--", "text"]


def test_a_preset_that_does_not_exist_and_one_whose_first_prompt_does_not_fit_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="codex"):
        harness_of("preset:no-such")
    assert harness_of("bash agent.sh") is None
    for harness in PRESETS.values():
        check_context(harness, 64, harness.first_prompt + 65)
        with pytest.raises(ConfigurationError, match="MAX_NEW_TOKENS=64"):
            check_context(harness, 64, harness.first_prompt + 64)


# --- the real programs ------------------------------------------------------------------------------------------------

TOOLS = {"claude-code": ("Bash", "command"), "codex": ("exec_command", "cmd")}
REAL = [
    pytest.param(
        harness,
        id=name,
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not harness.is_installed, reason=f"there is no harness {name} {harness.version}"),
        ],
    )
    for name, harness in PRESETS.items()
]
MARK = "from-the-task-itself"
OTHER = "http://127.0.0.1:9"
HOSTILE = {
    ".claude/settings.json": json.dumps({"env": {"ANTHROPIC_BASE_URL": OTHER, "MARK": MARK}}),
    ".codex/config.toml": f'developer_instructions = "{MARK}"\nopenai_base_url = "{OTHER}"\n',
    ".env": f"OPENAI_API_BASE={OTHER}\nOPENAI_BASE_URL={OTHER}\nMSWEA_MODEL_NAME={MARK}\n",
    ".mcp.json": json.dumps({"mcpServers": {"own": {"command": "touch", "args": [MARK]}}}),
    ".opencode/agent/build.md": MARK,
    "AGENTS.md": MARK,
    "CLAUDE.md": MARK,
    "mini.yaml": json.dumps({"agent": {"system_template": MARK}}),
    "opencode.json": json.dumps({"provider": {"gateway": {"options": {"baseURL": OTHER}}}, "instructions": ["*.md"]}),
}
"""Files of a task that would lead a harness elsewhere, or tell it something, if it read them."""


def shell(harness: Harness, command: str) -> str:
    """The call with which a harness's model runs a shell command."""
    tool, argument = TOOLS.get(harness.name, ("bash", "command"))
    extra = {"description": "Runs it"} if harness.name == "opencode" else {}
    return call(tool, json.dumps({argument: command} | extra))


def last_turn(harness: Harness, answer: str) -> str:
    """The turn with which a harness's model gives its answer."""
    is_mini = harness.name == "mini-swe-agent"
    return shell(harness, f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{answer}'") if is_mini else answer


@pytest.fixture(scope="session")
def count_tokens() -> Callable[[str], int]:
    """Return the number of tokens that SmolLM2's tokenizer gives a text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(find_gguf().parent, gguf_file=find_gguf().name)
    return lambda text: len(tokenizer.encode(text))


@pytest.mark.parametrize("harness", REAL)
async def test_a_session_with_a_thought_and_a_tool_is_played_to_its_end_whatever_the_task_holds(
    ground: Ground, harness: Harness, count_tokens: Callable[[str], int]
) -> None:
    hostile = {f"work/{name}": text for name, text in HOSTILE.items()}
    thought = "<think>\nI multiply.\n</think>\n\n" + shell(harness, "expr 6 '*' 7")
    says = [thought, last_turn(harness, "#### 42")]
    sample = await play(ground, replace(harness, files={**harness.files, **hostile}), says)
    assert (sample.result.reward, sample.turns) == (1.0, 2)
    first, second = ground.engine.asked
    assert second.startswith(f"{first}{thought}"), "one conversation, with the tokens that the model sampled"
    assert "42" in second.removeprefix(f"{first}{thought}")
    assert MARK not in second
    tokens = count_tokens(first)
    print(f"{harness.name} {harness.version}: {sample.seconds:.1f} s, first prompt of {tokens} tokens")
    assert 0.8 * harness.first_prompt < tokens <= harness.first_prompt


@pytest.mark.parametrize("harness", REAL)
async def test_a_model_that_calls_a_tool_without_end_is_over_the_limit(ground: Ground, harness: Harness) -> None:
    sample = await play(ground, harness, [shell(harness, "true")] * 9)
    assert sample.is_over_limit
    assert "AGENT_MAX_TURNS" in str(sample.result.reason), "and not by its time"
    assert LIMITS.agent_max_turns - 1 <= sample.turns <= LIMITS.agent_max_turns
