"""Reads pages with Prometheus' own parsers, and fails if they or stricter parsers refuse a page.

Arguments are files that end in .txt or .om. Needs the package prometheus-client.
"""

import sys

from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client import parser as text


def check_declarations(page):
    """Checks that a family has one HELP and one TYPE line, because the text parser does not check that."""
    seen = set()
    for line in page.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            declared = tuple(line.split(" ")[1:3])
            if declared in seen:
                raise ValueError(f"{line} is there twice")
            seen.add(declared)


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        page = file.read()
    if path.endswith(".om"):
        families = list(openmetrics.text_string_to_metric_families(page))
    else:
        families = list(text.text_string_to_metric_families(page))
        check_declarations(page)
    samples = sum(len(family.samples) for family in families)
    print(f"{path}: {len(families)} families, {samples} samples")


for argument in sys.argv[1:]:
    try:
        read(argument)
    except ValueError as error:
        sys.exit(f"{argument}: {error}")
