"""Single-task learning and six methods, plain and flat, on rendered rooms with SegNet and MTAN.

``python benchmarks/scenes.py --runs FOLDER`` writes ``results/scenes.json`` beside this file, with segmentation, depth
and normals of each method and Delta m, and ``docs/scenes.png``: what two models say of rooms they have not seen. It
takes about an hour on 2 cores; interrupted, the same command goes on.
"""

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import tyro

from flatmtl_bench import cli
from flatmtl_bench.analysis.trained import trained
from flatmtl_bench.data import prediction_sheet
from flatmtl_bench.files import write_whole

HERE = Path(__file__).parent
METHODS = ("ls", "mgda", "cagrad", "imtl_g", "nash_mtl")
SHOWN = "imtl_g"
"""The method whose models are shown."""


@dataclass(frozen=True)
class Options:
    """Train what is not there yet, and write the table as JSON and a sheet of predictions."""

    runs: str
    """Folder of run folders, in which finished ones are not trained again."""
    seeds: int = 2
    """Number of seeds."""
    epochs: int = 10
    """Passes over the training pictures."""
    samples: int = 300
    """Rooms to train on."""
    width: float = 0.0625
    """Width of the layers, as a share of SegNet's and MTAN's own."""
    rho: float = 0.05
    """Radius of the flat methods."""
    jobs: int = 2
    """Runs at a time."""
    out: Path = HERE / "results" / "scenes.json"
    """The file to write."""
    sheet: Path = HERE.parent / "docs" / "scenes.png"
    """The picture to write."""

    def common(self) -> list[str]:
        """Return the flags of all runs."""
        return [
            *("--seeds", str(self.seeds), "--jobs", str(self.jobs), "--threads", "1", "--out", self.runs),
            *("--epochs", str(self.epochs), "--width", str(self.width), "--device", "cpu", "--loggers"),
            *("--data.train-samples", str(self.samples)),
        ]


def main(options: Options) -> None:
    """Train what is not there yet and write what came out."""
    tasks = ("--grid", "task=segmentation,depth,normals")
    flat = ("--rho", str(options.rho))
    for words in (
        ("scenes_stl", *tasks),
        [f"scenes_{method}" for method in METHODS],
        ("scenes_f_stl", *tasks, *flat),
        (*[f"scenes_f_{method}" for method in METHODS], *flat),
    ):
        said("sweep", *words, *options.common())
    write_whole(options.out, json.dumps(result(options), indent=1) + "\n")
    write_sheet(options)


def said(*words: str) -> str:
    """Run a command of `flatmtl` and return what it prints; what is wrong ends this one, too."""
    with redirect_stdout(io.StringIO()) as printed:
        if code := cli.main(words):
            raise SystemExit(code)
    return printed.getvalue()


def result(options: Options) -> dict:
    """Return the table, and where it was made."""
    (report,) = json.loads(said("report", options.runs, "--json"))
    for row in report["rows"]:
        config = json.loads((Path(options.runs) / row["runs"][0] / "config.json").read_text())
        row["flat_settings"] = {"rho": config["rho"], "method.perturbation": config["method"]["perturbation"]}
    environment = json.loads((Path(options.runs) / report["rows"][0]["runs"][0] / "env.json").read_text())
    return {**report, "width": options.width, "samples": options.samples, "environment": environment}


def write_sheet(options: Options) -> None:
    """Write what the flat model of one method says of some rooms of the test part, seed 0."""
    (run,) = Path(options.runs).glob(f"scenes_f_{SHOWN}-*-s0")
    model = trained(run)
    prediction_sheet(model.dataset, model.outputs(range(0, len(model.dataset), 17)), options.sheet, overwrite=True)


if __name__ == "__main__":
    main(tyro.cli(Options))
