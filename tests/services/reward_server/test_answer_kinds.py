"""Pairs of a ground truth and a completion, by kind, with the reward of REWARD_FN=math: R is right, W is wrong."""

# ruff: noqa: RUF001

from __future__ import annotations

from typing import Any

import pytest

from services.protocol.rewards import FinishReason, RewardItem
from services.reward_server import verifier
from services.reward_server.pool import Evaluation
from services.reward_server.scoring import Scorer
from services.reward_server.settings import RewardSettings

R, W = 1.0, 0.0
EQUATIONS = [
    ("3x+4y+14=0", r"\boxed{3x+4y+14=0}", R),
    ("3x+4y+14=0", r"\boxed{4y+3x+14=0}", R),
    ("3x+4y+14=0", r"\boxed{0}", W),
    ("3x+4y+14=0", r"\boxed{x=0}", W),
    ("3x+4y+14=0", r"\boxed{x+y=0}", W),
    ("x^2+y^2=25", "#### x^2-y^2=25", W),
    ("x^2+y^2=25", "#### y^2+x^2=25", R),
    ("x^2+y^2=25", "#### 25", W),
    ("x+y=5", "The answer is 5", W),
    (r"\frac{x+y}{2}=5", r"\boxed{5}", W),
    ("x^2+1=0", r"\boxed{x^2+2=0}", W),
    ("2x+4y-3=0", r"\boxed{y=-\frac{1}{2}x+\frac{3}{4}}", R),
    ("(1+2)*8=24", "#### 24", W),
    ("(1+2)*8=24", "#### (1+2)*8=24", R),
    ("x=5", r"\boxed{5}", R),
    ("x=5", r"\boxed{x = 5}", R),
    ("x=5", r"\boxed{3x = 5}", W),
    ("y=5", r"\boxed{x=5}", W),
    ("5", r"\boxed{x=5}", R),
    ("f(2) = 5", "#### 5", R),
    (r"\angle ABC = 40", "#### 40 degrees", R),
    ("The total = $5", "#### 5", R),
    ("8", "The answer is 5 + 3 = 8 apples.", R),
    ("7", r"\boxed{a+b=7}", R),
    ("y=2x+1", r"\boxed{2x+1}", R),
    (r"S_n=\frac{n(n+1)}{2}", r"\boxed{\frac{n^2+n}{2}}", R),
    ("f'(x)", r"\boxed{f(x)}", W),
    ("f''(x)", r"\boxed{f'(x)}", W),
    ("f'(x)", r"\boxed{f′(x)}", R),
    ("x >= 5", r"\boxed{5}", W),
    ("x >= 5", r"\boxed{x <= 5}", W),
    ("x >= 5", r"\boxed{5 \leq x}", R),
    ("5", r"\boxed{x \geq 5}", W),
    ("5", r"\boxed{x ≤ 5}", W),
    ("-5", r"\boxed{x = 5 \text{ or } x = -5}", W),
    ("-5", "The answer is x = 5, x = -5.", W),
    (r"x = 5 \text{ or } x = -5", r"\boxed{x = -5, x = 5}", R),
    ("6", "The answer is x = 2, so 3x = 6.", R),
]
UNREADABLE = [
    (r"1-\frac{1}{\mathrm{e}}", r"\boxed{1}", W),
    (r"1-\frac{1}{\mathrm{e}}", r"\boxed{1-e^{-1}}", R),
    (r"1-\frac{1}{\mathrm{e}}", r"\boxed{1+\frac{1}{\mathrm{e}}}", W),
    (r"2+\mathrm{i}", r"\boxed{2+i}", R),
    ("7", r"\boxed{7\foo{2}}", W),
    (r"7\foo{2}", r"\boxed{7}", W),
    (r"7\foo{2}", r"\boxed{7\foo{2}}", R),
    (r"7\foo\frac{1}{2}", r"\boxed{\frac{1}{2}}", W),
    (r"1, 2, \ldots, n", r"\boxed{1, 3, 5, \ldots, 2n-1}", W),
    (r"1,2,\ldots,n", r"\boxed{1,2,n}", W),
    (r"1, 2, \ldots, n", r"\boxed{1,2,\dots,n}", R),
    ("1, 2, ..., n", "The answer is $1, 2, \\ldots, n$.", R),
    (r"\sqrt{2", r"\boxed{2}", W),
    ("2", r"\boxed{\sqrt[}2]", W),
    (r"\begin{cases} 3 & x>0 \end{cases}", r"\boxed{3}", W),
    ("2ab", r"\boxed{2}", W),
    ("3t", r"\boxed{3}", W),
    ("-16t^2+64t", r"\boxed{-16t^2+64}", W),
    (r"\text{max}+\frac{1}{2}\text{min}", r"\boxed{\text{max}}", W),
    ("x+1", "So we get $x+1$.", R),
    ("x+1", "So we get $x+2$.", W),
    ("0.75", "So x is 3/4 of it.", R),
]
DIFFERENCES = [
    (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", W),
    ("1/2^{99}", r"\boxed{2^{-99}}", R),
    ("1/2^{50}", r"\boxed{2^{-50}}", R),
    ("1/2^{50}", r"\boxed{2^{-51}}", W),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", W),
    (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\boxed{\frac{1}{3 \cdot 2^{2006}}}", W),
    (r"\frac{x}{10^{20}}", r"\boxed{\frac{2x}{10^{20}}}", W),
    (r"\frac{x}{10^{20}}", r"\boxed{10^{-20}x}", R),
    (r"1.5 \times 10^{-8}", r"\boxed{0.000000016}", W),
    (r"1.5 \times 10^{-8}", r"\boxed{15 \cdot 10^{-9}}", R),
    (r"6.63 \times 10^{-34}", r"\boxed{6.64 \times 10^{-34}}", W),
    (r"6.63 \times 10^{-34}", r"\boxed{6.63 \cdot 10^{-34}}", R),
    (r"\{2^{-99}, 1\}", r"\boxed{\{2^{-98}, 1\}}", W),
    ("10^{50}", r"\boxed{10^{50}+1}", W),
    (r"10^{40}\sqrt{2}", r"\boxed{\sqrt{2 \cdot 10^{80}}}", R),
    (r"\frac{\sqrt{2}}{1000}", r"\boxed{0.001414}", R),
    (r"\frac{\pi}{3}", r"\boxed{1.047198}", R),
    (r"\frac{\pi}{3}", r"\boxed{1.05}", W),
]
LAST = [
    ("71", "#### 72\nNo, it is \\boxed{71}", R),
    ("72", "#### 72\nNo, it is \\boxed{71}", W),
    ("71", "\\boxed{72}, or rather\n#### 71", R),
    ("41", r"\boxed{42}? No, the answer is 41.", R),
    ("42", r"\boxed{42}? No, the answer is 41.", W),
    ("42", r"The answer is 41, no, \boxed{42}", R),
    ("42", r"\boxed{42}. This answer is correct because 6 < 9.", R),
    ("7", r"\boxed{7}. The answer is less than 10, as it must be.", R),
    ("x+1", r"\boxed{x+1}. The answer is in simplest form.", R),
    ("x+1", r"\boxed{x+1}. The answer is x+1, as desired.", R),
    ("x+2", r"\boxed{x+1}. No, the answer is x+2.", R),
    ("Paris", r"\boxed{London}. Sorry, the answer is Paris.", R),
    ("72", "#### 2. Compute\n6 * 12, which is \\boxed{72}", R),
    ("4", "<answer>3</answer> Wait, the answer is 4.", R),
    ("3", "<answer>3</answer>. My answer is correct.", R),
    ("5", r"\boxed{4} and \boxed{5", R),
    ("4", r"\boxed{4} and \boxed{5", W),
    ("3", r"\boxed{x + \boxed{3}", R),
    ("6", "\\boxed{5\nor \\boxed{6", R),
    ("72", "\\boxed{\n72", R),
    ("41", r"<think>maybe \boxed{42}</think> The answer is 41", R),
    ("42", r"<think>maybe \boxed{42}</think> The answer is 41", W),
    ("41", r"maybe \boxed{42}</think> I would say 41.", R),
    ("42", r"<think>It is \boxed{42}", W),
    ("42", r"<think>hm</think>\boxed{42}<think>It is \boxed{42}", W),
    ("42", r"<think>It is \boxed{42}</think>", W),
    ("x+1", "<think>$x+1$</think> I do not know", W),
    ("42", "<think>#### 41</think>a<think>#### 40</think>#### 42", R),
    ("42", "<thinking>#### 41</thinking> So 42", R),
    ("42", "[THINK]#### 41[/THINK] So 42", R),
    ("42", r"<think>" + "hm " * 9000 + r"\boxed{42}", W),
]
MARKDOWN = [
    ("A", "The answer is **A**", R),
    ("A", "The answer is **A**.", R),
    ("A", "The answer is **A.**", R),
    ("A", "The answer is **B**", W),
    ("A", "The answer is *A*", R),
    ("A", "The answer is `A`", R),
    ("A", "The answer is __A__.", R),
    ("A", "The answer is ***A***", R),
    ("A", "**Answer:** A", R),
    ("A", "**Answer**: **A**", R),
    ("A", "<answer>**A**</answer>", R),
    ("A", r"\boxed{**A**}", R),
    ("Paris", "The answer is **Paris**, the capital of France.", R),
    ("Paris", "#### **Paris**", R),
    ("Paris", "The answer is **London**, not **Paris**.", W),
    ("Paris and Rome", "The answer is **Paris** and **Rome**.", R),
    ("x+1", "The answer is **x+1**.", R),
    ("x+1", "The answer is **$x+1$**.", R),
    ("5", "The answer is *5*.", R),
    ("5000000", "The answer is **5** million.", R),
    ("8", r"\boxed{2**3}", R),
    ("23", r"\boxed{2**3}", W),
    ("2", r"\boxed{2**3}", W),
    ("x**2", r"\boxed{x2}", W),
]
SYMBOLS = [
    (r"\sqrt{2}", r"\boxed{√2}", R),
    (r"\sqrt{2}", "The answer is √2.", R),
    (r"\sqrt{2}", r"\boxed{2}", W),
    (r"\sqrt{x+1}", r"\boxed{√(x+1)}", R),
    (r"2\sqrt{3}", r"\boxed{2√3}", R),
    ("2", r"\boxed{2√3}", W),
    ("4", r"\boxed{√16}", R),
    ("16", r"\boxed{√16}", W),
    ("√2", r"\boxed{\sqrt{2}}", R),
    ("3", r"\boxed{∛27}", R),
    (r"\infty", r"\boxed{∞}", R),
    ("∞", r"\boxed{\infty}", R),
    (r"(-\infty, 3]", r"\boxed{(−∞, 3]}", R),
    ("3", r"\boxed{(3, ∞)}", W),
    (r"\emptyset", r"\boxed{∅}", R),
    (r"\emptyset", r"\boxed{\varnothing}", R),
    (r"\varnothing", r"\boxed{\{\}}", R),
    (r"\{ \}", r"\boxed{\emptyset}", R),
    (r"\emptyset", r"\boxed{\{0\}}", W),
    ("x^2+1", r"\boxed{x²+1}", R),
    ("x^3", r"\boxed{x²}", W),
    ("100", r"\boxed{10²}", R),
    ("10", r"\boxed{10²}", W),
    ("10^{-3}", r"\boxed{10⁻³}", R),
    ("72", "The area is 72 cm².", R),
    ("x_1+x_2", r"\boxed{x₁+x₂}", R),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{(-∞,1) ∪ (2,∞)}", R),
    (r"[0,1]\cap[1,2]", r"\boxed{[0,1] ∩ [1,2]}", R),
    (r"x \in [0,1]", r"\boxed{x ∈ [0,1]}", R),
    (r"\frac{\pi}{2}", r"\boxed{π⁄2}", R),
    (r"90^\circ", r"\boxed{90°}", R),
    (r"\theta+1", r"\boxed{θ+1}", R),
    (r"2\alpha\beta", r"\boxed{2αβ}", R),
    (r"\Delta", r"\boxed{Δ}", R),
    (r"-\sqrt{2}", r"\boxed{−√2}", R),
    ("6xy", r"\boxed{6x·y}", R),
    (r"x \neq 3", r"\boxed{x ≠ 3}", R),
    (r"x \neq 3", r"\boxed{x ≠ 4}", W),
    (r"1 \pm \sqrt{5}", r"\boxed{1 ± √5}", R),
    ("5", r"\boxed{±5}", W),
    (r"\mathbb{R}", r"\boxed{ℝ}", R),
    (r"x \leq 2", r"\boxed{x ≤ 2}", R),
    (r"\frac{1}{2}", r"\boxed{½}", R),
    ("2x", r"\boxed{２ｘ}", R),
]
UNITS = [
    ("1000.99", "So it is 10, which is 1,000.99m².", R),
    ("70000", "It costs 70k.", R),
    ("x+1", r"\boxed{The answer is x+1.}", R),
    ("x+1", r"\boxed{#### x+1}", R),
    (r"0.\overline{3}", r"Thus $0.\overline{3}$.", R),
    (r"\frac{3}{4}", "\\(\\boxed{\\frac{3}{4}}\\)\n\n**Answer:** 3/4 of the cake", R),
    (r"2\sqrt{3}", r"\boxed{2\sqrt{3}\text{ cm}}", R),
    (r"5\pi", r"\boxed{5\pi \text{ cm}^2}", R),
    (r"5\pi", "The answer is $5\\pi$ square meters.", R),
    (r"5\sqrt{2} m", r"\boxed{5\sqrt{2}}", R),
    (r"\frac{3\sqrt{2}}{4}", r"\boxed{\frac{3\sqrt{2}}{4} cups of flour}", R),
    (r"2x", r"\boxed{2}", W),
    ("n \\text{ is even}", r"\boxed{n \text{ is odd}}", W),
    ("204_5", r"\boxed{204_5}", R),
    ("(3, 4)", r"\boxed{(3,4)}", R),
    (r"\{1,2\}", "The answer is \\(1\\) and \\(2\\).", R),
    (r"\text{B}", "#### B", R),
    ("12:00", "#### 12:00", R),
]
KINDS = {
    "equations": EQUATIONS,
    "unreadable": UNREADABLE,
    "differences": DIFFERENCES,
    "last": LAST,
    "markdown": MARKDOWN,
    "symbols": SYMBOLS,
    "units": UNITS,
}


class InProcess:
    """Stands for the pool of workers."""

    async def evaluate(self, function: str, item: dict[str, Any]) -> Evaluation:
        return Evaluation(float(verifier.is_equal(item["answer"], item["ground_truth"])))


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_are_judged_as_a_person_would(kind: str) -> None:
    scorer = Scorer(RewardSettings(reward_fn="math"), InProcess())  # type: ignore[arg-type]
    rows = KINDS[kind]
    items = [
        RewardItem(prompt="q", response=response, ground_truth=truth, finish_reason=FinishReason.STOP)
        for truth, response, _ in rows
    ]
    found = await scorer.score(items)
    assert [row for row, result in zip(rows, found, strict=True) if result.reward != row[2]] == []
