"""Exact match: what of an answer is compared with what of the right one."""

import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

NUMBER, TEXT, _REGEX = "number", "text", "regex:"
# 1,234.5 is one number, 1,2 are two. In 5-3 and 5 - 3 the minus is an operator, not a sign.
_NUMBER = re.compile(r"(?<![0-9.])(?:-\$?|\$-?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")
# The same with an exponent or a denominator. 1/2/2026 is no fraction.
_EXACT = re.compile(rf"(?:{_NUMBER.pattern})(?:[eE][+-]?[0-9]{{1,3}}(?![0-9.]))?(?:/[0-9]+(?:\.[0-9]+)?)*")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_SIGNS = str.maketrans("\N{MINUS SIGN}€£¥", "-$$$")
_LONGEST = 400  # characters of a number that is computed with


def judge_of(name: str) -> Callable[[str], str | None]:
    """What the judge compares of a text; None: the text has no such thing, and is wrong.

    Args:
        name: "number", "text" (all of it, without space around it), or "regex:PATTERN": the last match, or its first
            group.

    Raises:
        ValueError: there is no such judge, or the pattern is wrong.
    """
    if name in (NUMBER, TEXT):
        return extract if name == NUMBER else str.strip
    if not (pattern := name.removeprefix(_REGEX)) or pattern == name:
        raise ValueError(f'must be "{NUMBER}", "{TEXT}" or "{_REGEX}PATTERN"')
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no pattern of Python's re: {error}; correct it") from None

    def last_match(text: str) -> str | None:
        *_, last = [None, *(match[min(expression.groups, 1)] for match in expression.finditer(text))]
        return last

    return last_match


def extract(text: str) -> str | None:
    """The answer in a text: the first number after the last `####`, or the last number if there is no `####`.

    Returns:
        The number in a normal form, without commas, currency sign and superfluous zeros. None: there is no number.
    """
    _, marker, after = text.rpartition("####")
    numbers = _NUMBER.findall(after)  # if there is no marker, `after` is the whole text
    if not numbers:
        return None
    number = re.sub(r"[,$]", "", numbers[0 if marker else -1])
    # Decimal, not float: 0.10 and 0.1 must be equal, and long numbers must keep all their digits.
    normalized = Context(prec=len(number)).normalize(Decimal(number))
    return f"{normalized:f}" if normalized else "0"  # also for -0, which would keep its sign


def exact_value(text: str) -> str | None:
    """The number that `extract` finds, exactly: 3/4, \\frac{3}{4}, 0.75 and 7.5e-1 are one. None: there is none.

    The signs of other currencies and the typographic minus count as $ and -.
    """
    _, marker, after = _LATEX_FRACTION.sub(r"\1/\2", text.translate(_SIGNS)).rpartition("####")
    if not (numbers := _EXACT.findall(after)):
        return None
    parts = re.sub(r"[,$]", "", numbers[0 if marker else -1]).split("/")
    if max(map(len, parts)) > _LONGEST:
        return extract(parts[0]) if len(parts) == 1 else None
    top, bottom = map(Fraction, parts if len(parts) == 2 else (parts[-1], "1"))
    return str(top / bottom) if bottom else None
