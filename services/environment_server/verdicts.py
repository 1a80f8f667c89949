"""Verdicts on attempts at tasks: what tests see of an answer, and the reward that they write."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from statistics import fmean

from services.core.errors import first_line
from services.environment_server.environments import EnvironmentBrokenError
from services.sandbox.box import Files

Rewards = dict[str, float]
"""The rewards of a verdict by name; ``reward`` is the one that counts."""

VERDICTS = "/logs/verifier"
"""The directory of the reward files in a box of tests."""
REWARD_FILES = ("reward.json", "reward.txt")
_MOST_NAMES = 32
_PIPE_BYTES = 2**16
_HOOKS = (
    *("conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "__pycache__", "*.dist-info"),
    *("*.egg-info", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "*.so", "*.so.*"),
    *(".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".profile", ".inputrc", ".zshenv", ".zshrc"),
)
"""Names of files and directories that a Python, pytest, a shell or a loader reads by itself."""
_LAST_ON_PATH = """
import os, sys
sys.path += [os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))]
"""
"""The sitecustomize.py of the tests: no file beside them, or of the answer, comes before a module of Python."""


class NoRewardError(EnvironmentBrokenError):
    """An attempt that cannot be graded, which is not the same as one that earns 0."""


def is_hook(path: str, content: bytes) -> bool:
    """Return whether a file of an answer could run, or change settings, before the tests ask for it."""
    parts = PurePosixPath(path).parts
    if any(fnmatch(part, pattern) for part in parts for pattern in _HOOKS):
        return True
    if ".git" in parts:
        return "hooks" in parts or parts[-1] in (".git", "config", "config.worktree")
    if parts[-1] == "setup.cfg":
        return b"pytest" in content
    if parts[-1] != "pyproject.toml":
        return False
    try:
        return "pytest" in tomllib.loads(content.decode()).get("tool", {})
    except (ValueError, AttributeError):
        return True


def merged(original: Files, left: Files) -> Files:
    """Return the files of the second box: those that the first one had left, with the task's own hooks."""
    kept = {path: content for path, content in left.items() if not is_hook(path, content)}
    hooks = {path: content for path, content in original.items() if is_hook(path, content)}
    programs = (left.executable & kept.keys()) | (original.executable & hooks.keys())
    return Files(kept | hooks, programs)


def read_rewards(texts: Mapping[str, bytes]) -> Rewards:
    """Return the rewards that the tests wrote, by reward.json, or else by reward.txt.

    Args:
        texts: all that was written to each of REWARD_FILES.

    Raises:
        NoRewardError: there is none, or it is not one flat object of finite numbers, or one number, from 0 to 1; or the
            two files differ.
    """
    read: dict[str, Callable[[str], Rewards]]
    read = {"reward.json": _of_json, "reward.txt": lambda text: {"reward": float(text)}}
    found_rewards = []
    for name in REWARD_FILES:
        if text := texts.get(name, b"").strip():
            try:
                if len(text) >= _PIPE_BYTES - 1:
                    raise ValueError(f"it has more than {_PIPE_BYTES} bytes")
                found_rewards.append(_checked(read[name](text.decode("utf-8"))))
            except (ValueError, OverflowError, RecursionError) as error:
                raise NoRewardError(f"{name} is broken: {first_line(error)}") from error
    if not found_rewards:
        raise NoRewardError("the tests wrote no reward file")
    if found_rewards[0]["reward"] != found_rewards[-1]["reward"]:
        raise NoRewardError("reward.json and reward.txt differ")
    return found_rewards[0]


def _of_json(text: str) -> Rewards:
    pairs = json.loads(text, object_pairs_hook=tuple)
    if not isinstance(pairs, tuple) or not pairs or len(dict(pairs)) != len(pairs) or len(pairs) > _MOST_NAMES:
        raise ValueError(f"it is no object of 1 to {_MOST_NAMES} different names")
    if not all(type(value) in (int, float) for _, value in pairs):
        raise ValueError("a value is not a number")
    rewards = {str(name)[:60]: float(value) for name, value in pairs}
    return rewards if "reward" in rewards else {"reward": fmean(rewards.values())} | rewards


def _checked(rewards: Rewards) -> Rewards:
    if not all(map(math.isfinite, rewards.values())) or not 0 <= rewards["reward"] <= 1:
        raise ValueError("a reward is not finite, or `reward` is not from 0 to 1")
    return rewards


@contextmanager
def verdict_files(
    folders: Sequence[Path],
) -> Iterator[tuple[dict[str, str], dict[str, str], Callable[[], dict[str, bytes]]]]:
    """Lay tests over each other, and make the pipes of the reward files.

    Yields:
        the directories of the tests and of their Python, and the pipes, by their paths in a box; and a function that
        returns what was written.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-tests-") as place, contextlib.ExitStack() as stack:
        tests = Path(place, "tests")
        for folder in folders:
            shutil.copytree(folder, tests, dirs_exist_ok=True)
        for path in (tests, *tests.rglob("*")):
            # The box's user is another one.
            path.chmod(0o755)
        python = Path(place, "python")
        python.mkdir()
        (python / "sitecustomize.py").write_text(_LAST_ON_PATH, "utf-8")
        for path in (python, *python.iterdir()):
            path.chmod(0o755)
        pipes, ends = {}, {}
        for name in REWARD_FILES:
            pipe = Path(place, name)
            os.mkfifo(pipe)
            ends[name] = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, ends[name])
            # Who could read it could take a verdict out of it.
            pipe.chmod(0o222)
            pipes[f"{VERDICTS}/{name}"] = str(pipe)

        def read() -> dict[str, bytes]:
            texts = {}
            for name, end in ends.items():
                with contextlib.suppress(BlockingIOError):
                    texts[name] = os.read(end, _PIPE_BYTES)
            return texts

        yield {"/tests": str(tests), "/python": str(python)}, pipes, read
