"""Nash-MTL and FairGrad on real digits: plain, and flat with the flat part as printed (``raw``) or ``linear``.

MGDA and CAGrad, whose flat part is the same either way, are beside them. Equal seeds for all.
``python benchmarks/flat_scale.py`` writes ``results/flat_scale.json`` beside this file (about an hour on 2 cores).
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from flatmtl_bench.demo import demo_config, open_runs, train_side_by_side
from flatmtl_bench.files import write_whole
from flatmtl_bench.recipes import Config
from flatmtl_bench.reports.comparison import conflict, sharpness
from flatmtl_bench.reports.reading import Run, read
from flatmtl_bench.runs import run_name

SCALED = ("nash_mtl", "fairgrad")
BESIDE = ("mgda", "cagrad")
RADII = (0.5, 1.0)


@dataclass(frozen=True)
class Options:
    """Compare the two scales of the flat part over seeds, and write the result as JSON."""

    seeds: int = 3
    """Number of seeds."""
    epochs: int = 12
    """Passes over the training pairs."""
    pairs: int = 8000
    """Pairs of digits to train on."""
    runs: str | None = None
    """Folder of run folders, in which finished ones are not trained again; None: a temporary one."""
    out: Path = Path(__file__).parent / "results" / "flat_scale.json"
    """The file to write."""


@dataclass(frozen=True)
class Row:
    """One row of the table: a method, and for a flat one the radius and the scale of the flat part."""

    method: str
    rho: float = 0.0
    flat_scale: str | None = None

    def config(self, options: Options, seed: int) -> Config:
        """Return the config of one run, that of `flatmtl demo` but for the method."""
        name = f"multimnist_f_{self.method}" if self.rho else f"multimnist_{self.method}"
        config = demo_config(name, seed, epochs=options.epochs, rho=self.rho, pairs=options.pairs)
        if self.flat_scale is None:
            return config
        return replace(config, method=replace(config.method, flat_scale=self.flat_scale))


def rows() -> Iterator[Row]:
    """Yield the rows of the table."""
    for method in SCALED:
        yield Row(method)
        yield from (Row(method, rho, scale) for rho in RADII for scale in ("raw", "linear"))
    for method in BESIDE:
        yield Row(method)
        yield from (Row(method, rho) for rho in RADII)


def main(options: Options) -> None:
    """Train what is not there yet and write the result."""
    table = {row: [row.config(options, seed) for seed in range(options.seeds)] for row in rows()}
    with tempfile.TemporaryDirectory() as temporary:
        out = options.runs or temporary
        configs = [config for group in table.values() for config in group]
        train_side_by_side(open_runs(configs, out, overwrite=False), out)
        runs = {row: [read(Path(out) / run_name(config)) for config in group] for row, group in table.items()}
    result = {
        "rows": [record(row, group) for row, group in runs.items()],
        "config": {
            name: value for name, value in configs[0].to_dict().items() if name not in ("seed", "method", "recipe")
        },
        "environment": next(iter(runs.values()))[0].environment,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(result, indent=1) + "\n")


def record(row: Row, runs: list[Run]) -> dict[str, Any]:
    """Return what one row came to, seed by seed."""
    return {
        "method": row.method,
        "label": runs[0].config.label,
        "rho": row.rho,
        "flat_scale": row.flat_scale,
        "runs": [
            {
                "seed": run.config.seed,
                "protocol": run.summary["protocol"],
                "test": run.summary["test"],
                "conflict_percent": conflict(run),
                "sharpness": sharpness(run),
                "step_seconds": run.summary["step_seconds"],
            }
            for run in runs
        ],
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
