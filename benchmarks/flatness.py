"""What the paper says of flat minima, measured: CAGrad against F-CAGrad on pairs of digits and of clothes.

``python benchmarks/flatness.py --runs FOLDER`` trains both with several seeds, makes the figures of them by
``flatmtl figure``, and writes ``results/flatness.json`` beside this file, with what was seen of each claim, and the
pictures ``docs/flatness/*.png``. With ``--pictures FOLDER``, a folder with ``mnist*.npz`` and ``fashion*.npz``, it is
on all three data sets of the paper's table 1, without it on the embedded digits only. It takes two hours on 2 cores;
interrupted, the same command goes on.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro

from flatmtl_bench import cli
from flatmtl_bench.figures import FIGURES
from flatmtl_bench.figures.style import style
from flatmtl_bench.files import write_whole

HERE = Path(__file__).parent
PLAIN, FLAT = "CAGrad", "F-CAGrad"
SMALL = 0.05
"""Radius of plain SAM at which sharpness and gradient norms are compared, one of the paper's three."""
KEPT = 5.0
"""Points of accuracy that a model may lose under a perturbation that it is said to withstand."""

DPI = 80
"""Dots per inch of the pictures in the docs."""

Record = Mapping[str, Any]
Numbers = dict[str, dict[str, list[float]]]
"""For each data set and method a number of each seed."""


@dataclass(frozen=True)
class Options:
    """Train what is not there yet, measure it, and write what was seen as JSON."""

    runs: str
    """Folder of run folders, in which finished ones are not trained again, and of the figures' data."""
    pictures: str | None = None
    """Folder with mnist*.npz and fashion*.npz; None: digits alone."""
    seeds: int = 3
    """Number of seeds."""
    epochs: int = 50
    """Passes over the training pairs."""
    rho_epochs: int = 20
    """Passes in the runs for accuracy against rho."""
    samples: int = 4000
    """Pairs to train on."""
    keep_every: int = 5
    """Epochs between snapshots."""
    rho: float = 1.0
    """Radius of F-CAGrad (ASAM)."""
    radii: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
    """Radii for accuracy against rho."""
    jobs: int = 2
    """Runs at a time."""
    out: Path = HERE / "results" / "flatness.json"
    """The file to write."""
    docs: Path = HERE.parent / "docs" / "flatness"
    """Folder of the pictures to write."""

    def common(self, folder: str, epochs: int) -> list[str]:
        """Return the flags of all runs of a folder."""
        return [
            *("--seeds", str(self.seeds), "--jobs", str(self.jobs), "--threads", "1", "--out", f"{self.runs}/{folder}"),
            *("--epochs", str(epochs), "--batch-size", "64", "--model", "lenet", "--device", "cpu", "--loggers"),
            *("--log-every", "0", "--data.train-samples", str(self.samples)),
        ]


def main(options: Options) -> None:
    """Train, measure, and write what was seen."""
    train(options)
    seen = dict(measured(options))
    result = {"options": settings(options), "seen": seen, "environment": environment(options)}
    write_whole(options.out, json.dumps(result, indent=1) + "\n")


def train(options: Options) -> None:
    """Train what is not there yet."""
    digits, rho = ("--source", "mnist5k"), ("--rho", str(options.rho))
    sets = {("multimnist",): digits}
    if options.pictures is not None:
        sets["multifashion", "multifashionmnist"] = ("--source", "npz", "--root", options.pictures)
    main_runs = (*options.common("runs", options.epochs), "--keep-every", str(options.keep_every))
    for names, source in sets.items():
        run("sweep", *[f"{name}_cagrad" for name in names], *main_runs, *source)
        run("sweep", *[f"{name}_f_cagrad" for name in names], *main_runs, *source, *rho)
    grid = ",".join(map(str, options.radii))
    rho_runs = (*options.common("rho", options.rho_epochs), *digits)
    run("sweep", "multimnist_cagrad", *rho_runs)
    run("sweep", "multimnist_f_cagrad", *rho_runs, "--grid", f"rho={grid}")


def run(*words: str) -> None:
    """Run a command of `flatmtl`; what is wrong ends this one, too."""
    if code := cli.main(words):
        raise SystemExit(code)


def records(options: Options, name: str, *flags: str, title: str | None = None, runs: str = "runs") -> list[Record]:
    """Return what a figure measures, and draw it for the docs; what is measured already is only read."""
    folder = Path(options.runs) / "figures" / (title or name)
    data = folder / f"{name}.json"
    if not (folder / f"{name}.pdf").exists():
        run("figure", name, f"{options.runs}/{runs}", "--out", str(folder), "--overwrite", *flags)
    found = json.loads(data.read_text())
    options.docs.mkdir(parents=True, exist_ok=True)
    with style():
        picture = FIGURES[name](**found["options"]).draw(found["records"])
        picture.savefig(options.docs / f"{title or name}.png", dpi=DPI)
    return found["records"]


def measured(options: Options) -> Iterator[tuple[str, Numbers]]:
    """Yield every quantity that a claim is about."""
    yield from of_conflict(records(options, "conflict"), options)
    yield from of_curves(records(options, "curves"), options)
    yield from of_gradients(records(options, "gradnorm", "--samples", "500"))
    shared = ("--samples", "500")
    for scale, radii in (("relative", [k / 20 for k in range(11)]), ("absolute", [0, 1, 2, 3, 4, 5, 6, 8, 10, 50])):
        flags = (*shared, "--scale", scale, "--radii", *map(str, radii))
        found = records(options, "robustness", *flags, title=f"robustness_{scale}")
        yield f"withstood, {scale}", withstood(found)
    found = records(options, "landscape", *shared, "--steps", "7")
    for name in ("centre", "rise"):
        yield f"landscape, {name}", per_run(found, lambda some, name=name: fmean(r[name] for r in some))
    yield from of_calibration(records(options, "calibration", *out_of_domain(options)))
    yield from of_rho(records(options, "rho", runs="rho"))


def per_run(found: Iterable[Record], number: Callable[[Sequence[Record]], float | None]) -> Numbers:
    """Return a number of the records of each run, None left out, in the order of the seeds."""
    groups: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for record in found:
        groups[record["data"], record["method"], record["seed"]].append(record)
    numbers: Numbers = defaultdict(lambda: defaultdict(list))
    for (data, method, _), some in sorted(groups.items(), key=lambda item: item[0][2]):
        if (value := number(some)) is not None:
            numbers[data][method].append(value)
    return {data: dict(methods) for data, methods in numbers.items()}


def of_conflict(found: Sequence[Record], options: Options) -> Iterator[tuple[str, Numbers]]:
    """Yield shares of steps in conflict in training, in per cent, and those within a task at the last snapshot."""

    def in_training(first: int, last: int) -> Numbers:
        wanted = [r for r in found if (r["measured"], r["statistic"]) == ("training", "conflict")]
        return per_run(wanted, lambda some: 100 * fmean(r["value"] for r in some if first <= r["epoch"] <= last))

    yield "conflict, first ten epochs", in_training(1, 10)
    yield "conflict, last ten epochs", in_training(options.epochs - 9, options.epochs)
    for name in ("intra_conflict", "inter_conflict"):
        last = [r for r in found if (r["measured"], r["statistic"]) == ("snapshot", name)]
        yield f"{name}, last snapshot", at_last(last, "value", 100.0)


def at_last(found: Sequence[Record], name: str, factor: float = 1.0) -> Numbers:
    """Return for each run the mean over the tasks of a value at the last of its epochs."""
    return at_epoch(max, found, name, factor)


def at_first(found: Sequence[Record], name: str) -> Numbers:
    """Return for each run the mean over the tasks of a value at the first of its epochs."""
    return at_epoch(min, found, name)


def at_epoch(which: Callable[..., int], found: Sequence[Record], name: str, factor: float = 1.0) -> Numbers:
    """Return for each run the mean over the tasks of a value, times a factor, at the epoch that ``which`` chooses."""

    def value(some: Sequence[Record]) -> float:
        epoch = which(record["epoch"] for record in some)
        return factor * fmean(record[name] for record in some if record["epoch"] == epoch)

    return per_run(found, value)


def of_curves(found: Sequence[Record], options: Options) -> Iterator[tuple[str, Numbers]]:
    """Yield accuracies in per cent, mean over the tasks."""
    accuracy = [record for record in found if record["metric"] == "accuracy"]
    yield "training accuracy, last", at_last([r for r in accuracy if r["split"] == "train"], "value")
    test = [record for record in accuracy if record["split"] == "test"]
    for epoch in dict.fromkeys((5, 20, options.epochs)):
        yield f"test accuracy, epoch {epoch}", at_last([r for r in test if r["epoch"] <= epoch], "value")
    means = {
        epoch: at_last([r for r in test if r["epoch"] <= epoch], "value") for epoch in range(1, options.epochs + 1)
    }
    ahead: Numbers = {}
    for data in means[1]:
        leads = [e for e in means if fmean(means[e][data][FLAT]) > fmean(means[e][data][PLAIN])]
        trailing = [e for e in means if e not in leads]
        ahead[data] = {FLAT: [float(max(trailing, default=0) + 1)]}
    yield "ahead in test accuracy from epoch", ahead


def of_gradients(found: Sequence[Record]) -> Iterator[tuple[str, Numbers]]:
    """Yield sharpness and norms of the flat gradient at a small radius, early and late in training."""
    small = [record for record in found if record["rho"] == SMALL]
    for name, text in (("sharpness", "sharpness"), ("norm_flat", "norm of the flat gradient")):
        yield f"{text}, first snapshot", at_first(small, name)
        yield f"{text}, last snapshot", at_last(small, name)


def withstood(found: Sequence[Record]) -> Numbers:
    """Return the largest radius up to which a run's test accuracy, mean over draws and tasks, stays within `KEPT`."""

    def largest(some: Sequence[Record]) -> float:
        test = [record for record in some if record["split"] == "test"]
        radii = sorted({record["radius"] for record in test})
        means = {r: fmean(record["value"] for record in test if record["radius"] == r) for r in radii}
        lost = [radius for radius in radii if means[radius] < means[radii[0]] - KEPT]
        return max((radius for radius in radii if not lost or radius < lost[0]), default=0.0)

    return per_run(found, largest)


def out_of_domain(options: Options) -> tuple[str, ...]:
    """Return the flags that let models see digits and clothes they were not trained on."""
    if options.pictures is None:
        return ()
    where = ("--out-of-domain-source", "npz", "--out-of-domain-root", options.pictures)
    return ("--out-of-domain", "multimnist", "multifashion", *where)


def of_calibration(found: Sequence[Record]) -> Iterator[tuple[str, Numbers]]:
    """Yield Brier score and ECE, average of the tasks, and entropies in domain and out of it."""
    average = [r for r in found if r["kind"] == "reliability" and r["task"] == "average of tasks"]
    for name in ("brier", "ece"):
        yield name, per_run(average, lambda some, name=name: some[0][name])
    entropy = [record for record in found if record["kind"] == "entropy"]
    inside = [record for record in entropy if record["auroc"] is None]
    outside = [record for record in entropy if record["auroc"] is not None]
    yield "entropy, in domain", per_run(inside, lambda some: fmean(record["mean"] for record in some))
    yield "entropy, out of domain", per_run(outside, lambda some: fmean(record["mean"] for record in some))
    yield "AUROC of entropy", per_run(outside, lambda some: fmean(record["auroc"] for record in some))


def of_rho(found: Sequence[Record]) -> Iterator[tuple[str, Numbers]]:
    """Yield the test accuracy at each radius, mean over the tasks; the radius stands for the method."""
    metrics = list(dict.fromkeys(record["metric"] for record in found))
    mean = [{**record, "method": f"{record['rho']:g}"} for record in found if record["metric"] == metrics[-1]]
    numbers = per_run(mean, lambda some: some[0]["value"])
    yield (
        "test accuracy at rho",
        {data: {rho: methods[rho] for rho in sorted(methods, key=float)} for data, methods in numbers.items()},
    )


def settings(options: Options) -> dict[str, Any]:
    """Return the options that decide numbers."""
    names = ("seeds", "epochs", "rho_epochs", "samples", "keep_every", "rho", "radii")
    return {name: getattr(options, name) for name in names}


def environment(options: Options) -> dict[str, Any]:
    """Return where the runs were made."""
    path = next(iter(sorted((Path(options.runs) / "runs").glob("*/env.json"))))
    return json.loads(path.read_text())


if __name__ == "__main__":
    main(tyro.cli(Options))
