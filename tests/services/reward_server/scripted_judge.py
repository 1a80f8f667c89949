"""A judge behind OpenAI's chat completions that answers by rules, and fails as a test says."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.protocol.rewards import RewardItem
from services.reward_server.settings import RewardSettings
from tests.fake_service import fake_service

Body = dict[str, Any]
Fault = Callable[[Body], Any]
"""Returns the reply of the fake service in place of the quiet judge's; None for the quiet judge's."""

RUBRIC = """
criteria:
- name: right
  text: The answer is {ground_truth}.
  weight: 3
- name: form
  text: The answer is well written.
  choices: [bad, fair, good]
"""
ANSWER = re.compile(r"^Answer:\n(`{3,})\n(.*?)\n\1$", re.DOTALL | re.MULTILINE)
ANSWERS = re.compile(r'^<judged_answer id="(\d+)">\n(`{3,})\n(.*?)\n\2\n</judged_answer>$', re.DOTALL | re.MULTILINE)


def item(response: str, **fields: Any) -> RewardItem:
    return RewardItem(**{"prompt": "What is 6*7?", "ground_truth": "42", **fields}, response=response)


def completion(content: Any, *, finish_reason: str = "stop", model: str = "judge-1", **choice: Any) -> Body:
    """Return a chat completion."""
    message = {"role": "assistant", "content": content}
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason, **choice}]
    return {"object": "chat.completion", "model": model, "choices": choices, "usage": usage}


def quiet_content(body: Body) -> str:
    """Return the text of a judge that does what it is asked: ``right`` if 42 is there, ``form`` by the length."""
    asked = body["messages"][1]["content"]
    if answers := ANSWERS.findall(asked):
        scores = [{"id": one, "reason": "r", "score": worth(text)} for one, _, text in answers]
        return json.dumps({"scores": scores})
    text = ANSWER.search(asked)[2]
    verdicts = {"right": "yes" if "42" in text else "no", "form": "good" if len(text) > 3 else "fair"}
    return json.dumps({"verdicts": [{"name": n, "reason": "r", "verdict": v} for n, v in verdicts.items()]})


def worth(text: str) -> float:
    """Return the worth of an answer to the quiet judge of groups: 1 for 42, less for a distant number."""
    number = int(re.search(r"\d+", text)[0])
    return max(0.0, 1 - abs(number - 42) / 4)


@dataclass
class ScriptedJudge:
    """A judge whose next replies are ``faults``, in order, and then the quiet judge's."""

    url: str
    directory: Path
    """Of the rubric and the verdicts."""
    faults: list[Fault] = field(default_factory=list)
    asked: list[Body] = field(default_factory=list)
    """The requests, without those by which a start checks the judge."""
    at_once: int = 0
    most_at_once: int = 0
    model: str = "judge-1"
    at_start: Any = None
    """The reply to the question of a start; None for a good one."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, body: Body) -> Any:
        if len(body["messages"]) == 1:
            return completion("yes", model=self.model) if self.at_start is None else self.at_start
        with self._lock:
            self.asked.append(body)
            fault = self.faults.pop(0) if self.faults else None
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            answer = None if fault is None else fault(body)
            if answer is not None:
                return answer
            return completion(quiet_content(body), model=self.model)
        finally:
            with self._lock:
                self.at_once -= 1

    def settings(self, reward_fn: str = "judge", **fields: Any) -> RewardSettings:
        """Return settings with this judge."""
        rubric = self.directory / "rubric.yaml"
        if not rubric.exists():
            rubric.write_text(RUBRIC)
        ours = {"judge_url": self.url, "judge_model": "m", "judge_rubric": rubric}
        return RewardSettings(**{"reward_fn": reward_fn, "judge_dir": self.directory / "judge", **ours, **fields})


@contextmanager
def scripted_judge(directory: Path) -> Iterator[ScriptedJudge]:
    """Serve a scripted judge until the context ends."""
    routes: dict[str, Any] = {}
    with fake_service(routes) as service:
        judge = ScriptedJudge(f"{service.endpoint.url}/v1", directory)
        routes["POST /v1/chat/completions"] = judge.reply
        yield judge
