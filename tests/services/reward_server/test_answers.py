"""Which answers are right: exact arithmetic decides the first tables alone; the second one is math-verify's too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.core.numbers import quantity
from services.reward_server.answers import Verdict, judge

GSM8K_TEST = Path(__file__).parents[4] / "shared" / "gsm8k" / "test.jsonl"

RIGHT = [
    # What math-verify denies or a strict scorer rejects.
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50\%}", "0.5"),
    (r"\boxed{1\,234}", "1234"),
    (r"first \boxed{3}, no: \boxed{4}", "4"),
    (r"\boxed{5", "5"),
    ("3 apples, not 4", "3"),
    ("#### 3 apples, not 4", "3"),
    (r"\boxed{2:30}", "2:30"),
    ("#### 2:30 pm", "2:30"),
    ("#### 18.", "18"),
    ("#### $18", "18"),
    # What it reads, and must stay read.
    ("#### 70,000", "70000"),
    (r"\boxed{\$70,000}", "70000"),
    (r"\boxed{72 \text{ clips}}", "72"),
    ("18.00", "18"),
    ("x=3", "3"),
    ("x = 3", "3"),
    ("1{,}000", "1000"),
    # Spellings.
    ("#### -5", "-5"),
    ("#### \u22125", "-5"),
    ("#### negative 5", "-5"),
    ("#### +5", "5"),
    ("#### .5", "0.5"),
    ("#### 5", "5.0"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"\boxed{\dfrac{6}{4}}", "1.5"),
    ("The answer is 3/4.", "0.75"),
    ("#### 72 cm^2", "72"),
    ("#### 60 mph", "60"),
    ("#### 90\u00b0", "90"),
    ("#### 5 million", "5000000"),
    ("#### 5 million", "5"),
    ("#### 70k", "70000"),
    ("#### 3 dozen eggs", "36"),
    ("25 percent", "0.25"),
    (r"#### \boxed{72}", "72"),
    ("#### 5!", "5"),
    ("#### Final Answer\n\\boxed{72}", "72"),
    ("#### Step 3: add\n3 + 4 = 7\nThe answer is **7**.", "7"),
    ("**Answer:** 72", "72"),
    ("She sold **72** clips in 5 days.", "72"),
    ("The answer is 18 dollars per day for 7 days.", "18"),
    ("The answer is 5 + 3 = 8 apples.", "8"),
    ("First 3, then 4. In all she has 7.", "7"),
    ("It costs $1,234.50 in all", "1234.5"),
    (r"Therefore $x = \boxed{72}$.", "72"),
    ("####\n72", "72"),
    ("\\boxed{\n72\n}", "72"),
    (r"\boxed{\text{B}}", r"\text{B}"),
    ("#### Paris", "paris"),
    # Elements.
    ("<answer>3</answer>", "3"),
    ("<Answer> 1,234 </Answer>", "1234"),
    ("<answer>3", "3"),
    ("3</answer>", "3"),
    ("<answer>$3.50</answer>", "3.5"),
    ("<answer>Paris</answer>", "paris"),
    ("<think>3 + 1 = 4</think>\n<answer>\nThe total is 3 apples.\n</answer>", "3"),
    (r"<answer>so \boxed{3}</answer>", "3"),
    ("<answer>#### 3</answer>", "3"),
    ("<answer>3</answer>. That took 5 steps.", "3"),
    ("<answer>4</answer>, no: <answer>3</answer>", "3"),
    ("<answer><answer>3</answer></answer>", "3"),
    ("I answer in <answer> tags, after 4 steps.\n<answer>3</answer>", "3"),
    ("<answer>3</answer>\n#### 4", "4"),
    (r"<answer>3</answer> \boxed{4}", "4"),
    # Mixed numbers.
    ("#### 1 1/2", "1.5"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    (r"\boxed{1 \tfrac12}", "3/2"),
    ("1.5", "1 1/2"),
    ("#### -1 1/2", "-1.5"),
    (r"\boxed{-1\frac{1}{2}}", "-1.5"),
    ("#### 1,000 1/4", "1000.25"),
    ("She needs 2 3/4 cups", "2.75"),
    ("#### 1\u00bd", "1.5"),
    ("<answer>\u00bd</answer>", "0.5"),
    # Scientific notation.
    ("#### 1e6", "1000000"),
    ("#### 1.5E+3 m", "1500"),
    ("#### -2e-3", "-0.002"),
    ("It is 1e6 dollars", "1000000"),
    # Full-width digits.
    ("#### \uff11\uff12", "12"),
    ("#### \uff11\uff0c\uff12\uff13\uff14\uff0e\uff15", "1234.5"),
    ("\\boxed{\uff0d\uff15}", "-5"),
    ("12", "\uff11\uff12"),
]
WRONG = [
    ("#### 71", "72"),
    ("#### 72 is wrong, so\n#### 71", "72"),
    (r"\boxed{72} no, \boxed{71}", "72"),
    ("I do not know", "72"),
    ("", "72"),
    ("2:30", "1/15"),
    ("#### 50%", "5000%"),
    ("#### 5 million", "5 thousand"),
    ("#### -72", "72"),
    ("#### 7200", "72"),
    ("#### 72.5", "72"),
    ("3 apples, not 4", "4"),
    ("<answer>3</answer> <answer>4</answer>", "3"),
    ("<answer>3</answer>\n#### 4", "3"),
    ("</answer>3<answer>4", "3"),
    ("I answer in <answer> tags, after 4 steps.\n<answer>3</answer>", "4"),
    (r"\boxed{1\frac{1}{2}}", "5.5"),
    (r"\boxed{1\frac{1}{2}}", "0.5"),
    (r"\boxed{2\frac{1}{2}}", "1"),
    ("#### 1 1/2", "1"),
    ("#### 1 1/2", "5.5"),
    ("#### -1 1/2", "-0.5"),
    ("#### -1 1/2", "1.5"),
    ("#### 1\u00bd", "1"),
    ("#### 1e6", "1"),
    ("#### 1e6", "16"),
    ("#### 1e6", "1000001"),
    ("#### 1e-6", "1000000"),
    ("#### \uff11\uff12", "1"),
    ("#### \uff11\uff0c\uff12\uff13\uff14", "1"),
]
UNDECIDED = [
    ("#### 3x", "3"),
    ("10^5", "100000"),
    (r"\boxed{5!}", "120"),
    (r"\boxed{\sqrt{16}}", "4"),
    (r"\boxed{x+1}", "1+x"),
    (r"\boxed{(1, 2)}", "12"),
    ("#### 1,2", "12"),
    ("#### 10 to 12", "10"),
    ("#### 12 and 5", "12"),
    (r"\boxed{2\pi}", "6.28"),
    ("The answer is 2 3", "23"),
    ("5 - 3", "2"),
]


@pytest.mark.parametrize(("response", "truth"), RIGHT)
def test_right_in_whatever_spelling(response: str, truth: str) -> None:
    assert judge(response, truth).verdict is Verdict.RIGHT


@pytest.mark.parametrize(("response", "truth"), WRONG)
def test_wrong_is_wrong(response: str, truth: str) -> None:
    assert judge(response, truth).verdict is Verdict.WRONG


@pytest.mark.parametrize(("response", "truth"), UNDECIDED)
def test_what_is_not_a_plain_number_is_left_to_math_verify(response: str, truth: str) -> None:
    assert judge(response, truth).verdict is Verdict.UNDECIDED


def test_an_open_box_counts_only_where_the_response_was_not_cut() -> None:
    assert judge(r"\boxed{5", "5").verdict is Verdict.RIGHT
    # Cut at its length limit, the 5 may be the beginning of 57.
    assert judge(r"so it is \boxed{5", "57", truncated=True).verdict is not Verdict.RIGHT
    assert judge(r"\boxed{4} and \boxed{5", "4").verdict is Verdict.RIGHT


@pytest.mark.parametrize(
    ("response", "truths"),
    [
        ("#### 1", ["1"]),
        ("#### 1 1", ["1", "11"]),
        ("#### 1 1/", ["1", "11"]),
        ("#### 1 1/2", ["1.5", "1"]),
        ("#### 1e6", ["1000000", "1"]),
        ("#### \uff11", ["1"]),
        ("the answer is 5", ["5"]),
        ("so 3 + 4 = 7", ["7"]),
        (r"\boxed{1\frac{1}{2}", ["1.5", "1", "0.5", "2"]),
        (r"\boxed{1\frac{1}{2", ["1.5", "1", "0.5", "2"]),
        ("<answer>3", ["3"]),
        ("<answer>3 apples and", ["3"]),
        ("<answer>4</answer>, no: <answer>3 ", ["4", "3"]),
    ],
)
def test_an_answer_at_the_end_of_a_response_that_was_cut_is_not_whole(response: str, truths: list[str]) -> None:
    for truth in truths:
        assert judge(response, truth, truncated=True).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    "response", ["#### 72\nSo 72", "<answer>72</answer> and 7", r"\boxed{72} and 72", "the answer is 72. As 7"]
)
def test_an_answer_before_the_end_of_a_response_that_was_cut_counts(response: str) -> None:
    assert judge(response, "72", truncated=True).verdict is Verdict.RIGHT


def _grouped(number: str) -> str:
    return f"{int(number):,}"


SPELLINGS: dict[str, Callable[[str], str]] = {
    "boxed": lambda n: rf"So it is \boxed{{{n}}}.",
    "boxed in dollars": lambda n: rf"$\boxed{{\${_grouped(n)}}}$",
    "boxed with unit": lambda n: rf"\[ \boxed{{{_grouped(n).replace(',', '{,}')}\text{{ apples}}}} \]",
    "boxed with thin spaces": lambda n: rf"\boxed{{{_grouped(n).replace(',', chr(92) + ',')}}}",
    "bold": lambda n: f"In all, Natalia sold **{n}** clips.",
    "hashes": lambda n: f"Natalia sold 48 and 24.\n#### {n}",
    "hashes with unit": lambda n: f"#### {n} dollars per day",
    "commas": lambda n: f"#### {_grouped(n)}",
    "decimals": lambda n: f"The answer is {n}.00",
    "sentence": lambda n: f"So the answer is {n}.",
    "sentence with unit": lambda n: f"Natalia sold {_grouped(n)} clips.",
    "sentence with dollars": lambda n: f"They made ${_grouped(n)} in all.",
    "markdown": lambda n: f"**Final Answer**: {_grouped(n)} miles per hour",
    "equation": lambda n: f"48 + 24 = {n}",
}


@pytest.mark.optional
@pytest.mark.skipif(not GSM8K_TEST.exists(), reason="the published GSM8K files are not beside the repository")
def test_every_gsm8k_reference_answer_verifies_against_itself_in_every_spelling() -> None:
    rows = [json.loads(line) for line in GSM8K_TEST.read_text().splitlines()]
    assert len(rows) == 1319
    denied = []
    for row in rows:
        truth = row["answer"].rpartition("####")[2].strip().replace(",", "")
        spelled = {name: spell(truth) for name, spell in SPELLINGS.items()} | {"reference": row["answer"]}
        for name, response in spelled.items():
            if judge(response, truth).verdict is not Verdict.RIGHT:
                denied.append((name, response, truth))
            other = str(int(truth) + 1)
            if judge(response, other).verdict is Verdict.RIGHT:
                denied.append((name, response, other))
    assert denied == []


@pytest.mark.parametrize(
    "response",
    [
        "a" * 190 + "!",
        "**" + "1" * 16_000,
        "####" + "1," * 8_000,
        "\\boxed{" * 3_000,
        "\\boxed{" * 3_000 + "}" * 3_000,
        "not 1" * 4_000,
        "\\text{" * 3_000,
        "answer is " * 2_000 + "1" * 200,
        "1 " * 8_000,
        "#### " + "ab " * 60 + "#",
        "#### 1" + " a" * 90 + "#",
        "#### " + "1,22" * 49,
        "#### " + "ab'" * 60,
        "\\frac{" + "1" * 16_000,
        "x" * 10_000_000,
        "#### 1e" + "9" * 190,
        "#### " + "1 " * 90 + "1/2",
        "<answer>" * 2_000,
        "<answer>1</answer>" * 900,
    ],
    ids=range(19),
)
def test_no_response_takes_long(response: str) -> None:
    started = time.process_time()
    judge(response, "5")
    assert time.process_time() - started < 0.25


def test_quantities_are_exact() -> None:
    tenth, fraction = quantity("0.1"), quantity("1/10")
    assert tenth is not None
    assert fraction is not None
    assert tenth.value == fraction.value
    long = quantity("0." + "3" * 150)
    assert long is not None
    assert long.value != quantity("1/3").value  # type: ignore[union-attr]
    assert quantity("1/0") is None
    assert quantity("1" * 201) is None
