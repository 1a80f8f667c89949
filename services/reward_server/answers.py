r"""What a response gives as its answer, and whether that is right, as far as exact arithmetic can tell.

An answer is looked for, in this order, behind the last ``####``, in the last balanced ``\boxed{}``, behind the last
"answer is", in bold on the last line, and as the last number: within the last ``<answer>`` element where there is one
with neither ``####`` nor a box behind it. Whatever is not plain is left UNDECIDED, for math-verify.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from services.reward_server.numbers import Quantity, clean, plain, quantity, time_of_day

# Further from the end than this no answer is looked for, which bounds the time that any response takes.
TAIL = 16_384

_BOX_TOKENS = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]")
_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_HEADING = re.compile(r"\s*(?:step|part|case|method|problem|question|section|explanation|solution)\b", re.IGNORECASE)
_PHRASE = re.compile(r"\banswer\s*(?:is|are|was|would be|equals|:|=|\*\*:|:\*\*)\s*:?", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*\n]*)\*\*")
_DIGIT = re.compile(r"\d", re.ASCII)
# Longer lines are not looked through for a number.
_MAX_LINE = 1000
_NEGATED = re.compile(r"\b(?:not|never|instead of|rather than)\s+\$?-?\d[\d,.]*", re.IGNORECASE)
_NUMBER_TOKEN = re.compile(r"(?<![\w.])-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?![\d])")
_SPACE_BESIDE_SIGNS = re.compile(r"(?<!\w) | (?!\w)")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
# Beside one of these a number is part of something larger.
_PARTS = frozenset("/^*:\\{}_()!+<>|")
# What a number may have before its last digit.
_MAY_GO_ON = frozenset("0123456789.,/")


class Verdict(Enum):
    """Whether an answer is right."""

    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Judgement:
    """A verdict on the answer that was found; ``answer`` is None where none stands out from the response."""

    verdict: Verdict
    answer: str | None


def judge(response: str, ground_truth: str, *, truncated: bool = False) -> Judgement:
    """Judge a response; ``truncated`` says that it was cut at its length limit: an answer at its end is not whole."""
    tail, ground_truth = plain(response[-TAIL:]), plain(ground_truth)
    truth = quantity(ground_truth)
    answer = find_answer(tail, numeric=truth is not None, truncated=truncated)
    if truncated and not _is_whole(answer, tail, numeric=truth is not None):
        return Judgement(Verdict.WRONG, answer)
    if answer is None:
        # Nothing, or no number anywhere: that equals no number.
        if not tail.strip() or (truth is not None and not _DIGIT.search(tail) and "\\" not in tail):
            return Judgement(Verdict.WRONG, None)
        return Judgement(Verdict.UNDECIDED, None)
    return Judgement(compare(answer, ground_truth, truth), answer)


def compare(answer: str, ground_truth: str, truth: Quantity | None) -> Verdict:
    """Compares an answer with the ground truth; ``truth`` is the latter's quantity where it is a plain number."""
    if _same_text(answer, ground_truth):
        return Verdict.RIGHT
    given = quantity(answer)
    if given is not None and truth is not None:
        return Verdict.RIGHT if given.agrees(truth) else Verdict.WRONG
    time_given, time_true = time_of_day(answer), time_of_day(ground_truth)
    if time_given is not None and (time_true is not None or truth is not None):
        # math-verify would read 2:30 as a fifteenth.
        return Verdict.RIGHT if _same_time(time_given, time_true) else Verdict.WRONG
    if truth is not None and (first := _first_number(answer)) is not None:
        return Verdict.RIGHT if first.agrees(truth) else Verdict.WRONG
    return Verdict.UNDECIDED


def find_answer(response: str, *, numeric: bool, truncated: bool = False) -> str | None:
    """The text of the answer that a response gives; ``numeric`` says that a number is expected."""
    tail = response[-TAIL:]
    tagged = _last_tagged(tail, allow_open=not truncated)
    tail = _TAG.sub(_without_end_tag, tail) if tagged is None else tagged
    answer = _after_hashes(tail, numeric)
    if answer is None:
        answer = last_boxed(tail, allow_open=not truncated)
    if answer is None and tagged is not None and "\n" not in tagged:
        return tagged
    if answer is None:
        answer = _after_phrase(tail, numeric)
    if answer is None and numeric:
        answer = _from_last_line(tail)
    return tagged if answer is None else answer


def _is_whole(answer: str | None, text: str, *, numeric: bool) -> bool:
    """Return whether the answer of a text that was cut neither stands in an open element nor could lack digits."""
    if find_answer(text, numeric=numeric) != answer:
        return False
    return text[-1:] not in _MAY_GO_ON or find_answer(text + "1", numeric=numeric, truncated=True) == answer


def _without_end_tag(tag: re.Match[str]) -> str:
    return " " if tag.group().startswith("</") else tag.group()


def _last_tagged(text: str, *, allow_open: bool) -> str | None:
    """Return the content of the last ``<answer>``, with ``allow_open`` even where its end is missing.

    None where it is empty, or where an answer of another form stands behind it. An element within another is part of
    the content of the outer one, which must make sense as a whole.
    """
    opened: list[int] = []
    found, end = None, 0
    for tag in _TAG.finditer(text):
        if not tag.group().startswith("</"):
            opened.append(tag.end())
        elif opened:
            found, end = text[opened.pop() : tag.start()], tag.end()
    # One that was opened before it is only spoken of, as in "I answer in <answer> tags".
    if allow_open and opened and opened[-1] > end:
        found, end = text[opened[-1] :], len(text)
    behind = text[end:]
    if found is None or "####" in behind or "\\boxed" in behind:
        return None
    return _TAG.sub(" ", found).strip() or None


def _after_hashes(text: str, numeric: bool) -> str | None:
    start = text.rfind("####")
    if start < 0:
        return None
    rest = text[start + 4 :].lstrip("# \t")
    line = next((line for line in rest.split("\n", 3)[:3] if line.strip()), "").strip().rstrip("!")
    if not line or _HEADING.match(line):
        return None
    boxed = last_boxed(line, allow_open=True)
    if boxed is not None:
        return boxed
    if numeric and not _DIGIT.search(line):
        return None
    return line


def last_boxed(text: str, *, allow_open: bool = False) -> str | None:
    r"""The content of the last ``\boxed{}`` with balanced braces; with ``allow_open``, else of one never closed."""
    opened: list[int | None] = []
    last: str | None = None
    for token in _BOX_TOKENS.finditer(text):
        kind = token.group()
        if kind.startswith(("\\boxed", "\\fbox")):
            opened.append(token.end())
        elif kind == "{":
            opened.append(None)
        elif kind == "}" and opened:
            start = opened.pop()
            if start is not None:
                last = text[start : token.start()]
    if last is None and allow_open:
        start = next((start for start in opened if start is not None), None)
        if start is not None:
            last = text[start:].split("\n", 1)[0].rstrip("$. ") or None
    return last.strip() if last is not None else None


def _after_phrase(text: str, numeric: bool) -> str | None:
    match = None
    for match in _PHRASE.finditer(text):  # noqa: B007  # the last one is wanted
        pass
    if match is None:
        return None
    line = next((line for line in text[match.end() :].split("\n", 3)[:3] if line.strip(" *$")), "")
    end = _SENTENCE_END.search(line)
    sentence = (line[: end.start()] if end else line).strip()
    if not sentence or (numeric and not _DIGIT.search(sentence)):
        return None
    return sentence


def _from_last_line(text: str) -> str | None:
    """The bold number of the last line with a digit, else its last number, with what belongs to it."""
    line = next((line for line in reversed(text.split("\n")) if _DIGIT.search(line)), None)
    if line is None:
        return None
    line = line[-_MAX_LINE:]
    bold = [found for found in _BOLD.findall(line) if _DIGIT.search(found)]
    if bold:
        return str(bold[-1]).strip()
    cleaned = _NEGATED.sub(" ", clean(line))
    tokens = list(_NUMBER_TOKEN.finditer(cleaned))
    if not tokens:
        return line.strip()
    return cleaned.strip() if (found := _isolated(cleaned, tokens[-1])) is None else found


def _first_number(answer: str) -> Quantity | None:
    """The first number of an answer that says more, such as ``3 apples, not 4``; None where it is part of something."""
    if len(answer) > _MAX_LINE:
        return None
    cleaned = _NEGATED.sub(" ", clean(answer)).rpartition("=")[2]
    tokens = list(_NUMBER_TOKEN.finditer(cleaned))
    if not tokens or any(symbol in cleaned for symbol in "\\^{}"):
        return None
    if len(tokens) > 1 and _is_list(cleaned[tokens[0].end() : tokens[1].start()]):
        return None
    isolated = _isolated(cleaned, tokens[0])
    return None if isolated is None else quantity(isolated)


def _is_list(between: str) -> bool:
    """Whether what stands between two numbers makes them a list, a range or an expression."""
    words = re.findall(r"[A-Za-z]{2,}", between)
    return not words or any(word.lower() in ("and", "or", "to") for word in words)


def _isolated(text: str, token: re.Match[str]) -> str | None:
    """A number with the % or scale behind it; None where its neighbours make it part of an expression."""
    before, after = text[: token.start()].rstrip(), text[token.end() :]
    tight = after[:1]
    if (
        (before and before[-1] in _PARTS - {":", "(", "*"})
        or (tight and tight in _PARTS - {")", "*"})
        or tight.isalpha()
    ):
        return None
    if before.endswith("-") or re.search(r"\d\s*:$", before):
        return None
    behind = re.match(r"\s*(%|percent|hundred|thousand|million|billion|trillion|dozen)\b|\s*%", after)
    return token.group().strip() + (behind.group() if behind else "")


def _same_text(answer: str, ground_truth: str) -> bool:
    return _normal_text(answer) == _normal_text(ground_truth) != ""


def _normal_text(text: str) -> str:
    # Space matters between words and digits only: "2 3" is not 23.
    return _SPACE_BESIDE_SIGNS.sub("", " ".join(text.split())).casefold()


def _same_time(given: tuple[int, int, int, str], truth: tuple[int, int, int, str] | None) -> bool:
    if truth is None:
        return False
    return given[:3] == truth[:3] and (given[3] == truth[3] or "" in (given[3], truth[3]))
