"""The reward ``code``: programs are run on the tests of their row, and what they do decides."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import shutil
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.core.errors import ConfigurationError
from services.environment_server.sandbox_environment import program_of
from services.protocol.rewards import RewardItem, RewardStatus
from services.reward_server import own_code
from services.reward_server.app import create_app
from services.reward_server.code import CodeReward, _is_right, last_block, read_tests, same_text, same_value
from services.reward_server.settings import CodeScore, RewardSettings
from services.sandbox import box
from services.sandbox.box import Outcome, Result
from services.sandbox.harness import pack
from tests.waiting import IDLE_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backends for Linux")
in_loop_of_module = pytest.mark.asyncio(loop_scope="module")

ADD = "def add(a, b):\n    return a + b"
CALLS = {"tests": {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}}
STDIO = {"tests": {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}}
ASSERTS = {"tests": ["assert add(1, 2) == 3", "assert add(3, 4) == 7"]}
FORMS = {"calls": CALLS, "stdio": STDIO, "asserts": ASSERTS}


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


def item(code: str, row: Mapping[str, Any] | None, **more: Any) -> RewardItem:
    response = more.pop("response", fenced(code))
    text = None if row is None else json.dumps(row)
    return RewardItem(**{"prompt": "q", "response": response, "ground_truth": "", "row": text, **more})


@asynccontextmanager
async def rewarding(**options: Any) -> AsyncIterator[CodeReward]:
    reward = CodeReward(RewardSettings(reward_fn="code", **{"service_deadline_seconds": 15 * IDLE_SECONDS, **options}))
    await reward.start()
    try:
        yield reward
    finally:
        await reward.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reward() -> AsyncIterator[CodeReward]:
    async with rewarding(code_cpu_seconds=0.5, reward_workers=2) as made:
        yield made


def with_boxes_of(reward: CodeReward, **settings: Any) -> CodeReward:
    """Return a reward with other settings and the same boxes."""
    other = CodeReward(reward._settings.model_copy(update=settings))
    other._pool = reward._pool
    return other


async def values(reward: CodeReward, *items: RewardItem) -> list[float | None]:
    return [evaluation.value for evaluation in await asyncio.gather(*map(reward.score, items))]


def test_the_last_closed_block_is_the_program() -> None:
    assert last_block("```python\na = 1\n```\nor\n```py\nb = 2\n```") == "b = 2\n"
    assert last_block("```\na = 1\n```") == "a = 1\n"
    assert last_block("  ```python3\n  a = 1\n  ```") == "a = 1\n"
    # A cut answer has the blocks that are closed.
    assert last_block("```python\na = 1\n```\n```python\nb = ") == "a = 1\n"
    assert last_block("```python\nb = 2") is None
    assert last_block("a = 1") is None
    assert last_block("```java\nint a;\n```") is None
    # The end of a block in another language begins none.
    assert last_block("Input:\n```text\n1 2\n```\nProgram:\n```python\na = 1\n```") == "a = 1\n"
    assert last_block("```python\na = 1\n```\nRun\n```bash\nls\n```\nIt prints:\n```text\n3\n```\nso") == "a = 1\n"
    assert last_block("```text\nnever closed\n```python\na = 1\n```") == "a = 1\n"
    # More backticks end a block, and are none of their own.
    assert last_block("```python\na = 1\n````\n```\nb = 2\n```") == "b = 2\n"
    assert last_block("````python\na = 1\n````") is None


PYTHON = "|python|Python|PYTHON|py|Py3|python3|python3.11|py3.11|Python 3|{python}|{.python}|{ .python3 .numbers }"
MORE_PYTHON = 'python title="x"|Python{title="x"}|python:main.py|py,linenos'
OTHER = "java|pycon|pytest|python-repl|pythonic|title=python|c++ python|{.java}|`py`|3"


def test_a_block_of_python_has_one_of_its_names() -> None:
    block = "Program:\n```{}\na = 1\n```\n"
    assert [
        name for name in f"{PYTHON}|{MORE_PYTHON}".split("|") if last_block(block.replace("{}", name)) != "a = 1\n"
    ] == []
    assert [name for name in OTHER.split("|") if last_block(block.replace("{}", name)) is not None] == []
    assert last_block(block.replace("{}", " python \t")) == "a = 1\n"


def test_a_block_is_dedented_by_its_fence() -> None:
    listed = "1. Do:\n\n   ```python\n   def f():\n       return 1\n\n   ```\n2. So"
    assert last_block(listed) == "def f():\n    return 1\n\n"
    assert last_block("\t```py\n\tif a:\n\t\tb\n```") == "if a:\n\tb\n"
    # A line that is indented less loses what it has.
    assert last_block("  ```py\nx = [\n a,\n   b]\n  ```") == "x = [\na,\n b]\n"
    assert last_block("```py\r\nif a:\r\n  b\r\n```\r\nSo") == "if a:\r\n  b\r\n"


COLLIDING = [n * (2**61 - 1) for n in range(40_000)]
"""Whole numbers with one hash."""
SLOW: dict[str, Callable[[], Any]] = {
    "spaces behind a fence": lambda: last_block("```" + " " * 100_000),
    "spaces before a fence": lambda: last_block((" " * 1000 + "```\n") * 100),
    "fences": lambda: last_block("```python\n" * 10_000),
    "fences of spaces": lambda: last_block("``` \t\n" * 20_001),
    "one letter": lambda: last_block("```" + "a" * 50_000 + "1" * 50_000 + "!"),
    "open braces": lambda: last_block("```{" + "\t" * 100_000 + "!"),
    "an indent": lambda: last_block(" " * 50_000 + "```\n" + " \n" * 25_000),
    "newlines behind a call": lambda: program_of("<tool_call>" + "\n" * 100_000),
    "calls": lambda: program_of("<tool_call>" * 10_000),
    "fences of programs": lambda: program_of("```python\n" * 10_000),
    "a set of one hash": lambda: _is_right(["value", {"set": COLLIDING}], [1], read_tests(CALLS)),
    "keys of one hash": lambda: _is_right(["value", {"dict": [[n, 1] for n in COLLIDING]}], {}, read_tests(CALLS)),
    "sets in a list": lambda: _is_right(["value", [{"frozenset": COLLIDING}]], [[1]], read_tests(CALLS)),
}


@pytest.mark.parametrize("name", SLOW)
def test_no_text_of_a_model_takes_long_to_read(name: str) -> None:
    before = time.process_time()
    SLOW[name]()
    assert time.process_time() - before < 1.0


def test_a_reply_is_compared_with_the_json_of_a_row() -> None:
    value = ({"a": (1, 2.5)}, [None, True], 10**30, "x", float("inf"))
    row = [{"a": [1, 2.5]}, [None, True], 10**30, "x", float("inf")]
    assert _is_right(["value", pack(value)], row, read_tests(CALLS))
    others: tuple[Any, ...] = ({1}, frozenset({"a"}), {1: 2}, b"a", 1j, {"a": 1, 2: 3})
    assert [other for other in others if _is_right(["value", pack([other])], [other], read_tests(CALLS))] == []
    assert not _is_right(["value", {"dict": 3}], row, read_tests(CALLS))


@in_loop_of_module
async def test_every_form_of_tests_and_both_scores(reward: CodeReward) -> None:
    program = "print({}(map(int, input().split())))"
    # Right for both tests, and for the first one only.
    right = {"stdio": program.format("sum")}
    half = {"stdio": program.format("(lambda x: 3 if (y := list(x))[0] == 1 else 0)")}
    for score, expected in ((CodeScore.ALL, [1.0, 0.0, 0.0]), (CodeScore.SHARE, [1.0, 0.5, 0.0])):
        scored = with_boxes_of(reward, code_score=score)
        for form, row in FORMS.items():
            codes = (right.get(form, ADD), half.get(form, "def add(a, b):\n    return 3"), "x = 1")
            assert await values(scored, *(item(code, row) for code in codes)) == expected, (form, score)


@in_loop_of_module
async def test_columns_of_datasets_are_read_as_they_are(reward: CodeReward) -> None:
    mbpp = {
        "text": "Write a function to add.",
        "code": "def sum(a, b):\r\n  return a + b",
        "test_list": ["assert sum(10, 15) == 25", "root = Node(3)\nassert root.value == 3 and height(root) == 1"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    humaneval = {
        "task_id": "HumanEval/0",
        "prompt": "from typing import List\n\ndef helper(x):\n    return x\n\n"
        'def f(x: List[int]) -> int:\n    """Sum."""\n',
        "entry_point": "f",
        "canonical_solution": "    return sum(x)\n",
        "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n    for i in range(9):\n"
        "        assert candidate([i] * i) == i * i\n    assert helper(2) == 2\n",
    }
    private = json.dumps([{"input": "[1]\n2", "output": "[1, 2]", "testtype": "functional"}])
    live = {
        "question_content": "q",
        "public_test_cases": json.dumps([{"input": "[5]\n6", "output": "[5, 6]", "testtype": "functional"}]),
        "private_test_cases": base64.b64encode(zlib.compress(pickle.dumps(private))).decode(),
        "metadata": json.dumps({"func_name": "append"}),
    }
    live_stdin = {
        "public_test_cases": json.dumps([{"input": "4", "output": "16", "testtype": "stdin"}]),
        "private_test_cases": json.dumps([{"input": "5", "output": "25", "testtype": "stdin"}]),
        "metadata": "{}",
    }
    apps = {"question": "q", "input_output": json.dumps({"inputs": ["4\n", "5\n"], "outputs": ["16\n", "25\n"]})}
    apps_calls = {"input_output": json.dumps({"fn_name": "append", "inputs": [[[1], 2]], "outputs": [[[1, 2]]]})}
    solution = "class Solution:\n    def append(self, a, b):\n        return a + [b]"
    square = "print(int(input()) ** 2)"
    tree = "class Node:\n  def __init__(self, value):\n    self.value = value\ndef height(node):\n  return 1"
    pairs = [
        (f"def sum(a, b):\n    return a + b\n{tree}", mbpp),
        ("def f(x):\n    return sum(x)", humaneval),
        (solution, live),
        (square, live_stdin),
        (square, apps),
        (solution, apps_calls),
    ]
    assert await values(reward, *(item(code, row) for code, row in pairs)) == [1.0] * 6
    assert await values(reward, *(item("pass", row) for _, row in pairs)) == [0.0] * 6
    # The tests may be the ground truth, in files that have a column of this name.
    assert await values(reward, item(ADD, None, ground_truth=json.dumps(CALLS["tests"]))) == [1.0]


TRICKS = [
    "import os; os._exit(0)",
    "import sys; sys.exit(0)",
    "class A:\n  __eq__ = lambda *_: True\n  __ne__ = lambda *_: False\n  __bool__ = lambda _: True\n"
    "def add(a, b): return A()",
    "class A(int):\n  __eq__ = lambda *_: True\ndef add(a, b): return A(0)",
    "import builtins; builtins.AssertionError = StopIteration\ndef add(a, b): raise AssertionError",
    'import json; json.dumps = lambda *_: \'{"passed": [true, true], "nonce": ""}\'\ndef add(a, b): return 0',
    'import os; os.write(3, b\'[["value", 3], ["value", 7]]\')\ndef add(a, b): return 0',
    "def add(a, b): return True",
    "def add(a, b): return float('nan')",
    "def add(a, b): return '3'",
    "def add(a, b): return None",
    "import gc, os\nfor x in gc.get_objects():\n  if isinstance(x, dict) and 'tests' in x: x['tests'] = []\n"
    "def add(a, b): return 0",
    "import sys\nf = sys._getframe()\nwhile f: f.f_locals.clear(); f = f.f_back\ndef add(a, b): return 0",
    "def compile(*_): return 'pass'\ndef exec(*_): pass\ndef len(*_): return 0\ndef add(a, b): return 0",
    "import os\nfor fd in range(3, 50):\n  try: os.close(fd)\n  except OSError: pass\ndef add(a, b): return a + b",
    "while True: pass",
    "x = bytearray(2**33)",
    "print('x' * 10**8)",
    "def add(:",
]


@in_loop_of_module
async def test_no_trick_earns_a_reward(reward: CodeReward) -> None:
    # One program knows the answers to the calls, because they are written above.
    pairs = [(code, form) for code in TRICKS for form in FORMS if not ("os.write(3" in code and form == "calls")]
    evaluations = await asyncio.gather(*(reward.score(item(code, FORMS[form])) for code, form in pairs))
    earned = [(pair, one) for pair, one in zip(pairs, evaluations, strict=True) if one.value != 0.0]
    assert earned == []


@in_loop_of_module
async def test_expected_values_never_enter_the_box_of_an_answer(reward: CodeReward) -> None:
    """An answer that searches the whole memory of its process for the expected value does not find it."""
    secret = 918_273_645_546_372
    search = (
        "def f(x):\n  import gc, sys\n  found, frame = gc.get_objects(), sys._getframe()\n  while frame:\n"
        "    found += [*frame.f_locals.values(), dict(frame.f_locals)]\n    frame = frame.f_back\n"
        "  found += [v for o in found if isinstance(o, dict) for v in list(o.values())]\n"
        "  for o in found:\n    if isinstance(o, (list, tuple, dict)):\n"
        "      for v in list(o.values()) if isinstance(o, dict) else list(o):\n"
        "        if type(v) in (int, str) and str(v).strip('asert f(1)=')[:4] == '9182':\n"
        "          return int(str(v).split()[-1])\n  return 0"
    )
    for tests in ({"inputs": [[1]], "outputs": [secret]}, [f"assert f(1) == {secret}"]):
        assert await values(reward, item(search, {"tests": tests})) == [0.0]


@in_loop_of_module
async def test_a_number_that_no_float_can_be_is_wrong_and_costs_no_other_answer(reward: CodeReward) -> None:
    tests = {"tests": {"inputs": [[5]], "outputs": [120]}}
    answers = (item("def f(x): return 10**400", tests), item("def f(x): return 120", tests))
    assert await values(reward, *answers, *answers) == [0.0, 1.0] * 2


@in_loop_of_module
async def test_asserts_may_use_objects_errors_and_changed_lists(reward: CodeReward) -> None:
    code = (
        "class Stack:\n  def __init__(self): self.items = []\n  def push(self, x, *, twice=False):\n"
        "    self.items.append(x)\n    return self\n  def __len__(self): return len(self.items)\n"
        "  def __getitem__(self, i): return self.items[i]\n"
        "def sort(x): x.sort()\ndef fail(): raise KeyError('no')\ndef pairs(d): return {(k, v) for k, v in d.items()}\n"
        "def numbers():\n  yield 1\n  yield 2\n"
        "LIMIT = 7\nStack._size = 3\nclass Small(ValueError): pass\ndef refuse(): raise Small('small')\n"
        "def decode(x): return x.decode()\nclass Empty:\n  __bool__ = lambda _: False\n"
        "class Node:\n  @property\n  def next(self): return Node()\n  last = Empty()\n"
        "import enum\nclass Color(str, enum.Enum):\n  RED = 'red'\ndef color(): return Color.RED\n"
        "def leave(): exit()"
    )
    tests = [
        "s = Stack()\nassert s.push(1, twice=True).items == [1] and len(s) == 1 and s[0] == 1",
        "x = [3, 1]\nsort(x)\nassert x == [1, 3]",
        "try:\n  fail()\n  assert False\nexcept KeyError as e:\n  assert 'no' in str(e)",
        "assert pairs({1: 'a'}) == {(1, 'a')}",
        "assert list(numbers()) == [1, 2]",
        "assert math.isclose(0.1 + 0.2, 0.3)",
        "from solution import LIMIT, pairs as p\nimport solution as s\nassert LIMIT == s.LIMIT == 7 and p({}) == set()",
        "try:\n  from solution import missing\n  assert False\nexcept ImportError: pass",
        "try:\n  refuse()\n  assert False\nexcept ValueError as e:\n  assert str(e) == 'small'",
        "try:\n  decode(b'\\xff')\n  assert False\nexcept UnicodeDecodeError: pass",
        "assert Node().next and not Node().last",
        "assert isinstance(Node(), Node) and not isinstance(Node(), Stack) and not isinstance(3, Node)",
        "assert pairs.__name__ == 'pairs' and Stack()._size == 3",
        "assert color() == 'red' and eval('numbers()') is not None",
        "try:\n  leave()\n  assert False\nexcept RuntimeError: pass",
    ]
    evaluation = await reward.score(item(code, {"tests": tests}))
    assert (evaluation.value, evaluation.reason) == (1.0, None)
    evaluation = await reward.score(item(code, {"tests": [*tests, "assert Stack() == Stack()"]}))
    assert evaluation.value == 0.0
    assert f"{len(tests)} of {len(tests) + 1}" in str(evaluation.reason)


def test_values_are_compared_by_type_and_value() -> None:
    same = [(1, 1.0), ([1, 2], (1, 2)), ({"a": [1]}, {"a": (1,)}), (None, None), (0.0, -0.0), ("a", "a")]
    other = [(True, 1), (1, True), ("1", 1), ([1], [1, 2]), (None, 0), (float("nan"), 1), ({1}, [1]), ("a", b"a")]
    assert [same_value(got, expected, 0.0) for got, expected in same] == [True] * len(same)
    assert [same_value(got, expected, 0.0) for got, expected in other] == [False] * len(other)
    assert same_value([1.0000001], [1], 1e-6)
    assert not same_value([1.0000001], [1], 0.0)
    assert same_text("1 2 \n3\n\n", "1 2\n3", 0.0)
    assert same_text("0.50", ".5", 0.0)
    assert not same_text("1\n2", "1 2", 0.0)
    assert not same_text("nan", "1", 0.0)
    assert same_text("0.3333333", "0.33333334", 1e-6)


@in_loop_of_module
async def test_a_row_without_readable_tests_has_no_reward(reward: CodeReward) -> None:
    for row in (
        {"question": "q"},
        {"tests": []},
        {"tests": {"inputs": [[1]], "outputs": []}},
        {"tests": "nonsense"},
        {"public_test_cases": "[]", "private_test_cases": "nonsense"},
    ):
        evaluation = await reward.score(item(ADD, row))
        assert (evaluation.value, evaluation.status) == (None, RewardStatus.ERROR), row


def test_a_pickle_that_would_run_something_is_refused() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("run",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(ValueError, match=r"builtins\.print"):
        read_tests({"public_test_cases": "[]", "private_test_cases": packed})


@in_loop_of_module
async def test_repeated_answers_are_run_once(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = reward._run

    async def counted(deed: str, **what: Any) -> Any:
        runs.append(deed)
        return await run(deed, **what)

    monkeypatch.setattr(reward, "_run", counted)
    once, other = "def add(a, b):\n  return b + a", "def add(a, b):\n  return a + b + 0"
    scored = await values(reward, *(item(code, CALLS) for code in (once, once, other, once)), item(once, ASSERTS))
    assert scored == [1.0] * 5
    assert await values(reward, item(once, CALLS)) == [1.0]
    assert sorted(runs) == ["asserts", "calls", "calls"]


@in_loop_of_module
async def test_an_answer_without_a_block_is_wrong_and_a_lost_box_says_nothing(
    reward: CodeReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = await reward.score(item("", CALLS, response="I do not know."))
    assert (evaluation.value, evaluation.status) == (0.0, RewardStatus.SCORED)

    async def lost(*_: Any, **__: Any) -> Result:
        return Result(Outcome.INFRASTRUCTURE)

    once = "def add(a, b):\n  return b + a + 0"
    for row in FORMS.values():
        with monkeypatch.context() as patch:
            patch.setattr(reward, "_run", lost)
            evaluation = await reward.score(item(once, row))
        assert (evaluation.value, evaluation.status) == (None, RewardStatus.ERROR)
    assert await values(reward, item(once, CALLS)) == [1.0], "what was lost is not kept"


@in_loop_of_module
async def test_a_long_queue_is_not_a_wrong_answer(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient = with_boxes_of(reward, service_deadline_seconds=3)
    monkeypatch.setattr(box, "QUEUE_SECONDS", 0.2)
    answers = [item(f"import time; time.sleep(2)  # {n}", STDIO) for n in range(3)]
    evaluations = await asyncio.gather(*map(impatient.score, answers))
    assert (evaluations[2].value, evaluations[2].status) == (None, RewardStatus.OVERLOADED)
    assert [evaluation.value for evaluation in evaluations[:2]] == [0.0, 0.0]


async def test_answers_that_sleep_cost_no_other_one_its_reward() -> None:
    asleep = [item(f"import time; time.sleep({9_999 + n})", row) for n, row in enumerate((STDIO, ASSERTS))]
    right = [item(f"{ADD}  # {n}", CALLS) for n in range(8)]
    async with rewarding(service_deadline_seconds=15) as reward:
        assert await values(reward, *asleep, *right) == [0.0, 0.0] + [1.0] * 8


async def test_the_routes_give_the_reward_with_its_reason(serving: Any) -> None:
    async with serving(create_app(RewardSettings(reward_fn="code=2,format=0.5"))) as client:
        body = {
            "items": [{"prompt": "", "response": fenced("def add(a, b): return 3"), "ground_truth": "", "row": "0"}]
        }
        [result] = (await client.post("/batch_reward", json=body | {"rows": {"0": json.dumps(CALLS)}})).json()[
            "rewards"
        ]
    assert (result["reward"], result["components"]) == (0.0, {"code": 0.0, "format": 0.0})
    assert "1 of 2 tests pass" in result["reason"]
    assert result["extracted"] == "def add(a, b): return 3\n"


def test_without_a_sandbox_neither_the_server_starts_nor_the_check_of_the_functions_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setenv("REWARD_FN", "code")
    monkeypatch.setenv("SANDBOX", "bwrap")
    monkeypatch.setattr(sys, "argv", ["own_code"])
    reward = CodeReward(RewardSettings.load())
    for attempt in (lambda: asyncio.run(reward.start()), own_code.main):
        with pytest.raises(ConfigurationError, match="SANDBOX=bwrap"):
            attempt()


def test_a_dry_run_refuses_a_row_whose_tests_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [
        ("lines/train/0", {"ground_truth": json.dumps(CALLS["tests"])}),
        ("lines/train/1", {"ground_truth": "[1]"}),
    ]
    (tmp_path / "items").write_text("".join(json.dumps(one) + "\n" for one in items))
    monkeypatch.setattr(sys, "argv", ["own_code", str(tmp_path / "items")])
    with pytest.raises(ConfigurationError, match="lines/train/1"):
        own_code.check(RewardSettings(reward_fn="code"))
    (tmp_path / "items").write_text(json.dumps(items[0]) + "\n")
    own_code.check(RewardSettings(reward_fn="code"))
