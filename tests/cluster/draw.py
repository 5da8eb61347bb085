"""Draws the pictures of a comparison from its page: draw.py docs/comparison.md docs [--check]

With --check it writes nothing, and exits with 1 if a picture does not have the figures of the page. The check does not
need matplotlib.
"""

import html
import pathlib
import re
import sys

GO, OURS, ON_DEMAND = NAMES = ("pilot-agent", "istio-agent", "istio-agent with clusters on demand")
# Near Okabe's and Ito's, which colour-blind people can tell apart, with contrast on white and on black.
COLOURS = {GO: "#d55e00", OURS: "#1f83c9", ON_DEMAND: "#009e73"}
MARKERS = {GO: "s", OURS: "o", ON_DEMAND: "D"}
GREY = "#80808080"
# Browsers use the colours of the system, not of the page, in a picture: it needs its own background.
STYLE = """<style>
 #ground path { fill: #ffffff !important } text { fill: #1f2328 !important }
 @media (prefers-color-scheme: dark) { #ground path { fill: #161b22 !important } text { fill: #e6edf3 !important } }
</style>"""
PICTURES = {
    "memory": ("comparison-memory.svg", "Memory of the sidecar container, Envoy included, over the number of hosts"),
    "processor": ("comparison-changes.svg", "CPU time while 1,000 of 3,000 hosts change 30 times"),
    "faults": ("comparison-failures.svg", "Requests that fail while Envoy is killed, or a sidecar is upgraded in place"),
    "times": ("comparison-times.svg", "Times from istiod's return, from a valid token, and from the start of the agent"),
}
UPGRADE = "A sidecar is upgraded in place, and its application continues."


class Missing(Exception):
    """A row that the page does not have, or not with figures."""


def figures(page):
    """Returns the figures of each picture: its series by name, of lists of a label and one or more numbers."""
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) > 2:
            rows[cells[0]] = {GO: cells[1], OURS: cells[2]}

    def row(what, unit, series):
        """Returns the numbers of a row: a median, and the lowest and the highest value if it was measured repeatedly."""
        name = f"{what}, {unit}" if series != ON_DEMAND else f"{what}, {ON_DEMAND}, {unit}"
        cell = rows.get(name, {}).get(GO if series == GO else OURS, "")
        numbers = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,.]*", cell)]
        if not numbers:
            raise Missing(name)
        return numbers

    def failed(what, series):
        """Returns the failed and the sent requests of each client."""
        found = re.findall(r"(\d+) of (\d+) requests", rows.get(what, {}).get(series, ""))
        if not found:
            raise Missing(what)
        return [[int(one), int(of)] for one, of in found]

    hosts = [(0, "at rest"), *((count, f"with {count:,} ServiceEntry hosts") for count in (1000, 3000, 10000))]
    yield "memory", lambda: {
        # The mode of a pod without hosts is not measured.
        name: [(count, row(f"working set {when}", "MB", name)) for count, when in hosts if count or name != ON_DEMAND] for name in NAMES}
    some = "1,000 of 3,000 hosts"
    changes = [("endpoints", f"of the endpoints of {some}"), ("endpoints,\nand all clusters", f"of the endpoints of {some} and of all clusters"),
               ("ports", f"of the port of {some}")]
    yield "processor", lambda: {
        name: [(label, row(f"30 changes {what}, Envoy included", "ms", name) + row(f"30 changes {what}", "ms", name)) for label, what in changes]
        for name in NAMES}
    yield "faults", lambda: {
        name: [("Envoy is killed", failed("Envoy killed in a pod, under load", name)[0]),
               *zip(("upgrade in place,\nclient with istio-agent", "upgrade in place,\nclient with pilot-agent"), failed(UPGRADE, name))]
        for name in (GO, OURS)}
    times = [("istiod's return until new\nconfiguration in Envoy", "time from istiod recovery to new configuration in Envoy", "s"),
             ("a valid token until a certificate", "time from a valid token to a certificate, after 20 s with an expired token", "s"),
             ("start until Envoy is ready", "time until Envoy is ready", "ms"),
             ("start until the first certificate", "time until the first certificate", "ms"),
             ("setting up traffic capture", "time to set up traffic capture with iptables", "ms")]
    yield "times", lambda: {
        name: [(label, [number / (1e3 if unit == "ms" else 1) for number in row(what, unit, name)]) for label, what, unit in times]
        for name in (GO, OURS)}


def description(series):
    """Returns the figures of a picture in words, for screen readers and for the check."""
    return ". ".join(
        f"{name}: " + "; ".join(f"{' '.join(str(label).split())} {', '.join(f'{number:g}' for number in numbers)}" for label, numbers in points)
        for name, points in series.items()) + "."


def memory(plot, series):
    figure, axes = plot.subplots(figsize=(7.5, 3.9))
    for name, points in series.items():
        counts, held = [count for count, _ in points], [numbers[0] for _, numbers in points]
        axes.plot(counts, held, color=COLOURS[name], marker=MARKERS[name], markersize=5, linewidth=2, label=name, clip_on=False)
        # The lines of both agents end close together.
        axes.annotate(f"{held[-1]:,.0f} MB", (counts[-1], held[-1]), (9, {GO: 4, OURS: -4}.get(name, 0)), textcoords="offset points", va="center")
    axes.set(xlim=(0, 10000), ylim=(0, None), xticks=[0, 1000, 3000, 10000], xlabel="hosts that the workload does not call, with ten endpoints each")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f} MB")
    axes.grid(axis="y")
    return figure, [axes], axes.get_legend_handles_labels()


def bars(axes, series, width_of, label_of):
    height = 0.8 / len(series)
    for position, (name, points) in enumerate(series.items()):
        places = [number + (position - (len(series) - 1) / 2) * height for number in range(len(points))]
        axes.barh(places, [width_of(numbers) for _, numbers in points], height * 0.86, color=COLOURS[name], label=name)
        for place, (_, numbers) in zip(places, points):
            axes.annotate(label_of(numbers), (width_of(numbers), place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    labels = [label for label, _ in series[GO]]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    # The numbers beside the bars need place.
    axes.set_xlim(0, 1.25 * max(width_of(numbers) for points in series.values() for _, numbers in points))
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x")


def changes(plot, series):
    figure, both = plot.subplots(1, 2, figsize=(7.5, 3.9), sharey=True)
    for position, (axes, title) in enumerate(zip(both, ("agent and Envoy", "agent alone"))):
        # 7.85 is rounded to 7.9, as on the pages.
        seconds = lambda numbers: numbers[position] / 1e3 + 1e-9
        bars(axes, series, seconds, lambda numbers: f"{seconds(numbers):.{1 + position}f} s")
        axes.set_title(title)
        axes.xaxis.set_major_formatter("{x:g} s")
    both[1].tick_params(labelleft=False)
    return figure, both, both[0].get_legend_handles_labels()


def failures(plot, series):
    figure, axes = plot.subplots(figsize=(7.5, 3.1))
    bars(axes, series, lambda numbers: 100 * numbers[0] / numbers[1], lambda numbers: f"{numbers[0]:,} of {numbers[1]:,}")
    axes.set_xlabel("share of failed requests under load; colour: agent of the affected sidecar")
    axes.xaxis.set_major_formatter("{x:g} %")
    return figure, [axes], axes.get_legend_handles_labels()


def times(plot, series):
    figure, axes = plot.subplots(figsize=(7.5, 5))
    for position, (name, points) in enumerate(series.items()):
        for number, (_, (median, least, most)) in enumerate(points):
            place = number + (position - 0.5) * 0.46
            axes.plot([least, most], [place, place], color=COLOURS[name], linewidth=2.5, alpha=0.8, solid_capstyle="round")
            axes.plot([median], [place], color=COLOURS[name], marker=MARKERS[name], markersize=7, linestyle="", label=name if not number else None)
            axes.annotate(f"{median:.2g} s" if median >= 1 else f"{1e3 * median:.0f} ms", (median, place), (0, 5),
                          textcoords="offset points", ha="center", va="bottom", fontsize=8)
    labels = [label for label, _ in series[GO]]
    every = [number for points in series.values() for _, numbers in points for number in numbers]
    axes.set(xscale="log", xlim=(min(every) / 2, max(every) * 3), xlabel="median and range, on a logarithmic scale; less is better")
    axes.xaxis.set_major_formatter(lambda number, _: f"{number:g} s" if number >= 1 else f"{1e3 * number:g} ms")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.minorticks_off()
    axes.grid(axis="x")
    return figure, [axes], axes.get_legend_handles_labels()


def draw(key, series, file, title):
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    pyplot.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "istio-agent", "font.size": 10, "font.family": ["DejaVu Sans"], "axes.titlesize": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": GREY, "axes.axisbelow": True,
        "grid.color": GREY, "grid.linewidth": 0.6, "xtick.color": GREY, "xtick.labelcolor": "black", "ytick.left": False})
    figure, every, legend = {"memory": memory, "processor": changes, "faults": failures, "times": times}[key](pyplot, series)
    figure.legend(*legend, loc="upper left", bbox_to_anchor=(0, 1 - 0.28 / figure.get_figheight()), ncols=3, frameon=False,
                  borderaxespad=0.4, handlelength=1.4, columnspacing=1.6)
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold")
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
    figure.patch.set_gid("ground")
    for axes in every:
        axes.patch.set_visible(False)
    figure.savefig(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    pyplot.close(figure)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", file.read_text().replace("'DejaVu Sans'", "'DejaVu Sans', sans-serif"))
    head = f"<title>{html.escape(title)}</title>\n<desc>{html.escape(description(series))}</desc>\n{STYLE}\n"
    file.write_text(re.sub(r"(<svg [^>]*>\n)", lambda start: start[1] + head, text, count=1))


def pictures(page, folder, check=False):
    """Draws the pictures of a page, or returns the problems of those that are there."""
    problems = []
    for key, series in figures(page.read_text()):
        name, title = PICTURES[key]
        file = folder / name
        try:
            if not check:
                draw(key, series(), file, title)
            elif not file.exists() or f"<desc>{html.escape(description(series()))}</desc>" not in file.read_text():
                problems.append(f"{file} does not have the figures of {page}: `make pictures` draws it")
        except Missing as row:
            problems.append(f"{file} is left as it is: {page} does not have the row \"{row}\"")
        except ImportError as why:
            return [f"the pictures are left as they are, because matplotlib is missing ({why}): `make pictures` installs it and draws them"]
    return problems


if __name__ == "__main__":
    found = pictures(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), "--check" in sys.argv)
    sys.exit("\n".join(found) or 0)
