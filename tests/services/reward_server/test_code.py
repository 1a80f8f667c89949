"""The reward ``code``: programs are run on the tests of their row, and what they do decides."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import signal
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.core.errors import EXIT_CONFIGURATION, ConfigurationError
from services.protocol.rewards import BatchRewardReply, RewardItem, RewardStatus
from services.reward_server import own_code
from services.reward_server.app import create_app
from services.reward_server.code import CodeReward, last_block, read_tests, same_text, same_value
from services.reward_server.pool import Evaluation
from services.reward_server.settings import RewardSettings
from tests.waiting import IDLE_SECONDS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the backends for Linux")

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
    reward = CodeReward(RewardSettings(reward_fn="code", reward_queue_seconds=IDLE_SECONDS, **options))
    await reward.start()
    try:
        yield reward
    finally:
        await reward.stop()


async def values(reward: CodeReward, *items: RewardItem) -> list[float | None]:
    return [evaluation.value for evaluation in await asyncio.gather(*map(reward.score, items))]


def test_the_last_closed_block_is_the_program() -> None:
    assert last_block("```python\na = 1\n```\nor\n```py\nb = 2\n```") == "b = 2\n"
    assert last_block("```\na = 1\n```") == "a = 1\n"
    assert last_block("  ```python3\n  a = 1\n  ```") == "  a = 1\n"
    # A cut answer has the blocks that are closed.
    assert last_block("```python\na = 1\n```\n```python\nb = ") == "a = 1\n"
    assert last_block("```python\nb = 2") is None
    assert last_block("a = 1") is None
    assert last_block("```java\nint a;\n```") is None
    # The end of a block in another language begins none.
    assert last_block("Input:\n```text\n1 2\n```\nProgram:\n```python\na = 1\n```") == "a = 1\n"
    assert last_block("```python\na = 1\n```\nRun\n```bash\nls\n```\nIt prints:\n```text\n3\n```\nso") == "a = 1\n"
    assert last_block("```text\nnever closed\n```python\na = 1\n```") == "a = 1\n"


async def test_every_form_of_tests_and_both_scores() -> None:
    programs = {"stdio": "print({}(map(int, input().split())))"}
    right = {"stdio": programs["stdio"].format("sum")}
    # Right for the first test only.
    half = {"stdio": programs["stdio"].format("(lambda x: 3 if (y := list(x))[0] == 1 else 0)")}
    half_function = "def add(a, b):\n    return 3"
    for score, expected in (("all", [1.0, 0.0, 0.0]), ("share", [1.0, 0.5, 0.0])):
        async with rewarding(code_score=score) as reward:
            for form, row in FORMS.items():
                codes = (right.get(form, ADD), half.get(form, half_function), "x = 1")
                assert await values(reward, *(item(code, row) for code in codes)) == expected, (form, score)


async def test_columns_of_datasets_are_read_as_they_are() -> None:
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
    async with rewarding() as reward:
        assert await values(reward, *(item(code, row) for code, row in pairs)) == [1.0] * 6
        assert await values(reward, *(item("pass", row) for _, row in pairs)) == [0.0] * 6
        # The tests may be the ground truth, in files that have a column of this name.
        truth = json.dumps(CALLS["tests"])
        assert await values(reward, item(ADD, None, ground_truth=truth)) == [1.0]


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


async def test_no_trick_earns_a_reward(tricked: CodeReward) -> None:
    # One program knows the answers to the calls, because they are written above.
    pairs = [(code, form) for code in TRICKS for form in FORMS if not ("os.write(3" in code and form == "calls")]
    evaluations = await asyncio.gather(*(tricked.score(item(code, FORMS[form])) for code, form in pairs))
    earned = [(pair, one) for pair, one in zip(pairs, evaluations, strict=True) if one.value != 0.0]
    assert earned == []


@pytest.fixture
async def tricked() -> AsyncIterator[CodeReward]:
    async with rewarding(code_cpu_seconds=0.5) as reward:
        yield reward


async def test_expected_values_never_enter_the_box_of_an_answer(tricked: CodeReward) -> None:
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
        assert await values(tricked, item(search, {"tests": tests})) == [0.0]


async def test_a_number_that_no_float_can_be_is_wrong_and_costs_no_other_answer(tricked: CodeReward) -> None:
    tests = {"tests": {"inputs": [[5]], "outputs": [120]}}
    answers = (item("def f(x): return 10**400", tests), item("def f(x): return 120", tests))
    assert await values(tricked, *answers, *answers) == [0.0, 1.0] * 2


async def test_asserts_may_use_objects_errors_and_changed_lists(tricked: CodeReward) -> None:
    code = (
        "class Stack:\n  def __init__(self): self.items = []\n  def push(self, x, *, twice=False):\n"
        "    self.items.append(x)\n    return self\n  def __len__(self): return len(self.items)\n"
        "  def __getitem__(self, i): return self.items[i]\n"
        "def sort(x): x.sort()\ndef fail(): raise KeyError('no')\ndef pairs(d): return {(k, v) for k, v in d.items()}\n"
        "def numbers():\n  yield 1\n  yield 2"
    )
    tests = [
        "s = Stack()\nassert s.push(1, twice=True).items == [1] and len(s) == 1 and s[0] == 1",
        "x = [3, 1]\nsort(x)\nassert x == [1, 3]",
        "try:\n  fail()\n  assert False\nexcept KeyError as e:\n  assert 'no' in str(e)",
        "assert pairs({1: 'a'}) == {(1, 'a')}",
        "assert list(numbers()) == [1, 2]",
        "assert math.isclose(0.1 + 0.2, 0.3)",
    ]
    evaluation = await tricked.score(item(code, {"tests": tests}))
    assert (evaluation.value, evaluation.reason) == (1.0, None)
    evaluation = await tricked.score(item(code, {"tests": [*tests, "assert Stack() == Stack()"]}))
    assert evaluation.value == 0.0
    assert evaluation.reason == "6 of 7 tests pass; AssertionError"


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


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"question": "q"}, "the row has no column `tests`, and not those of MBPP"),
        ({"tests": []}, "not a list of texts"),
        ({"tests": {"inputs": [[1]], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"tests": "nonsense"}, "JSONDecodeError"),
        ({"public_test_cases": "[]", "private_test_cases": "nonsense"}, "cannot be read"),
    ],
)
async def test_a_row_without_readable_tests_has_no_reward(row: dict[str, Any], why: str, tricked: CodeReward) -> None:
    evaluation = await tricked.score(item(ADD, row))
    assert (evaluation.value, evaluation.status) == (None, RewardStatus.ERROR)
    assert why in str(evaluation.reason)


def test_a_pickle_that_would_run_something_is_refused() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("run",))

    packed = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(ValueError, match=r"a pickle with builtins\.print; only a text is read"):
        read_tests({"public_test_cases": "[]", "private_test_cases": packed})


async def test_repeated_answers_are_run_once(tricked: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    run = tricked._run

    async def counted(deed: str, **what: Any) -> Any:
        runs.append(deed)
        return await run(deed, **what)

    monkeypatch.setattr(tricked, "_run", counted)
    once, other = "def add(a, b):\n  return b + a", "def add(a, b):\n  return a + b + 0"
    scored = await values(tricked, *(item(code, CALLS) for code in (once, once, other, once)), item(once, ASSERTS))
    assert scored == [1.0] * 5
    assert await values(tricked, item(once, CALLS)) == [1.0]
    assert sorted(runs) == ["asserts", "calls", "calls"]


async def test_an_answer_without_a_block_is_wrong_and_a_lost_pool_says_nothing() -> None:
    async with rewarding(reward_workers=1) as reward:
        evaluation = await reward.score(item("", CALLS, response="I do not know."))
        assert evaluation == Evaluation(0.0, reason="the response has no closed fenced block of Python")
        sleeping = asyncio.create_task(reward.score(item("import time; time.sleep(20)", STDIO)))
        for _ in range(2):  # Its first try and its second.
            await asyncio.sleep(1)
            for child in psutil.Process().children(recursive=True):
                if not child.children():
                    child.send_signal(signal.SIGKILL)
        lost = await sleeping
        assert (lost.value, lost.status) == (None, RewardStatus.ERROR)
        assert str(lost.reason).startswith("the sandbox lost the answer twice: ")
        assert await values(reward, item(ADD, CALLS)) == [1.0]


async def test_a_long_queue_is_not_a_wrong_answer() -> None:
    async with rewarding(reward_workers=1) as reward:
        reward._settings = reward._settings.model_copy(update={"reward_queue_seconds": 0.2})
        slow, waiting = (item(f"import time; time.sleep(2)  # {n}", STDIO) for n in range(2))
        evaluations = await asyncio.gather(reward.score(slow), reward.score(waiting))
        assert evaluations[1].status is RewardStatus.OVERLOADED
        assert (evaluations[1].value, evaluations[0].value) == (None, 0.0)


async def test_the_routes_give_the_reward_with_its_reason(serving: Any) -> None:
    async with serving(create_app(RewardSettings(reward_fn="code=2,format=0.5"))) as client:
        body = {
            "items": [{"prompt": "", "response": fenced("def add(a, b): return 3"), "ground_truth": "", "row": "0"}]
        }
        [result] = (await client.post("/batch_reward", json=body | {"rows": {"0": json.dumps(CALLS)}})).json()[
            "rewards"
        ]
    assert (result["reward"], result["components"]) == (0.0, {"code": 0.0, "format": 0.0})
    assert result["reason"] == "code: 1 of 2 tests pass; a call gives ['value', 3]"
    assert result["extracted"] == "def add(a, b): return 3\n"


def test_without_a_sandbox_the_server_ends_with_78_and_says_why(tmp_path: Any) -> None:
    for module in ("services.reward_server", "services.reward_server.own_code"):
        done = subprocess.run(
            [sys.executable, "-m", module],
            env={"REWARD_FN": "code", "SANDBOX": "seatbelt", "PATH": "/usr/bin", "SHARED_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=IDLE_SECONDS,
        )
        assert done.returncode == EXIT_CONFIGURATION, done.stderr
        assert "code needs a sandbox, and SANDBOX=seatbelt has none on this machine" in done.stderr
        assert "seatbelt is not for linux" in done.stderr


def test_a_setting_that_is_wrong_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="SANDBOX is 'docker'"):
        RewardSettings.load(sandbox="docker")


def test_a_server_killed_in_mid_batch_gives_the_same_rewards_and_leaves_no_process(start_service: Any) -> None:
    codes = [f"import time\ntime.sleep(0.3)\ndef add(a, b): return a + b + {n % 3}  # {n}" for n in range(20)]
    items = [{"prompt": "", "response": fenced(code), "ground_truth": "", "row": "0"} for code in codes]
    body = {"items": items, "rows": {"0": json.dumps(CALLS)}}

    def ask(url: str) -> list[float | None]:
        reply = httpx.post(f"{url}/batch_reward", json=body, timeout=IDLE_SECONDS, trust_env=False)
        return [result.reward for result in BatchRewardReply.model_validate(reply.json()).rewards]

    options = {"REWARD_FN": "code", "REWARD_QUEUE_SECONDS": str(IDLE_SECONDS)}
    service = start_service("services.reward_server", **options)
    quiet = ask(service.url)
    assert quiet == [float(n % 3 == 0) for n in range(20)]
    service.terminate()

    service = start_service("services.reward_server", **options)
    process = psutil.Process(service.process.pid)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{service.url}/batch_reward", json=body, timeout=httpx.Timeout(IDLE_SECONDS, read=1), trust_env=False
        )
    children = process.children(recursive=True)
    assert len(children) > 2
    service.kill()
    assert psutil.wait_procs(children, IDLE_SECONDS)[1] == []
    assert ask(start_service("services.reward_server", **options).url) == quiet


def test_a_dry_run_refuses_a_row_whose_tests_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [
        ("lines/train/0", {"ground_truth": json.dumps(CALLS["tests"])}),
        ("lines/train/1", {"ground_truth": "[1]"}),
    ]
    (tmp_path / "items").write_text("".join(json.dumps(one) + "\n" for one in items))
    monkeypatch.setattr(sys, "argv", ["own_code", str(tmp_path / "items")])
    with pytest.raises(ConfigurationError, match="`code`, and at prompt lines/train/1 the row's tests cannot be read"):
        own_code.check(RewardSettings(reward_fn="code"))
    (tmp_path / "items").write_text(json.dumps(items[0]) + "\n")
    own_code.check(RewardSettings(reward_fn="code"))
