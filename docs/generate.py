"""Write every number and figure of the README from committed result files: ``python docs/generate.py``.

``python docs/generate.py --check`` changes nothing and says whether the README is up to date.
"""

import hashlib
import json
import re
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from flatmtl.aggregators import AGGREGATORS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DEMO = ROOT / "benchmarks" / "results" / "demo.json"
FIGURE = ROOT / "docs" / "demo.svg"
PLAIN_COLOUR, FLAT_COLOUR = "#0072b2", "#d55e00"  # distinct in print and for the colour-blind


def table(rows: list[list[str]]) -> str:
    """Return rows, the first of them headings, as a Markdown table."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "| " + " | ".join(["---"] * len(rows[0])) + " |", *lines[1:]])


def demo_block(result: dict[str, Any]) -> str:
    """Return what the README says of the demo."""
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


def readme(text: str) -> str:
    """Return the README with its generated blocks as they should be."""
    result = json.loads(DEMO.read_text(encoding="utf-8"))
    for name, block in {"demo": demo_block(result), "methods": methods_block()}.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{block}\n{end}{rest.split(end)[1]}"
    return text


def fingerprint() -> str:
    """Return a mark of the result that the figure was drawn from."""
    return f"demo.json {hashlib.sha256(DEMO.read_bytes()).hexdigest()[:16]}"


def draw() -> None:
    """Draw test accuracy and conflict over the epochs: every seed a thin line, the mean over seeds a thick one."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "flatmtl", "svg.fonttype": "path", "font.size": 10})
    from matplotlib import pyplot as plt

    result = json.loads(DEMO.read_text(encoding="utf-8"))
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
    figure.savefig(FIGURE, metadata={"Date": None, "Description": fingerprint()})


def main() -> int:
    """Write, or with ``--check`` compare."""
    text = README.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        current = readme(text) == text and fingerprint() in FIGURE.read_text(encoding="utf-8")
        if not current:
            print("README.md or docs/demo.svg is out of date. Run: python docs/generate.py", file=sys.stderr)
        return 0 if current else 1
    README.write_text(readme(text), encoding="utf-8")
    draw()
    return 0


if __name__ == "__main__":
    sys.exit(main())
