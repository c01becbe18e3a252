"""Write every number and figure of the README and of the docs from committed results: ``python docs/generate.py``.

``python docs/generate.py --check`` changes nothing and says what is out of date. What is generated is in ``PAGES`` and
``FIGURES``, at the end: a block of a page between markers, or a figure, from the result file that it is made of.
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from flatmtl.aggregators import AGGREGATORS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PLAIN_COLOUR, FLAT_COLOUR = "#0072b2", "#d55e00"  # distinct in print and for the colour-blind
SOLVERS = {"flatmtl": ("#0072b2", "-"), "TorchJD": ("#d55e00", "--"), "SciPy": ("#009e73", ":")}
"""Whose aggregators are timed, with colour and line in the figure."""


@dataclass(frozen=True)
class Page:
    """A page with generated blocks, each between ``<!-- name:begin -->`` and ``<!-- name:end -->``.

    Attributes:
        path: of the page.
        blocks: what makes each block, by its name.
    """

    path: Path
    blocks: Mapping[str, Callable[[], str]]

    def filled(self) -> str:
        """Return the page with its blocks as they should be."""
        text = self.path.read_text(encoding="utf-8")
        for name, block in self.blocks.items():
            begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
            before, rest = text.split(begin)
            text = f"{before}{begin}\n{block()}\n{end}{rest.split(end)[1]}"
        return text

    def is_current(self) -> bool:
        """Return whether the page is as it should be."""
        return self.filled() == self.path.read_text(encoding="utf-8")

    def write(self) -> None:
        """Bring the page up to date."""
        self.path.write_text(self.filled(), encoding="utf-8")


@dataclass(frozen=True)
class Figure:
    """A figure drawn from one result file, whose fingerprint it carries.

    Attributes:
        path: of the figure.
        result: name of the result file.
        draw: from Matplotlib's ``pyplot`` and the result to the figure.
    """

    path: Path
    result: str
    draw: Callable[[Any, dict[str, Any]], Any]

    def fingerprint(self) -> str:
        """Return a mark of the result that the figure is drawn from."""
        return f"{self.result} {hashlib.sha256((RESULTS / self.result).read_bytes()).hexdigest()[:16]}"

    def is_current(self) -> bool:
        """Return whether the figure was drawn from the result as it is."""
        return self.path.exists() and self.fingerprint() in self.path.read_text(encoding="utf-8")

    def write(self) -> None:
        """Draw the figure."""
        import matplotlib as mpl

        mpl.use("svg")
        mpl.rcParams.update({"svg.hashsalt": "flatmtl", "svg.fonttype": "path", "font.size": 10})
        from matplotlib import pyplot as plt

        figure = self.draw(plt, read(self.result))
        figure.savefig(self.path, metadata={"Date": None, "Description": self.fingerprint()})
        plt.close(figure)


def read(name: str) -> dict[str, Any]:
    """Return a result file."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(rows: list[list[str]]) -> str:
    """Return rows, the first of them headings, as a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * len(rows[0])) + " |", *lines[1:]])


def demo_block() -> str:
    """Return what the README says of the demo."""
    result = read("demo.json")
    (plain, flat) = result["methods"]
    seeds = len(result["methods"][plain]["runs"])
    protocol = result["methods"][plain]["runs"][0]["protocol"]
    return "\n\n".join(
        [
            f"Over {seeds} seeds, at equal epochs (mean ± standard deviation over seeds; protocol `{protocol}`; made "
            "by `python benchmarks/demo.py`):",
            table(result["table"]),
            f"![Test accuracy and share of steps in conflict over the epochs, {plain} against {flat}](docs/demo.svg)",
            result["finding"],
            "What it owes to which part, and to time, with the same seeds:",
            also_table(result),
            also_sentence(result) + " Times were taken beside other work on the machine and are rough.",
        ]
    )


def also_sentence(result: dict[str, Any]) -> str:
    """Return what the table of everything says: where the flat form is ahead by more than the spread over seeds."""
    flat = list(result["methods"])[1]
    clear: dict[bool, list[str]] = {True: [], False: []}
    for label, ahead in leads(result).items():
        clear[fmean(ahead) > stdev(ahead)].append(label)
    yes, no = (" and ".join(f"“{label}”" for label in clear[answer]) or "none" for answer in (True, False))
    return f"{flat} is ahead by more than one standard deviation over seeds of {yes}, and not of {no}."


def leads(result: dict[str, Any]) -> dict[str, list[float]]:
    """Return by how much the flat form is ahead of everything else, in points of accuracy, seed by seed."""
    everything = {**result["methods"], **result["also"]}
    accuracy = {label: [100 * run["test"]["accuracy"] for run in m["runs"]] for label, m in everything.items()}
    flat = accuracy.pop(list(result["methods"])[1])
    return {label: [f - o for f, o in zip(flat, other, strict=True)] for label, other in accuracy.items()}


def also_table(result: dict[str, Any]) -> str:
    """Return the table of everything that was compared: accuracy, how far the flat form is ahead of it, and time."""
    everything = {**result["methods"], **result["also"]}
    accuracy = {label: [100 * run["test"]["accuracy"] for run in m["runs"]] for label, m in everything.items()}
    seconds = {label: fmean(run["seconds"] for run in m["runs"]) for label, m in everything.items()}
    plain, flat = result["methods"]
    rows = [["method", "epochs", "average, %", f"{flat} is ahead by", f"time, {plain} = 1"]]
    for label, method in everything.items():
        ahead = leads(result).get(label)
        gap = f"{fmean(ahead):+.2f} ± {stdev(ahead):.2f}" if ahead else ""
        epochs = str(method["config"]["epochs"])
        mean = f"{fmean(accuracy[label]):.2f} ± {stdev(accuracy[label]):.2f}"
        rows.append([label, epochs, mean, gap, f"{seconds[label] / seconds[plain]:.1f}"])
    return table(rows)


def methods_block() -> str:
    """Return the table of aggregators: name, class, what its direction is, and where it comes from."""
    rows = [["name", "class", "direction", "source"]]
    for name, kind in AGGREGATORS.items():
        text = kind.__doc__ or ""
        source = re.search(r"References:\s+- (.*? \(\d{4}\))", text, re.DOTALL)
        what = text.splitlines()[0].partition(": ")[2] or text.splitlines()[0]
        rows.append([f"`{name}`", f"`{kind.__name__}`", what, " ".join(source[1].split()) if source else ""])
    return table(rows)


def aggregators_block() -> str:
    """Return what the docs say of the aggregators' time and exactness."""
    result = read("aggregators.json")
    made_with, packages = result["environment"], result["environment"]["packages"]
    cells = cells_of(result)
    return "\n\n".join(
        [
            f"Median milliseconds of a call, {made_with['threads']} thread of {made_with['processor']}, PyTorch "
            f"{packages['torch']}, TorchJD {packages['torchjd']}, SciPy {packages['scipy']}; "
            f"{result['options']['seeds']} random matrices with {result['options']['columns']} columns for each number "
            "m of tasks; made by `python benchmarks/aggregators.py`. Each cell: flatmtl / TorchJD, and how many times "
            "as long TorchJD takes.",
            times_table(cells),
            slower_sentence(cells),
            "![Time of a call against the number of tasks, one picture for each method](aggregators.svg)",
            "What the weights are worth, the worst over the matrices; 0 is exact:",
            worth_table(result, cells),
            measures_list(result),
        ]
    )


def flat_scale_block() -> str:
    """Return what the docs say of the two scales of the flat part."""
    result = read("flat_scale.json")
    config, seeds = result["config"], len(result["rows"][0]["runs"])
    return "\n\n".join(
        [
            f"Average test accuracy of both digits in per cent, {config['epochs']} epochs of "
            f"{config['data']['train_pairs']:,} pairs with a LeNet on `{config['source']}`, ASAM, {seeds} seeds, equal "
            "ones for all (mean ± standard deviation over seeds; the last three columns mean over seeds; made by "
            "`python benchmarks/flat_scale.py`):",
            flat_scale_table(result),
            flat_scale_sentences(result),
        ]
    )


def flat_scale_table(result: dict[str, Any]) -> str:
    """Return a row for each method, radius and scale."""
    rows = [["method", "rho", "flat_scale", "average, %", "ahead of plain", "lowest, %", "conflict, %", "sharpness"]]
    plain: list[float] = []
    for row in result["rows"]:
        accuracy = accuracies(row)
        if not row["rho"]:
            plain = accuracy
        ahead = [a - b for a, b in zip(accuracy, plain, strict=True)]
        means = [fmean(run[name] for run in row["runs"]) for name in ("conflict_percent", "sharpness")]
        rows.append(
            [
                row["label"],
                f"{row['rho']:g}" if row["rho"] else "",
                row["flat_scale"] or ("either" if row["rho"] else ""),
                f"{fmean(accuracy):.2f} ± {stdev(accuracy):.2f}",
                f"{fmean(ahead):+.2f} ± {stdev(ahead):.2f}" if row["rho"] else "",
                f"{min(accuracy):.2f}",
                f"{means[0]:.0f}",
                f"{means[1]:.3f}",
            ]
        )
    return table(rows)


def flat_scale_sentences(result: dict[str, Any]) -> str:
    """Return for each method and radius which scale is ahead, pair by pair."""
    found = {(row["label"], row["rho"], row["flat_scale"]): accuracies(row) for row in result["rows"]}
    lines = []
    for label, rho, scale in found:
        if scale == "linear":
            pairs = zip(found[label, rho, "linear"], found[label, rho, "raw"], strict=True)
            ahead = [linear - raw for linear, raw in pairs]
            wins = sum(a > 0 for a in ahead)
            lines.append(
                f"- {label}, rho {rho:g}: `linear` is {fmean(ahead):+.2f} ± {stdev(ahead):.2f} points from `raw`, and "
                f"ahead with {wins} of {len(ahead)} seeds."
            )
    return "\n".join(lines)


def accuracies(row: Mapping[str, Any]) -> list[float]:
    """Return the average test accuracy of each seed in per cent."""
    return [100 * run["test"]["accuracy"] for run in row["runs"]]


Cells = Mapping[tuple[str, int, str], Mapping[str, Any]]
"""Records by method, number of tasks and solver."""


def cells_of(result: dict[str, Any]) -> Cells:
    """Return the records of a result."""
    return {(record["method"], record["tasks"], record["by"]): record for record in result["records"]}


def tasks_of(cells: Cells) -> list[int]:
    """Return the numbers of tasks that were tried."""
    return sorted({m for _, m, _ in cells})


def methods_of(cells: Cells) -> list[str]:
    """Return the methods in their order."""
    return list(dict.fromkeys(method for method, _, _ in cells))


def ratio(cells: Cells, method: str, m: int) -> float:
    """Return how many times as long TorchJD takes."""
    return cells[method, m, "TorchJD"]["seconds"] / cells[method, m, "flatmtl"]["seconds"]


def times_table(cells: Cells) -> str:
    """Return the table of times: a row for each method, a column for each number of tasks."""
    rows = [["method", *(f"m = {m}" for m in tasks_of(cells))]]
    for method in methods_of(cells):
        row = [method]
        for m in tasks_of(cells):
            ours, theirs = (digits(1000 * cells[method, m, by]["seconds"]) for by in ("flatmtl", "TorchJD"))
            row.append(f"{ours} / {theirs}, **x {digits(ratio(cells, method, m))}**")
        rows.append(row)
    return table(rows)


def slower_sentence(cells: Cells) -> str:
    """Return where flatmtl is the slower one, TorchJD and SciPy apart."""
    parts = []
    for by in ("TorchJD", "SciPy"):
        ahead = {}
        for method in methods_of(cells):
            times = [(m, cells.get((method, m, by)), cells[method, m, "flatmtl"]) for m in tasks_of(cells)]
            ahead[method] = [m for m, other, own in times if other and other["seconds"] < own["seconds"]]
        found = [f"{method} (m = {', '.join(map(str, some))})" for method, some in ahead.items() if some]
        parts.append(f"{by} takes less time for {', '.join(found) or 'none of them'}.")
    return " ".join(parts)


def worth_table(result: dict[str, Any], cells: Cells) -> str:
    """Return the table of what the weights are worth: a row for each measure and solver."""
    rows = [["method", "measure", "by", *(f"m = {m}" for m in tasks_of(cells))]]
    for method in methods_of(cells):
        for measure in result["measures"][method]:
            for by in SOLVERS:
                records = [cells.get((method, m, by)) for m in tasks_of(cells)]
                if any(records):
                    worst = [f"{max(r['worth'][measure]):.0e}" if r else "" for r in records]
                    rows.append([method, measure, by, *("0" if w == "0e+00" else w for w in worst)])
    return table(rows)


def measures_list(result: dict[str, Any]) -> str:
    """Return what each measure means, once."""
    meanings = {name: text for measures in result["measures"].values() for name, text in measures.items()}
    return "\n".join(f"- {name}: {text}" for name, text in meanings.items())


def digits(x: float) -> str:
    """Return a positive number to two digits, or as a whole number.

    Example:
        >>> [digits(x) for x in (0.0123, 0.98, 4.56, 78.9, 3214.0)]
        ['0.012', '0.98', '4.6', '79', '3214']
    """
    return f"{x:.0f}" if x >= 10 else f"{x:.2g}"


def draw_demo(plt: Any, result: dict[str, Any]) -> Any:
    """Draw test accuracy and conflict over the epochs: every seed a thin line, the mean over seeds a thick one."""
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 3.2), layout="constrained")
    curves = {"test/accuracy": "test accuracy, mean of both tasks (%)", "train/conflict": "steps in conflict (%)"}
    for axis, (name, title) in zip(axes, curves.items(), strict=True):
        lowest = []
        for (label, method), colour in zip(result["methods"].items(), (PLAIN_COLOUR, FLAT_COLOUR), strict=True):
            seeds = [run["curves"][name] for run in method["runs"]]
            epochs = range(1, len(seeds[0]) + 1)
            mean = [sum(values) / len(values) for values in zip(*seeds, strict=True)]
            for values in seeds:
                axis.plot(epochs, values, color=colour, linewidth=0.7, alpha=0.5)
            axis.plot(epochs, mean, color=colour, linewidth=2.2, label=f"{label} ({len(seeds)} seeds)")
            lowest.append(min(values[len(values) // 4] for values in seeds))
        axis.set(title=title, xlabel="epoch")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        if name == "test/accuracy":
            axis.set_ylim(bottom=min(lowest) - 1.0)  # what matters is the end; the first epochs leave the picture
        else:
            axis.set_ylim(bottom=0.0)
    axes[1].legend(frameon=False)
    return figure


def draw_aggregators(plt: Any, result: dict[str, Any]) -> Any:
    """Draw the time of a call against the number of tasks, a picture for each method."""
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    cells = cells_of(result)
    methods, tasks = methods_of(cells), tasks_of(cells)
    columns = (len(methods) + 1) // 2
    figure, axes = plt.subplots(2, columns, figsize=(9.0, 4.6), layout="constrained", sharex=True, sharey=True)
    for axis, method in zip(axes.flat, methods, strict=False):
        for by, (colour, line) in SOLVERS.items():
            points = [(m, 1000 * cells[method, m, by]["seconds"]) for m in tasks if (method, m, by) in cells]
            if points:
                axis.plot(*zip(*points, strict=True), line, color=colour, marker=".", linewidth=1.8, label=by)
        axis.set(title=method, xscale="log", yscale="log")
        axis.set_xticks(tasks)
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    for axis in axes.flat[len(methods) :]:
        axis.set_visible(False)
    figure.supxlabel("number of tasks")
    figure.supylabel("milliseconds of a call")
    axes.flat[0].legend(frameon=False, fontsize=8, loc="upper left")
    return figure


PAGES = (
    Page(ROOT / "README.md", {"demo": demo_block, "methods": methods_block}),
    Page(DOCS / "benchmarks.md", {"aggregators": aggregators_block, "flat_scale": flat_scale_block}),
)
FIGURES = (
    Figure(DOCS / "demo.svg", "demo.json", draw_demo),
    Figure(DOCS / "aggregators.svg", "aggregators.json", draw_aggregators),
)


def main() -> int:
    """Write, or with ``--check`` compare."""
    old = [made for made in (*PAGES, *FIGURES) if not made.is_current()]
    if "--check" in sys.argv[1:]:
        for made in old:
            print(f"{made.path.relative_to(ROOT)} is out of date. Run: python docs/generate.py", file=sys.stderr)
        return 1 if old else 0
    for made in (*PAGES, *FIGURES):
        made.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
