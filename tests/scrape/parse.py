"""Reads pages with Prometheus' own parsers, and complains of what stricter ones refuse.

Arguments are files that end in .txt or .om. Needs the package prometheus-client.
"""

import sys

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client import parser as text

SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("", "_sum", "_count")}


def check_groups(page):
    """A family has one head and its samples in one piece, which the text parser does not check."""
    seen, family, kind = set(), None, None
    for line in page.splitlines():
        if line.startswith("# "):
            name = line.split(" ")[2]
            kind_here = line.split(" ")[3] if line.startswith("# TYPE") else None
            if name == family:
                kind = kind_here or kind
                continue
            kind = kind_here
        else:
            name = line.split("{")[0].split(" ")[0]
            owned = [family + suffix for suffix in SUFFIXES.get(kind, ("",))] if family else []
            if name in owned:
                continue
            kind = None
        if name in seen:
            raise ValueError(f"{name} is there twice")
        seen.add(name)
        family = name


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        page = file.read()
    if path.endswith(".om"):
        families = list(openmetrics.text_string_to_metric_families(page))
    else:
        families = list(text.text_string_to_metric_families(page))
        check_groups(page)
    samples = sum(len(family.samples) for family in families)
    print(f"{path}: {len(families)} families, {samples} samples")


for argument in sys.argv[1:]:
    try:
        read(argument)
    except ValueError as error:
        sys.exit(f"{argument}: {error}")
