"""A model that answers as a test says, and the score of its answers."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from services.protocol.rewards import RewardResult
from services.reward_server.answers import Verdict, judge


class Model:
    """An OpenAI-compatible endpoint that says what it is told to, and keeps what it is asked."""

    def __init__(self, *says: dict[str, Any] | int) -> None:
        self.says = list(says)
        self.asked: list[dict[str, Any]] = []
        self.authorization: set[str] = set()
        self.app = FastAPI()

        @self.app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            self.asked.append(await request.json())
            self.authorization.add(request.headers["authorization"])
            said = self.says.pop(0)
            if isinstance(said, int):
                return Response('{"error": {"message": "no"}}', said, media_type="application/json")
            message = {"role": "assistant", "content": said.get("content"), "tool_calls": said.get("tool_calls")}
            choice = {"index": 0, "message": message, "finish_reason": said.get("finish_reason", "stop")}
            usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
            return {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }


def call(name: str, arguments: str) -> dict[str, Any]:
    tool = {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"tool_calls": [tool], "finish_reason": "tool_calls"}


async def score(items: Any) -> list[RewardResult]:
    """Judge plain numbers as the reward-server does."""
    judged = [judge(item.response, item.ground_truth) for item in items]
    return [RewardResult(reward=float(j.verdict is Verdict.RIGHT), extracted=j.answer) for j in judged]
