"""Exact match: what of an answer is compared with what of the right one."""

import re
from collections.abc import Callable
from decimal import Context, Decimal

NUMBER, TEXT, _REGEX = "number", "text", "regex:"
# 1,234.5 is one number, 1,2 are two. In 5-3 and 5 - 3 the minus is an operator, not a sign.
_NUMBER = re.compile(r"(?<![0-9.])(?:-\$?|\$-?)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+")


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
