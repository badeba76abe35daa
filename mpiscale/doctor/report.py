"""The findings as text: a line each, advice below what is not well."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from mpiscale.doctor.finding import Finding, many

COLOURS = {"ok": "\033[32m", "warning": "\033[33m", "error": "\033[31m"}
RESET = "\033[0m"
INDENT = 26
WIDTH = 96


def report(findings: Sequence[Finding], colour: bool) -> str:
    """All lines and a summary.

    colour: whether it goes to a terminal.
    """
    lines = []
    for level, subject, text, advice in findings:
        mark = f"{COLOURS[level]}{level:<8}{RESET}" if colour else f"{level:<8}"
        first, *rest = textwrap.wrap(text, WIDTH - INDENT)
        lines.append(f"{mark}  {subject:<16}{first}")
        lines += [" " * INDENT + line for line in rest]
        wrapped = textwrap.wrap(advice, WIDTH - INDENT - 3)
        for arrow, line in zip(["-> ", *["   "] * len(wrapped)], wrapped, strict=False):
            lines.append(" " * INDENT + arrow + line)
    return "\n".join([*lines, "", summary(findings)])


def summary(findings: Sequence[Finding]) -> str:
    """How it stands, in one line."""
    counts = Counter(finding.level for finding in findings)
    if counts["error"]:
        return f"{many(counts['error'], 'error')}: it will not run well like this"
    if counts["warning"]:
        return f"{many(counts['warning'], 'warning')}: it runs, but could run better"
    return "all is well"


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if there is an error, else 0."""
    return int(any(finding.level == "error" for finding in findings))
