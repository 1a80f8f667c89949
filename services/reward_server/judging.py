"""Asks a judge for verdicts: at most JUDGE_CONCURRENCY requests at once, each verdict once, and kept on the disk.

A verdict's key is the digest of its whole request, so of model, rubric, the row's fields in it, answer and sampling. A
resumed run, a repeated answer and a replayed prompt find it there. A failure is not kept: it is no verdict, and never
a score.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
from prometheus_client import Counter as Metric
from pydantic import ValidationError

from services.core.errors import ConfigurationError, DependencyLostError, NeverReadyError
from services.core.logs import get_logger
from services.http.client import HttpClient, RequestRefusedError, text_of
from services.http.database import Database
from services.http.problems import ProblemError
from services.protocol.chat import ChatChoice, ChatReply, ChatUsage
from services.protocol.rewards import RewardItem, RewardStatus
from services.reward_columns import JUDGES
from services.reward_server import rubric as rubrics
from services.reward_server.pool import Evaluation
from services.reward_server.rubric import Messages, NoVerdictError, Rubric, Verdict
from services.reward_server.settings import JudgeSettings, RewardSettings

log = get_logger(__name__)

START_SECONDS = 600.0
"""The judge may be an engine that starts at the same time."""
CHECK_SECONDS = 5.0
"""The wait for the judge in a check before the run, which may be out of its reach."""
MAX_TOKENS = 2048
"""Most tokens of a reply with its reasoning, unless JUDGE_ARGS has another `max_tokens`."""
MAX_REPLY_BYTES = 4 * 2**20
_PATH = "/chat/completions"
_TRIES = 2
"""Requests for a verdict, of which the second says what was wrong with the first reply."""
_TIE = 0.5
_MAX_REASON = 500

CALLS = Metric("reward_judge_calls", "Replies of the judge, usable or not.")
TOKENS = Metric("reward_judge_tokens", "Tokens that the judge's replies cost, by kind.", ["kind"])
HITS = Metric("reward_judge_hits", "Verdicts that were there already, or shared with an equal request under way.")
FAILURES = Metric("reward_judge_failures", "Answers, or whole groups, without a verdict, by reason.", ["reason"])

_MOST_TOKENS = 2**31
"""No reply costs more, whatever the judge says."""


class Verdicts(Database):
    """The database of the verdicts, with what each cost."""

    name = "verdicts"
    variable = "JUDGE_DIR"
    format = 1
    schema = """
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY,         -- digest of the request
    model TEXT NOT NULL,          -- the name that the judge answered with
    scores TEXT NOT NULL,         -- JSON: scores by criterion, or by an answer's id
    reason TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    made REAL NOT NULL            -- Unix seconds
);
"""
    unwritten = "the reward-server cannot write its verdicts"
    loss = "its verdicts are lost, and are paid for again"

    async def find(self, key: str) -> Verdict | None:
        """Return the verdict of a key, if it is there."""
        rows = await self.read("SELECT scores, reason FROM verdicts WHERE key = ?", key)
        return Verdict(json.loads(rows[0][0]), rows[0][1]) if rows else None

    async def last_model(self) -> str | None:
        """Return the name of the model that gave the newest verdict."""
        rows = await self.read("SELECT model FROM verdicts ORDER BY rowid DESC LIMIT 1")
        return str(rows[0][0]) if rows else None

    async def keep(self, key: str, verdict: Verdict, model: str, cost: Sequence[int]) -> None:
        """Write a verdict with its tokens of prompts and replies; on a disk that refuses, log that it is not kept."""
        row = (key, model, json.dumps(verdict.scores), verdict.reason, *cost, time.time())
        try:
            await self.write(("INSERT OR REPLACE INTO verdicts VALUES (?, ?, ?, ?, ?, ?, ?)", row))
        except ProblemError as error:
            # The verdict is good all the same.
            log.error("a verdict is not kept", reason=str(error.detail))


Read = Callable[[str], Verdict]
"""Reads a verdict from a judge's reply; raises NoVerdictError."""


class Judge:
    """A judge, which answers within ``serving``; all sources of a run share it, its places and its verdicts."""

    def __init__(self, settings: JudgeSettings) -> None:
        """Read the key.

        Raises:
            ConfigurationError: the variable of the key is not set.
        """
        assert settings.judge_url is not None
        self.settings = settings
        self.counts: Counter[str] = Counter()
        """The calls and their cost since the start of this process."""
        self._client = HttpClient(
            settings.judge_url,
            token=_key(settings),
            service="judge",
            max_connections=None,
            max_reply_bytes=MAX_REPLY_BYTES,
        )
        self._places = asyncio.Semaphore(settings.judge_concurrency)
        self._calls: dict[str, asyncio.Task[Verdict | NoVerdictError]] = {}
        self._verdicts = Verdicts(settings.judge_dir or settings.run_dir / "judge")
        self._model: str | None = None
        """The name that the judge answered with last."""

    @contextlib.asynccontextmanager
    async def serving(self, seconds: float = START_SECONDS) -> AsyncIterator[None]:
        """Wait ``seconds`` for the judge, and open the verdicts; requests under way are cancelled at the end.

        Raises:
            ConfigurationError: JUDGE_URL is not a judge's or refuses, or JUDGE_DIR cannot be used.
            DependencyLostError: another process uses JUDGE_DIR.
            NeverReadyError: the judge did not answer within ``seconds``.
        """
        async with self._client:
            try:
                await self._probe(seconds)
            except DependencyLostError as error:
                raise NeverReadyError(str(error)) from error
            await self._verdicts.open()
            try:
                self._model = await self._verdicts.last_model()
                yield
            finally:
                calls = list(self._calls.values())
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)
                await self._verdicts.close()

    async def check(self) -> None:
        """Ask the judge one short question; a judge that is out of reach from here passes.

        Raises:
            ConfigurationError: JUDGE_URL is not a judge's, or it refuses the request.
        """
        async with self._client:
            try:
                await self._probe(CHECK_SECONDS)
            except DependencyLostError as error:
                print(f"note: JUDGE_URL {self.settings.judge_url} was not checked, because it does not answer: {error}")

    async def _probe(self, seconds: float) -> None:
        settings = self.settings
        ask: Messages = [{"role": "user", "content": "Reply with the word yes."}]
        body = self._body(ask, max_tokens=1)
        where = f"JUDGE_URL {settings.judge_url}"
        try:
            response = await self._client.request("POST", _PATH, body, deadline=seconds, attempt_seconds=seconds)
            ChatReply.model_validate_json(response.content)
        except RequestRefusedError as error:
            raise ConfigurationError(
                f"{where} refuses a request for JUDGE_MODEL {settings.judge_model}: {error.status} {error.detail}; the "
                f"URL must end where {_PATH} follows, mostly in /v1, and JUDGE_API_KEY_ENV name the key's variable"
            ) from error
        except ValidationError as error:
            kind = response.headers.get("content-type", "no content type")
            raise ConfigurationError(
                f"{where} answers {kind} that is not a chat completion ({text_of(response)[:80]!r}); give the base URL "
                "of an OpenAI-compatible API, mostly ending in /v1"
            ) from error

    async def score(self, item: RewardItem, rubric: Rubric) -> Evaluation:
        """Return the score of an answer alone, from 0 to 1: the weighted mean of the verdicts on the criteria."""
        try:
            asked = rubrics.criteria_messages(rubric, item)
            verdict = await self._verdict(asked, lambda reply: rubrics.read_criteria(reply, asked, rubric))
        except NoVerdictError as error:
            return self._failed(error)
        return Evaluation(rubric.score(verdict.scores), reason=verdict.reason)

    async def compare(self, items: Sequence[RewardItem], rubric: Rubric | None) -> list[Evaluation]:
        """Return the scores of the answers to one prompt relative to each other, in order; equal answers share one.

        Equal answers alone are a tie: 0.5 each, without a request.
        """
        texts = rubrics.shuffled(items[0].prompt, (item.response for item in items))
        if len(texts) == 1:
            return [Evaluation(_TIE, reason="all answers are equal")] * len(items)
        ids = {text: str(number) for number, text in enumerate(texts, start=1)}
        try:
            asked = rubrics.group_messages(rubric, items[0], texts)
            verdict = await self._verdict(asked, lambda reply: rubrics.read_group(reply, asked, len(texts)))
        except NoVerdictError as error:
            return [self._failed(error)] * len(items)
        return [Evaluation(verdict.scores[ids[item.response]], reason=verdict.reason) for item in items]

    def _failed(self, error: NoVerdictError) -> Evaluation:
        """Count an answer, or a group, without a verdict."""
        FAILURES.labels(error.label).inc()
        self.counts.update({"judge_failures": 1, f"judge_failures_{error.label}": 1})
        return Evaluation(None, error.status, str(error))

    def _body(self, messages: Messages, **fields: Any) -> dict[str, Any]:
        settings = self.settings
        sampling = {"temperature": 0, "max_tokens": MAX_TOKENS}
        body = {"model": settings.judge_model, "messages": messages, **sampling, **fields, **settings.judge_args}
        return {name: value for name, value in body.items() if value is not None}

    async def _verdict(self, messages: Messages, read: Read) -> Verdict:
        """Return the verdict that the answer to ``messages`` is read as: kept, shared with an equal request, or new.

        A request runs on if nobody waits for it any more, so that its verdict is kept for the next time.

        Raises:
            NoVerdictError: the judge gave none.
        """
        body = self._body(messages)
        key = hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=32).hexdigest()
        call = self._calls.get(key)
        if call is not None:
            self._hit()
        else:
            call = self._calls[key] = asyncio.create_task(self._kept_or_new(key, body, read))
            call.add_done_callback(lambda _: self._calls.pop(key))
        outcome = await asyncio.shield(call)
        if isinstance(outcome, NoVerdictError):
            raise outcome
        return outcome

    async def _kept_or_new(self, key: str, body: dict[str, Any], read: Read) -> Verdict | NoVerdictError:
        if (kept := await self._verdicts.find(key)) is not None:
            self._hit()
            return kept
        seconds = self.settings.judge_seconds
        end = time.monotonic() + seconds
        try:
            async with asyncio.timeout(seconds):
                await self._places.acquire()
        except TimeoutError:
            reason = f"no place was free for {seconds:g} s (SERVICE_DEADLINE_SECONDS); raise it or JUDGE_CONCURRENCY"
            return NoVerdictError(reason, "queue", RewardStatus.OVERLOADED)
        try:
            verdict, cost = await self._ask(body, read, end)
        except NoVerdictError as error:
            return error
        except (DependencyLostError, RequestRefusedError) as error:
            return _no_answer(error)
        finally:
            self._places.release()
        await self._verdicts.keep(key, verdict, self._model or "", cost)
        return verdict

    async def _ask(self, body: dict[str, Any], read: Read, end: float) -> tuple[Verdict, tuple[int, int]]:
        """Return a new verdict, and the tokens of all prompts and replies that it took; ask again if unusable.

        Raises:
            NoVerdictError: none of _TRIES replies had a verdict, or one was cut off.
            RequestRefusedError, DependencyLostError: the judge refused, or did not answer until ``end``.
        """
        messages, costs = body["messages"], []
        while True:
            left = max(end - time.monotonic(), 0.001)
            reply = await self._client.call("POST", _PATH, ChatReply, body, deadline=left, attempt_seconds=left)
            costs.append(self._count(reply))
            try:
                verdict = read(_text(reply.choices[0]))
            except NoVerdictError as error:
                if len(costs) == _TRIES or error.label == "truncated":
                    raise
                refused = {"role": "assistant", "content": reply.choices[0].message.content or "(nothing)"}
                again = {"role": "user", "content": f"That cannot be used: {error}. Reply with the JSON object alone."}
                body = body | {"messages": [*messages, refused, again]}
            else:
                prompts, replies = map(sum, zip(*costs, strict=True))
                # Half a character can be written neither to the disk nor into a reply.
                reason = verdict.reason[:_MAX_REASON].encode(errors="replace").decode()
                return Verdict(verdict.scores, reason), (prompts, replies)

    def _hit(self) -> None:
        HITS.inc()
        self.counts["judge_hits"] += 1

    def _count(self, reply: ChatReply) -> tuple[int, int]:
        """Count a reply, and return the tokens of its prompt and of its text.

        Warns if the judge answers as another model than before: a name may move to a new model during a run.
        """
        usage = reply.usage or ChatUsage()
        prompt, text = (min(max(n, 0), _MOST_TOKENS) for n in (usage.prompt_tokens, usage.completion_tokens))
        CALLS.inc()
        TOKENS.labels("prompt").inc(prompt)
        TOKENS.labels("completion").inc(text)
        self.counts.update(judge_calls=1, judge_tokens=prompt + text)
        if reply.model and self._model and reply.model != self._model:
            log.warning("another model answers for the judge: rewards may change", before=self._model, now=reply.model)
        self._model = reply.model or self._model
        return prompt, text


def judge_of(settings: RewardSettings) -> Judge | None:
    """Return the judge that the rewards of the settings' sources need; None if none does.

    Raises:
        ConfigurationError: the variable of the judge's key is not set.
    """
    if not any(name in JUDGES for name in settings.names):
        return None
    return Judge(settings)


def _key(settings: JudgeSettings) -> str | None:
    name = settings.judge_api_key_env
    if name is not None and not os.environ.get(name):
        raise ConfigurationError(
            f"JUDGE_API_KEY_ENV names {name}, which is not set; give it a value. On a cluster declare it under "
            f"`secrets` of reward-server in the job group's file, and launch with --secret {name}"
        )
    return None if name is None else os.environ[name]


def _text(choice: ChatChoice) -> str:
    if choice.finish_reason == "length":
        raise NoVerdictError("the reply is cut off; raise `max_tokens` in JUDGE_ARGS", "truncated")
    return choice.message.content or ""


def _no_answer(error: DependencyLostError | RequestRefusedError) -> NoVerdictError:
    """Return the failure of a judge that gave no answer, by the last thing that came instead."""
    cause = error.__cause__
    if isinstance(cause, httpx.HTTPStatusError) and cause.response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return NoVerdictError(str(error), "overloaded", RewardStatus.OVERLOADED)
    if isinstance(cause, TimeoutError | httpx.TransportError):
        return NoVerdictError(str(error), "timeout", RewardStatus.TIMEOUT)
    return NoVerdictError(str(error), "refused" if isinstance(error, RequestRefusedError) else "no_chat")
