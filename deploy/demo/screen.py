"""Prints the demo's output. Only a terminal gets colours. All facts come from the scenes.
"""

import itertools
import os
import sys

COLOURED = sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and "NO_COLOR" not in os.environ
SCENES = itertools.count(1)


def _paint(code, text):
    return f"\033[{code}m{text}\033[0m" if COLOURED else text


def bold(text):
    return _paint("1", text)


def dim(text):
    return _paint("2", text)


def green(text):
    return _paint("32", text)


def red(text):
    return _paint("31", text)


def say(text=""):
    print(text, flush=True)


def scene(title):
    say()
    say(bold(f"{next(SCENES)}. {title}"))


def fact(label, value):
    say(f"   {label:<34} {value}")


def done(text):
    say(f"   {green('✓')} {text}")


def table(header, rows):
    """Prints rows in columns as wide as their longest cell."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row):
        return "   " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()

    say(dim(line(header)))
    for row in rows:
        say(line(row))


def report(text):
    """Prints a doctor's report, with passed checks in green, and warnings and errors in red."""
    paints = {"ok": green, "warning": red, "error": red}
    for line in text.splitlines():
        level, space, rest = line.strip().partition(" ")
        indent = line[:len(line) - len(line.lstrip())]
        say(f"   {indent}{paints.get(level, str)(level)}{space}{rest}")


def milliseconds(seconds):
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
