"""Write every number and figure of the README and of the docs from committed results: ``python docs/generate.py``.

``python docs/generate.py --check`` changes nothing and says what is out of date. What is generated is in ``PAGES`` and
``FIGURES``, at the end: a block of a page between markers, or a figure, from the result file that it is made of.
"""

import ast
import hashlib
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from flatmtl.aggregators import AGGREGATORS
from flatmtl_bench.reports import claims, markdown
from flatmtl_bench.reports.grid import Grid
from flatmtl_bench.reproduce.claims import FLAT_IS_BETTER
from flatmtl_bench.reproduce.scales import SMALL
from flatmtl_bench.reproduce.tables import TABLES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
PLAIN_COLOUR, FLAT_COLOUR = "#0072b2", "#d55e00"  # distinct in print and for the colour-blind
SOLVERS = {"flatmtl": ("#0072b2", "-"), "TorchJD": ("#d55e00", "--"), "SciPy": ("#009e73", ":")}
"""Whose aggregators are timed, with colour and line in the figure."""
STEP_COLOURS = {"plain": ("#0072b2", "#d55e00", "#e69f00"), "flat": ("#0072b2", "#56b4e9", "#d55e00")}
"""Colours of those whose steps are timed, in their order."""


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


def precision_block() -> str:
    """Return what the docs say of the flat gradient under autocast."""
    result = read("precision.json")
    seeds = len({r["seed"] for r in result["records"]})
    tasks = len(result["records"][0]["cosine"])
    rows = [["model", "rho", "computed in", "cosine with float64 (least to greatest)", "signal_to_noise"]]
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for record in result["records"]:
        groups.setdefault((record["model"], record["rho"], record["precision"]), []).append(record)
    for (model, rho, precision), records in groups.items():
        cosines = [c for r in records for c in r["cosine"]]
        ratios = [c for r in records for c in r["signal_to_noise"]]
        rows.append(
            [
                model,
                f"{rho:g}",
                precision,
                f"{fmean(cosines):.3f} ({min(cosines):.3f} to {max(cosines):.3f})",
                f"{fmean(ratios):,.0f} ({min(ratios):,.0f} to {max(ratios):,.0f})",
            ]
        )
    return "\n\n".join(
        [
            f"Flat gradients of {tasks} tasks with SAM on {seeds} batches of {result['batch']} pairs of digits, models "
            "as they are initialised; mean over tasks and batches (made by `python benchmarks/precision.py`):",
            table(rows),
        ]
    )


def flat_scale_block() -> str:
    """Return what the docs say of the two scales of the flat part."""
    result = read("flat_scale.json")
    config, seeds = result["config"], len(result["rows"][0]["runs"])
    pairs = config["data"]["train_pairs"]  # `train_samples` by now
    return "\n\n".join(
        [
            f"Average test accuracy of both digits in per cent, {config['epochs']} epochs of "
            f"{pairs:,} pairs with a LeNet on `{config['source']}`, ASAM, {seeds} seeds, equal "
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


SCENES = {  # heading -> metric, factor, decimals
    "mIoU, %": ("miou/segmentation", 100.0, 2),
    "pixels, %": ("pixel_accuracy/segmentation", 100.0, 2),
    "abs err, m": ("abs_err/depth", 1.0, 4),
    "rel err": ("rel_err/depth", 1.0, 4),
    "mean, °": ("mean/normals", 1.0, 2),
    "median, °": ("median/normals", 1.0, 2),
    "< 11.25°, %": ("within_11.25/normals", 100.0, 2),
    "< 22.5°, %": ("within_22.5/normals", 100.0, 2),
    "< 30°, %": ("within_30/normals", 100.0, 2),
}


def scenes_block() -> str:
    """Return what the docs say of methods on rendered rooms."""
    result = read("scenes.json")
    seeds = len(result["rows"][0]["seeds"])
    rho, form = (flat_setting(result, name) for name in ("rho", "method.perturbation"))
    return "\n\n".join(
        [
            f"SegNet with MTAN of width {result['width']:g} on {result['samples']} rendered rooms of 64x64 pixels, "
            f"{result['epochs']} epochs, {seeds} seeds, {form.upper()} with rho {rho:g} for the flat forms, which no "
            "validation has chosen; test metrics of the epoch that is best on validation rooms, mean over the seeds. "
            f"Delta m is the mean change against {result['baseline']['text']}, negative is better (mean ± standard "
            "deviation over seeds; made by `python benchmarks/scenes.py`):",
            scenes_table(result),
            scenes_sentences(result),
            "![Rooms of the test part: picture, truth and prediction](scenes.png)",
        ]
    )


def flat_setting(result: Mapping[str, Any], name: str) -> Any:
    """Return the value that all flat rows have in common."""
    (value,) = {row["flat_settings"][name] for row in result["rows"] if row["flat"]}
    return value


def scenes_table(result: Mapping[str, Any]) -> str:
    """Return a row for each method, plain and flat."""
    rows = [["method", *SCENES, "Delta m, %"]]
    for row in result["rows"]:
        numbers = [f"{row['metrics'][name]['mean'] * factor:.{digits}f}" for name, factor, digits in SCENES.values()]
        rows.append([row["method"], *numbers, spread(row["delta_m"]["values"], "z.1f")])
    return table(rows)


def scenes_sentences(result: Mapping[str, Any]) -> str:
    """Return for each method how its flat form compares, seed by seed, by Delta m."""
    found = {row["method"]: row["delta_m"]["values"] for row in result["rows"]}
    lines = []
    for method, plain in found.items():
        if (flat := found.get(f"F-{method}")) is not None:
            change = [f - p for f, p in zip(flat, plain, strict=True)]
            better = sum(c < 0 for c in change)
            lines.append(
                f"- F-{method}: Delta m is {spread(change, '+.1f')} points from that of {method}, and better with "
                f"{better} of {len(change)} seeds."
            )
    return "\n".join(lines)


def spread(values: Sequence[float], form: str) -> str:
    """Return mean and standard deviation as text."""
    return f"{fmean(values):{form}} ± {stdev(values):{form.lstrip('+')}}"


def loaders_block() -> str:
    """Return what the docs say of the speed of the data sets."""
    records = read("loaders.json")["records"]
    workers = list(records[0]["alone"])
    rows = [["data", "size", *(f"{w} workers" for w in workers), "model", "batch", "training", "waiting, %"]]
    for record in records:
        width = "" if record["width"] == 1.0 else f", width {record['width']:g}"
        rows.append(
            [
                record["data"],
                "x".join(map(str, record["size"])),
                *(f"{record['alone'][w]:.0f}" for w in workers),
                record["model"] + width,
                str(record["batch"]),
                f"{rate:,.0f}" if (rate := record["training"]["rate"]) >= 10 else f"{rate:.2f}",
                f"{100 * record['training']['waiting']:.2g}",
            ]
        )
    return "\n\n".join(
        [
            "Pictures a second that a loader gives to nobody, with so many processes beside the one that asks; then "
            "those of training, with none beside it, and the share of the time in which the model waits for pictures "
            "(2 threads; made by `python benchmarks/loaders.py`):",
            table(rows),
        ]
    )


def report_block() -> str:
    """Return what the docs say of how long a report takes."""
    result = read("report.json")
    rows = [["", "seconds", "MiB"]]
    for record in result["records"]:
        rows.append([record["format"], f"{record['seconds']:.1f}", f"{record['mebibytes']:.0f}"])
    lead = (
        f"Of {result['runs']} runs with {result['epochs']} epochs each, {result['bytes'] / 1e6:.0f} MB of metrics, a "
        "report takes so long, its start included, and at most so much memory (made by `python benchmarks/report.py`):"
    )
    return f"{lead}\n\n{table(rows)}"


def code_of(example: str, *names: str) -> Callable[[], str]:
    """Return what makes a block of functions and classes of an example."""

    def block() -> str:
        text = (ROOT / "examples" / f"{example}.py").read_text(encoding="utf-8")
        parts = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        return "```python\n" + "\n\n\n".join(str(ast.get_source_segment(text, parts[n])) for n in names) + "\n```"

    return block


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


def step_block() -> str:
    """Return what the docs say of the time and the memory of a step."""
    result = read("step.json")
    options, made_with = result["options"], result["environment"]
    packages = made_with["packages"]
    threads = f"{options['threads']} thread" + "s" * (options["threads"] > 1)
    where = made_with["accelerator"] if options["device"] == "cuda" else f"{threads} of {made_with['processor']}"
    return "\n\n".join(
        [
            f"A step's {options['clock']} time over that of the bare passes, median over the pairs (lower to upper "
            f"quartile), each contender in a process of its own, {where}, PyTorch {packages['torch']}, TorchJD "
            f"{packages['torchjd']}; made by `python benchmarks/step.py`. Plain steps:",
            step_times_table(result, "plain"),
            "Flat steps:",
            step_times_table(result, "flat"),
            step_goals_list(result),
            "![Time of a step over its bare passes, plain steps and flat ones](step.svg)",
            "Peak memory beyond model and batch, activations included, in units of the shared parameters (n), once "
            "everything is set up:",
            step_memory_table(result),
            step_memory_sentence(result),
        ]
    )


def case_name(case: Mapping[str, Any]) -> str:
    """Return what the docs call a case."""
    return f"{case['label']}, m = {case['tasks']}, batch {case['batch']}"


def step_times_table(result: Mapping[str, Any], kind: str) -> str:
    """Return a row for each case: the milliseconds of the floor, and everybody's time over it."""
    rows = []
    for case in result["cases"]:
        found = [record for record in case["times"] if record["kind"] == kind]
        bare = 1000 * median(pair[0] for record in found for pair in record["pairs"])
        ratios = ["{:.2f} ({:.2f} to {:.2f})".format(record["ratio"], *record["quartiles"]) for record in found]
        rows.append([case_name(case), digits(bare), *ratios])
        columns = [record["by"] for record in found]
    return table([["model", "bare passes, ms", *columns], *rows])


def step_goals_list(result: Mapping[str, Any]) -> str:
    """Return for each goal of the flat step whether it is met."""
    lines = []
    for case in result["cases"]:
        own = [r for r in case["times"] if r["kind"] == "flat" and r["by"].startswith("flatmtl")]
        if case["goal"] is not None:
            found = [f"{r['by']} {'meets' if r['ratio'] <= case['goal'] else 'misses'} it" for r in own]
            lines.append(f"- {case_name(case)}: the goal is at most {case['goal']:g}; {' and '.join(found)}.")
    return "\n".join(lines)


def step_memory_table(result: Mapping[str, Any]) -> str:
    """Return a row for each case: the size of the shared parameters, and everybody's peak in these units."""
    columns = [
        f"bare passes, {record['kind']}" if record["by"] == "floor" else record["by"]
        for record in result["cases"][0]["memory"]
    ]
    rows = [["model", "n, MB", *columns]]
    for case in result["cases"]:
        n = case["shared_bytes"]
        peaks = [f"{later_peak(record) / n:.1f}" for record in case["memory"]]
        rows.append([case_name(case), digits(n / 1e6), *peaks])
    return table(rows)


def later_peak(record: Mapping[str, Any]) -> int:
    """Return the peak of all steps but the first."""
    return max(record["peaks"][1:])


def step_memory_sentence(result: Mapping[str, Any]) -> str:
    """Return how far the flat step's peak is above the plain one's, against its goal, and whether it grows."""
    goal = result["memory_goal"]
    beyond, growth, met = [0.0], [0.0], True
    for case in result["cases"]:
        n = case["shared_bytes"]
        plain, *flat = (record for record in case["memory"] if record["by"].startswith("flatmtl"))
        beyond += [(max(record["peaks"]) - later_peak(plain)) / n for record in flat]
        growth += [(later_peak(record) - record["peaks"][1]) / n for record in (plain, *flat)]
        most = goal["tolerance"] * (later_peak(plain) + goal["shared_parameters"] * n)
        met = met and all(max(record["peaks"]) <= most for record in flat)
    steps = sorted({len(record["peaks"]) for case in result["cases"] for record in case["memory"]})
    return (
        f"A flat step of flatmtl, the first one too, holds at most {max(beyond):.2f} n more than a plain one. The goal "
        f"of {goal['shared_parameters']:g} n more and {100 * goal['tolerance'] - 100:.0f}% of everything is "
        f"{'met' if met else 'missed'}. From the second step on its peak grows by {max(growth):.2f} n "
        f"({' to '.join(map(str, dict.fromkeys((steps[0], steps[-1]))))} steps were measured)."
    )


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


def flatness_block() -> str:
    """Return what the paper says of flat minima, beside what we see."""
    result = read("flatness.json")
    options = result["options"]
    return "\n\n".join(
        [
            f"LeNet on {options['samples']:,} pairs, batch 64, Adam 1e-3, {options['epochs']} epochs, "
            f"{options['seeds']} seeds; F-CAGrad with ASAM of rho {options['rho']:g}; accuracy against rho on "
            f"multimnist with {options['rho_epochs']} epochs. Measured on the epoch that is best on validation pairs, "
            f"or at snapshots every {options['keep_every']} epochs. Accuracies in per cent, losses in nats; "
            "made by `python benchmarks/flatness.py`:",
            table(claims.rows(result["seen"])),
            "What the decomposition is built against, and the paper does not measure: the share of mini-batches, in "
            "per cent, in which a task's loss gradient and its flat gradient (rho 0.05) point apart (intra), and in "
            "which its flat gradient and the direction of all loss gradients do (inter), mean over the tasks at the "
            "last snapshot:",
            table(intra_rows(result["seen"])),
        ]
    )


def intra_rows(seen: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each data set: intra- and inter-conflict."""
    names = {"intra": "intra_conflict, last snapshot", "inter": "inter_conflict, last snapshot"}
    sets = list(seen[names["intra"]])
    rows = [[data, *(claims.spelled(seen[name][data], ".1f") for name in names.values())] for data in sets]
    return [["data", *(f"{name}, %" for name in names)], *rows]


def outcomes() -> Iterator[dict[str, Any]]:
    """Yield each of the paper's tables that was made again, on each data set."""
    for path in sorted(RESULTS.glob("table[1-9].json")):
        yield from json.loads(path.read_text())


def claims_block() -> str:
    """Return how often means and intervals bear out each claim of the paper, by table and data set."""
    verdicts = ("mean", "yes", "open", "no")
    counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for outcome in outcomes():
        for answer in outcome["claims"]:
            place = answer["claim"], str(outcome["table"]), outcome["paper_data"], f"`{outcome['data']}`"
            counts[place].update(_borne_out(answer))
    firsts = list(dict.fromkeys(claim for claim, *_ in counts))
    rows = [
        [*place, *(str(found[verdict]) for verdict in verdicts)]
        for place, found in sorted(counts.items(), key=lambda item: firsts.index(item[0][0]))
    ]
    return table([["the paper claims", "table", "on", "here", "mean on its side", *verdicts[1:]], *rows])


def gains_block() -> str:
    """Return how often flat forms are ahead in the main column of tables 1 to 4."""
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    places: dict[int, list[str]] = defaultdict(list)
    for outcome in outcomes():
        answers = [each for each in outcome["claims"] if each["claim"] == FLAT_IS_BETTER and outcome["table"] <= 4]
        for answer in answers:
            counts[outcome["table"]].update(["all", *_borne_out(answer)])
        places[outcome["table"]] += [outcome["data"]] * bool(answers)
    rows = [
        [str(number), ", ".join(places[number]), *(str(found[name]) for name in ("all", "mean", "yes", "no"))]
        for number, found in counts.items()
    ]
    headings = ["table", "on", "comparisons", "flat is ahead in the mean", "by its interval, too", "behind by it"]
    return table([headings, *rows])


def _borne_out(answer: dict[str, Any]) -> list[str]:
    """Return what an answer counts as: its verdict, and ``mean`` if its mean bears the claim out."""
    found = answer["found"]
    mean = found is not None and (found["mean"] > 0 if found["better"] == "higher" else found["mean"] < 0)
    return [answer["verdict"], *["mean"] * mean]


def tables_block() -> str:
    """Return each of the paper's tables that was made again, beside the paper's numbers."""
    return "\n\n".join(chain.from_iterable(map(_reproduced, outcomes())))


def small_scale_block() -> str:
    """Return what `flatmtl reproduce --scale small` trains for each data set of the paper."""
    printed = {name: text for each in TABLES.values() for name, text in each.data.items()}
    headings = ["the paper's data", "here", "flags of `flatmtl run`", "rho of the flat methods", "seeds"]
    rows = [
        [printed[name], f"`{size.data}`", f"`{' '.join(size.flags)}`", " or ".join(size.radii), str(size.seeds)]
        for name, size in SMALL.items()
    ]
    return table([headings, *rows])


def _reproduced(outcome: dict[str, Any]) -> Iterator[str]:
    """Yield the heading, sentences and tables of one table of the paper on one data set."""
    yield f"## {outcome['title'].partition(':')[0]}"
    about = markdown.escaped(outcome["title"].partition(": ")[2])
    yield f"{about[0].upper()}{about[1:]} Made by `{outcome['command']}`:"
    yield from map(markdown.escaped, outcome["lines"])
    for grid in map(Grid.from_dict, outcome["grids"]):
        yield " ".join(map(markdown.escaped, grid.caption))
        yield markdown.table(grid)


def draw_step(plt: Any, result: dict[str, Any]) -> Any:
    """Draw everybody's time over the floor, a row for each case, with the quartiles: plain steps, then flat ones."""
    names = [case_name(case) for case in result["cases"]]
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 0.4 * len(names) + 1.4), layout="constrained", sharey=True)
    for axis, (kind, colours) in zip(axes, STEP_COLOURS.items(), strict=True):
        columns = zip(*([r for r in case["times"] if r["kind"] == kind] for case in result["cases"]), strict=True)
        for i, (records, colour) in enumerate(zip(columns, colours, strict=True)):
            ratios = [record["ratio"] for record in records]
            spread = [[abs(record["quartiles"][side] - record["ratio"]) for record in records] for side in (0, 1)]
            places = [row + 0.2 * (i - 1) for row in range(len(names))]
            axis.errorbar(ratios, places, xerr=spread, fmt="o", markersize=4, color=colour, label=records[0]["by"])
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set(title=f"{kind} step", xlabel="time over that of the bare passes")
        axis.set_yticks(range(len(names)), names)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, axis="x")
        axis.legend(frameon=False, fontsize=8)
    axes[0].invert_yaxis()
    return figure


PAGES = (
    Page(ROOT / "README.md", {"demo": demo_block, "gains": gains_block, "methods": methods_block}),
    Page(
        DOCS / "benchmarks.md",
        {
            "step": step_block,
            "precision": precision_block,
            "aggregators": aggregators_block,
            "flat_scale": flat_scale_block,
            "scenes": scenes_block,
            "loaders": loaders_block,
        },
    ),
    Page(
        DOCS / "loops.md",
        {
            "amp": code_of("amp_loop", "losses", "train_epoch"),
            "lightning": code_of("lightning_module", "FlatTraining"),
            "accelerate": code_of("accelerate_loop", "losses", "train_epoch"),
            "trainer": code_of("hf_trainer", "FlatTrainer"),
            "timm": code_of("timm_loop", "FlatScaler", "train_epoch"),
        },
    ),
    Page(DOCS / "flatness.md", {"flatness": flatness_block}),
    Page(DOCS / "tables.md", {"small-scale": small_scale_block, "claims": claims_block, "tables": tables_block}),
    Page(DOCS / "reports.md", {"report": report_block}),
    Page(DOCS / "ranks.md", {"ddp": code_of("ddp_loop", "losses", "train")}),
)
FIGURES = (
    Figure(DOCS / "demo.svg", "demo.json", draw_demo),
    Figure(DOCS / "step.svg", "step.json", draw_step),
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
