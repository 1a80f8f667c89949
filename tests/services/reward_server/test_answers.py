"""Which answers are right. The tables have responses by their ground truth; those of the last are math-verify's."""

from __future__ import annotations

import time

import pytest

from services.core.numbers import quantity
from services.reward_server.answers import judge

RIGHT = {
    "0.5": [r"\boxed{50\%}", "#### .5", "<answer>\u00bd</answer>"],
    "1234": [
        r"\[ \boxed{1{,}234\text{ apples}} \]",
        "They made $1,234 in all.",
        "**Final Answer**: 1,234 miles per hour",
    ],
    "4": ["<answer>3</answer>\n#### 4", r"<answer>3</answer> \boxed{4}"],
    "5": [r"\boxed{5", "#### +5", "#### 5 million", "#### 5!"],
    "3": ["#### 3 apples, not 4", "x = 3", "<answer>3", "3</answer>", "<answer><answer>3</answer></answer>"],
    "3.0": [r"<answer>so \boxed{3}</answer>", "I answer in <answer> tags, after 4 steps.\n<answer>3</answer>"],
    "2:30": [r"\boxed{2:30}", "#### 2:30 pm"],
    "18": ["#### 18.", "#### $18", "18.00", "The answer is 18 dollars per day for 7 days."],
    "70000": [r"\boxed{\$70,000}", "#### 70k"],
    "72": [
        "#### 72 cm^2",
        "#### Final Answer\n\\boxed{72}",
        "She sold **72** clips in 5 days.",
        "####\n72",
        "48 + 24 = 72",
    ],
    "-5": ["#### \u22125", "#### negative 5", "\\boxed{\uff0d\uff15}"],
    "1.5": [r"\boxed{\dfrac{6}{4}}", "#### 1 1/2", r"\boxed{1\frac{1}{2}}", "#### 1\u00bd"],
    "60": ["#### 60 mph"],
    "90": ["#### 90\u00b0"],
    "5000000": ["#### 5 million"],
    "36": ["#### 3 dozen eggs"],
    "0.25": ["25 percent"],
    "7": ["#### Step 3: add\n3 + 4 = 7\nThe answer is **7**.", "First 3, then 4. In all she has 7."],
    "1234.5": ["It costs $1,234.50 in all", "#### \uff11\uff0c\uff12\uff13\uff14\uff0e\uff15"],
    "paris": ["#### Paris", "<answer>Paris</answer>"],
    "3/2": [r"\boxed{1 \tfrac12}"],
    "-1.5": ["#### -1 1/2", r"\boxed{-1\frac{1}{2}}"],
    "1000.25": ["#### 1,000 1/4"],
    "1000000": ["It is 1e6 dollars"],
    "-0.002": ["#### -2e-3"],
    "\uff11\uff12": ["12"],
}
WRONG = {
    "72": ["#### 72 is wrong, so\n#### 71", "I do not know", "", "#### -72", "#### 7200", "#### 72.5"],
    "1/15": ["2:30"],
    "5000%": ["#### 50%"],
    "5 thousand": ["#### 5 million"],
    "4": ["3 apples, not 4", "I answer in <answer> tags, after 4 steps.\n<answer>3</answer>"],
    "3": ["<answer>3</answer> <answer>4</answer>", "</answer>3<answer>4"],
    "5.5": [r"\boxed{1\frac{1}{2}}", "#### 1 1/2"],
    "1": [r"\boxed{2\frac{1}{2}}", "#### 1\u00bd", "#### 1e6", "#### \uff11\uff12"],
    "1.5": ["#### -1 1/2"],
    "1000000": ["#### 1e-6"],
}
UNDECIDED = {
    "3": ["#### 3x"],
    "100000": ["10^5"],
    "120": [r"\boxed{5!}"],
    "4": [r"\boxed{\sqrt{16}}"],
    "12": [r"\boxed{(1, 2)}", "#### 1,2", "#### 12 and 5"],
    "10": ["#### 10 to 12"],
    "23": ["The answer is 2 3"],
    "2": ["5 - 3"],
}


@pytest.mark.parametrize(("table", "is_right"), [(RIGHT, True), (WRONG, False), (UNDECIDED, None)])
def test_a_number_is_right_in_whatever_spelling_and_other_expressions_are_left_to_math_verify(
    table: dict[str, list[str]], is_right: bool | None
) -> None:
    found = {(response, truth): judge(response, truth).is_right for truth in table for response in table[truth]}
    assert {pair: one for pair, one in found.items() if one is not is_right} == {}


CUT = {
    "#### 1": ["1"],
    "#### 1 1": ["1", "11"],
    "#### 1 1/": ["1", "11"],
    "#### 1 1/2": ["1.5", "1"],
    "#### 1e6": ["1000000", "1"],
    "#### \uff11": ["1"],
    "the answer is 5": ["5"],
    "so 3 + 4 = 7": ["7"],
    r"\boxed{1\frac{1}{2}": ["1.5", "1", "0.5", "2"],
    r"\boxed{1\frac{1}{2": ["1.5", "1", "0.5", "2"],
    r"so it is \boxed{5": ["57", "5"],
    r"\boxed{4} and \boxed{5": ["4"],
    "<answer>3": ["3"],
    "<answer>3 apples and": ["3"],
    "<answer>4</answer>, no: <answer>3 ": ["4", "3"],
}


def test_an_answer_at_the_end_of_a_response_that_was_cut_is_not_whole_and_one_before_its_end_counts() -> None:
    for response, truths in CUT.items():
        for truth in truths:
            assert judge(response, truth, truncated=True).is_right is False, response
    for response in ("#### 72\nSo 72", "<answer>72</answer> and 7", r"\boxed{72} and 72", "the answer is 72. As 7"):
        assert judge(response, "72", truncated=True).is_right is True, response


LONG = [
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
    *(text * 100_000 for text in (" ", "{", "\\", "1", "####", "\\boxed{", "**", "√(", "²", "x=", "*a", "answer is\n")),
    *("#### " + "a" * 100 + text * 100_000 for text in (" ", "=", "_{", "()", "*", "\\sqrt{")),
    "the answer is " + "**" * 100 + "a" * 100_000,
    "<think>" * 100_000 + "</think>" * 100_000,
]


def test_no_response_takes_long() -> None:
    for response in LONG:
        for truth in ("5", "x + 1"):
            started = time.process_time()
            judge(response, truth)
            assert time.process_time() - started < 0.25, response[:20]


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
