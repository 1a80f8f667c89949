r"""Finds the answer in a response, and judges it as far as exact arithmetic can.

The answer is the last one in the text that stands behind ``####``, in ``\boxed{}`` or behind "answer is". Without one
it is in bold on the last line, or the last number. The search is limited to what follows the model's thoughts, and to
the last ``<answer>`` element unless an answer of another form stands behind it. An answer that is not a plain number is
left undecided, for math-verify.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.core.numbers import Quantity, clean, plain, quantity, right_side, time_of_day
from services.protocol.ground_truths import find_box

TAIL = 16_384
"""Characters at a response's end in which an answer is looked for, which bounds the time that any response takes."""

_THOUGHTS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"), ("◁think▷", "◁/think▷"))
_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_END_TAG = re.compile(r"</answer>", re.IGNORECASE)
_HEADING = re.compile(r"\s*(?:step|part|case|method|problem|question|section|explanation|solution)\b", re.IGNORECASE)
_PHRASE = re.compile(
    r"\banswer[*_`]{0,3}\s*(?:is|are|was|would be|equals|:|=)\s*:?(?:[*_`]{1,3}(?=\s))?", re.IGNORECASE
)
_IS_ANSWER = re.compile(r"[\s*_`$(\[{]*(?:[-+−]?[\d.\\√]|[A-Z]|[b-z]\b)")  # noqa: RUF001  # a minus sign
"""The beginning of an answer, unlike that of a comment on an answer: "correct", "in simplest form", "a fraction"."""
_GOES_ON = re.compile(r"\s*(?:[-+*/^=(\\{\d]|[a-z]\b)")
_EMPHASIS = re.compile(r"(\*{1,3}|_{1,3}|`{1,3})(?=[^\s*_`])((?:(?!\1).)+)\1(?=\s*(?:[,;:.!(]|$))", re.DOTALL)
_BOLD = re.compile(r"\*\*([^*\n]*)\*\*")
_DIGIT = re.compile(r"\d", re.ASCII)
_MARKS = re.compile(r"(?<!\w)(?:\*\*|`)(?=\S)|(?<=\S)(?:\*\*|`)(?!\w)")
_VARIABLE = re.compile(r"\W*([A-Za-z])\s*=")
_MAX_LINE = 1000
"""Characters of a line in which a number is looked for."""
_NEGATED = re.compile(r"\b(?:not|never|instead of|rather than)\s+\$?-?\d[\d,.]*", re.IGNORECASE)
_NUMBER_TOKEN = re.compile(r"(?<![\w.])-?(?:(?:\d[\d,]* )?\d+ ?/ ?\d+(?![.\d/])|\d[\d,]*(?:\.\d+)?|\.\d+)(?![\d])")
_SPACE_BESIDE_SIGNS = re.compile(r"(?<!\w) | (?!\w)")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")
_BEFORE, _BEHIND = frozenset("-/^\\{}_)!+<>|√∛±≤≥≠"), frozenset("/^:\\{}_(!+<>|√∛⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ")
"""A number behind or before one of these characters is part of an expression."""
_MAY_CONTINUE = frozenset("0123456789.,/")
"""A number may continue after one of these characters."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on an answer, None for math-verify to decide; ``answer`` is None where none stands out."""

    is_right: bool | None
    answer: str | None


def judge(response: str, ground_truth: str, *, truncated: bool = False) -> Judgement:
    """Judge a response. Of a ``truncated`` response, cut at its length limit, an answer at the end is incomplete."""
    tail, ground_truth = plain(behind_thoughts(response)[-TAIL:]), plain(ground_truth)
    truth = quantity(ground_truth)
    answer = find_answer(tail, numeric=truth is not None, truncated=truncated)
    if truncated and not _is_whole(answer, tail, numeric=truth is not None):
        return Judgement(False, answer)
    if answer is None:
        # An empty response is wrong, and so is a response without a digit where the truth is a number.
        if not tail.strip() or (truth is not None and not _DIGIT.search(tail) and "\\" not in tail):
            return Judgement(False, None)
        return Judgement(None, None)
    return Judgement(compare(answer, ground_truth, truth), answer)


def compare(answer: str, ground_truth: str, truth: Quantity | None) -> bool | None:
    """Return whether an answer is the ground truth, whose quantity is ``truth`` where it is a plain number.

    None means that math-verify must decide.
    """
    if normal_text(answer) == normal_text(ground_truth) != "":
        return True
    named = "=" in ground_truth
    if len({match[1].lower() for text in (answer, ground_truth) if (match := _VARIABLE.match(text))}) > 1:
        return None
    answered = quantity(answer, named=named)
    if answered is not None and truth is not None:
        return answered.agrees(truth)
    time, true_time = time_of_day(answer), time_of_day(ground_truth)
    # math-verify would read 2:30 as a fifteenth.
    if time is not None and true_time is not None:
        return time[:3] == true_time[:3] and (time[3] == true_time[3] or "" in (time[3], true_time[3]))
    if time is not None and truth is not None:
        return False
    if truth is not None and (first := _first_number(answer, named=named)) is not None:
        return first.agrees(truth)
    return None


def behind_thoughts(response: str) -> str:
    """Return what follows the last thought, which the prompt may have opened; nothing where one is still open."""
    for opening, closing in _THOUGHTS:
        response = response.rpartition(closing)[2]
        if opening in response:
            return ""
    return response


def find_answer(response: str, *, numeric: bool, truncated: bool = False) -> str | None:
    """Return the text of a response's answer; ``numeric`` where a number is expected."""
    tail = response[-TAIL:]
    tagged = _last_tagged(tail, allow_open=not truncated)
    tail = _END_TAG.sub(" ", tail) if tagged is None else tagged
    boxed, hashed = find_box(tail, allow_open=not truncated), _after_hashes(tail, numeric)
    end, answer = hashed if hashed[0] > boxed[0] else boxed
    searched = tagged is None or "\n" in tagged
    if answer is not None or searched:
        said = _after_phrase(tail[end:], numeric)
        if answer is None or (said is not None and _replaces(said, answer, numeric)):
            answer = said
    if answer is None and numeric and searched:
        answer = _from_last_line(tail)
    if (answer := tagged if answer is None else answer.lstrip("# ")) is None:
        return None
    if (said := _after_phrase(answer, numeric)) is not None and said.count("{") == said.count("}"):
        answer = said
    emphasis = _EMPHASIS.fullmatch(answer) if numeric else _EMPHASIS.match(answer)
    return answer if emphasis is None else emphasis[2]


def find_tagged(response: str, *, truncated: bool) -> str | None:
    """Return the content of the last ``<answer>`` element, as reasoning-gym asks for it, else the last line with text.

    A ``truncated`` response has an answer only in an element. An answer of several lines needs an element.
    """
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        return response[start + len("<answer>") : end].strip() or None
    if truncated:
        return None
    return next((line.strip() for line in reversed(response.splitlines()) if line.strip()), None)


def normal_text(text: str) -> str:
    """Return a form of a text that is the same for texts that differ in case, spaces and Markdown only."""
    # A space matters only between words and digits: "2 3" is not 23.
    text = " ".join(_MARKS.sub("", text).split()).rstrip(". ")
    return _SPACE_BESIDE_SIGNS.sub("", text).casefold()


def _is_whole(answer: str | None, text: str, *, numeric: bool) -> bool:
    """Return whether the answer of a truncated text is complete: in no open element or box, and without more digits."""
    if find_answer(text, numeric=numeric) != answer:
        return False
    return text[-1:] not in _MAY_CONTINUE or find_answer(text + "1", numeric=numeric, truncated=True) == answer


def _last_tagged(text: str, *, allow_open: bool) -> str | None:
    """Return the content of the last ``<answer>`` element, with ``allow_open`` even where its end tag is missing.

    The result is None where the element is empty, or an answer of another form stands behind it. An inner element is
    part of the outer element's content, which must make sense as a whole.
    """
    opened: list[int] = []
    content, end = None, 0
    for tag in _TAG.finditer(text):
        if not tag.group().startswith("</"):
            opened.append(tag.end())
        elif opened:
            content, end = text[opened.pop() : tag.start()], tag.end()
    # An open tag before the last element is only mentioned, as in "I answer in <answer> tags".
    if allow_open and opened and opened[-1] > end:
        content, end = text[opened[-1] :], len(text)
    behind = text[end:]
    if content is None or "####" in behind or "\\boxed" in behind:
        return None
    if (said := _after_phrase(behind, numeric=False)) is not None and _replaces(said, content, numeric=False):
        return None
    return _TAG.sub(" ", content).strip() or None


def _after_hashes(text: str, numeric: bool) -> tuple[int, str | None]:
    """Return the end and the text of the answer behind the last ``####``; (0, None) without one."""
    start = text.rfind("####")
    if start < 0:
        return 0, None
    rest = text[start + 4 :].lstrip("# \t")
    line = next((line for line in rest.split("\n", 3)[:3] if line.strip()), "").strip()
    end, line = text.find(line, start) + len(line), line.rstrip("!")
    if not line or _HEADING.match(line):
        return 0, None
    boxed = find_box(line, allow_open=True)[1]
    if boxed is None and (_DIGIT.search(line) or not numeric):
        return end, line
    return (0, None) if boxed is None else (end, boxed)


def _after_phrase(text: str, numeric: bool) -> str | None:
    ends = [match.end() for match in _PHRASE.finditer(text)]
    if not ends:
        return None
    line = next((line for line in text[ends[-1] :].split("\n", 3)[:3] if line.strip(" *$")), "")
    end = _SENTENCE_END.search(line)
    sentence = (line[: end.start()] if end else line).strip()
    if not sentence or (numeric and not _DIGIT.search(sentence)):
        return None
    return sentence


def _from_last_line(text: str) -> str | None:
    """Return the bold number of the last line with a digit, else its last number, with percent sign or scale."""
    line = next((line for line in reversed(text.split("\n")) if _DIGIT.search(line)), None)
    if line is None:
        return None
    line = line[-_MAX_LINE:]
    bold = [text for text in _BOLD.findall(line) if _DIGIT.search(text)]
    if bold:
        return str(bold[-1]).strip()
    cleaned = _NEGATED.sub(" ", clean(line))
    tokens = list(_NUMBER_TOKEN.finditer(cleaned))
    if not tokens:
        return line.strip()
    return cleaned.strip() if (number := _isolated(cleaned, tokens[-1])) is None else number


def _replaces(said: str, answer: str, numeric: bool) -> bool:
    """Return whether the sentence ``said`` behind an answer is another answer, not a comment or a repetition."""
    if not _IS_ANSWER.match(said):
        return False
    said, answer = said.replace("$", "").strip(" *`"), answer.replace("$", "")
    return numeric or not said.startswith(answer) or _GOES_ON.match(said[len(answer) :]) is not None


def _first_number(answer: str, *, named: bool) -> Quantity | None:
    """Return the first number of a longer answer such as ``3 apples, not 4``; None if part of an expression."""
    if len(answer) > _MAX_LINE:
        return None
    cleaned = right_side(_NEGATED.sub(" ", clean(answer)), named=named)
    tokens = list(_NUMBER_TOKEN.finditer(cleaned))
    if not tokens or any(symbol in cleaned for symbol in "\\^{}∞"):
        return None
    if len(tokens) > 1 and _is_list(cleaned[tokens[0].end() : tokens[1].start()]):
        return None
    isolated = _isolated(cleaned, tokens[0])
    return None if isolated is None else quantity(isolated)


def _is_list(between: str) -> bool:
    """Return whether the text between two numbers makes them a list, a range or an expression."""
    words = re.findall(r"[A-Za-z]{2,}", between)
    return not words or any(word.lower() in ("and", "or", "to") for word in words)


def _isolated(text: str, token: re.Match[str]) -> str | None:
    """Return a number with the % or scale behind it; None where its neighbours make it part of an expression."""
    before, after = text[: token.start()].rstrip(), text[token.end() :]
    tight = after[:1]
    if before[-1:] in _BEFORE or tight in _BEHIND or re.search(r"\d\s*:$", before):
        return None
    attached = quantity(token.group() + word.group()) if (word := re.match("[A-Za-z]+", after)) else None
    if tight.isalpha() and (attached is None or attached.factor is not None):
        return None
    behind = re.match(r"\s*(%|percent|hundred|thousand|million|billion|trillion|dozen)\b|\s*%", after)
    return token.group().strip() + (behind.group() if behind else "")
