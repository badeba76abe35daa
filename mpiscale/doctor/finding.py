"""One line of the doctor's report."""

from __future__ import annotations

from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """What was looked at, what was found, and what to do about it.

    Attributes:
        level: "warning": it runs, but slower or with less; "error": it does not run.
        subject: a word or two, such as "launcher".
        text: the finding.
        advice: what to do; "" where all is well.
    """

    level: Level
    subject: str
    text: str
    advice: str = ""


def many(n: int, noun: str) -> str:
    """1 rank, 2 ranks"""
    return f"{n} {noun}{'s' * (n != 1)}"
