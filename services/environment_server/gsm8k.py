"""Questions of DATASET with a calculator, scored by the reward that training uses."""

from __future__ import annotations

import ast
import asyncio
import operator
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from fractions import Fraction

from services.core.tasks import in_background
from services.data_server import dataset_rows
from services.data_server.dataset_rows import Row, Rows
from services.data_server.settings import DataSettings
from services.environment_server.environments import (
    Conversation,
    EnvironmentBrokenError,
    Tasks,
    Transition,
    text_of,
)
from services.protocol.evaluation import Action, State
from services.protocol.rewards import RewardItem, RewardResult
from services.reward_server.pool import WorkerPool
from services.reward_server.scoring import Scorer
from services.reward_server.settings import RewardSettings

RULES = (
    "Solve the question step by step. To calculate, write <calc>12*3.5</calc> and stop; the result comes as the next "
    "message. End with the answer as a number behind ####."
)
MAX_LENGTH = 200
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "%": "**percent ", ",": "", "$": "", "_": ""})  # noqa: RUF001
"""Replacements of characters. A percent sign becomes a power, which binds tighter than the other operators."""
_CALL = re.compile(r"<calc>((?:(?!<calc>).)*?)</calc>", re.DOTALL)


class Questions(Tasks):
    """The questions as numbered tasks of the splits ``test`` and ``train``, and the scorer of their answers.

    Scores are computed on the event loop on which it was made.
    """

    deterministic = True

    def __init__(self, rows: Mapping[str, Rows], scorer: Scorer, turns: int) -> None:
        digests = " ".join(split.digest() for split in rows.values())
        self.version = f"2, {turns} turns, questions {digests}"
        self.splits = {name: len(split) for name, split in rows.items()}
        self._rows = rows
        self._scorer = scorer
        self._loop = asyncio.get_running_loop()
        self._turns = turns

    def make(self, split: str, index: int) -> QuestionWithCalculator:
        """See Tasks."""
        return QuestionWithCalculator(self._rows[split].take([index])[0], self.score, self._turns)

    async def score(self, item: RewardItem) -> RewardResult:
        """Return the score of an answer, on any event loop."""
        scoring = asyncio.run_coroutine_threadsafe(self._scorer.score([item]), self._loop)
        return (await asyncio.wrap_future(scoring))[0]


@asynccontextmanager
async def open_questions(turns: int) -> AsyncIterator[Questions]:
    """Load the questions and start the verifiers; ``turns`` is the number of answers that an episode allows.

    Raises:
        ConfigurationError: DATASET cannot be loaded, or a setting of the reward is not allowed.
    """
    data, rewards = DataSettings.load(), RewardSettings.load().without_sources(reward_fn="math", accuracy_fn=None)
    dataset = await in_background(lambda: dataset_rows.load(data))
    pool = WorkerPool(rewards)
    await pool.start()
    try:
        # The held-out questions come first, so that they are the ones of a reset without a split.
        yield Questions({"test": dataset.test, "train": dataset.train}, Scorer(rewards, pool), turns)
    finally:
        await pool.stop()


class QuestionWithCalculator(Conversation):
    """One question. The first message without a call of the calculator is the answer, which ends the episode."""

    def __init__(self, row: Row, score: Callable[[RewardItem], Awaitable[RewardResult]], turns: int) -> None:
        self._row = row
        self._score_answer = score
        self._left = turns
        self._messages: list[dict[str, str]] = []

    async def reset(self, seed: int) -> State:
        """Ask the question."""
        self._messages = [{"role": "system", "content": RULES}, {"role": "user", "content": self._row.question}]
        return list(self._messages)

    async def step(self, action: Action) -> Transition:
        """Calculate, or score the answer."""
        text = text_of(action)
        calls = _CALL.findall(text)
        self._left -= 1
        self._messages.append({"role": "assistant", "content": text})
        if not calls or "####" in text:
            return Transition(list(self._messages), await self._score(text), terminated=True)
        results = "\n".join(_answer(expression) for expression in calls)
        self._messages.append({"role": "user", "content": results})
        return Transition(list(self._messages), 0.0, truncated=self._left == 0)

    async def _score(self, text: str) -> float:
        row = self._row
        item = RewardItem(prompt=row.question, response=text, ground_truth=row.ground_truth)
        result = await self._score_answer(item)
        if result.reward is None:
            # Never 0, because an answer that could not be scored may be right.
            raise EnvironmentBrokenError(f"the answer could not be scored: {result.reason}")
        return result.reward


def _answer(expression: str) -> str:
    try:
        return f"{expression.strip()} = {calculate(expression)}"
    except CalculationError as error:
        return f"the calculator says: {error}"


class CalculationError(Exception):
    """An expression that cannot be calculated; the message says why, in words for the model."""


def calculate(expression: str) -> str:
    """Return the value of an expression as a decimal number with up to six places.

    Allowed are numbers, ``+ - * /``, parentheses, and ``%`` behind a number or a parenthesis, which divides it by 100.

    Raises:
        CalculationError: the expression has anything else, or divides by zero.
    """
    if len(expression) > MAX_LENGTH:
        raise CalculationError(f"the expression has more than {MAX_LENGTH} characters")
    try:
        value = _value(ast.parse(expression.translate(_SPELLINGS).strip(), mode="eval").body)
        return str(value) if value.denominator == 1 else f"{float(value):.6f}".rstrip("0").rstrip(".")
    except ZeroDivisionError as error:
        raise CalculationError("division by zero") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise CalculationError(f"{expression!r} cannot be calculated") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(op=ast.Pow(), left=number, right=ast.Name(id="percent")):
            return _value(number) / 100
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_value(left), _value(right))
    raise CalculationError(f"only numbers, + - * / and parentheses are allowed, not {ast.unparse(node)[:40]!r}")
