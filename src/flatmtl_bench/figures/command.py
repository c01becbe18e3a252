"""The command that measures finished runs and draws what it found."""

import io
import json
import os
from pathlib import Path

import torch

from flatmtl_bench.environment import environment
from flatmtl_bench.figures.base import Figure
from flatmtl_bench.figures.style import style
from flatmtl_bench.files import write_whole
from flatmtl_bench.output import Stop, answer, say
from flatmtl_bench.reports.reading import find
from flatmtl_bench.reports.results import tables

FORMATS = ("png", "pdf")


def make_figure(name: str, figure: Figure) -> int:
    """Measure the runs, write the data and the figure, and print their paths.

    Raises:
        Stop: there is no finished run, nothing to draw of them, or a file is there already.
        ValueError, OSError: a run has not what the figure needs, or nothing can be written.
    """
    folder = Path(figure.out)
    paths = {ending: folder / f"{name}.{ending}" for ending in ("json", *FORMATS)}
    there = [str(path) for path in paths.values() if path.exists()]
    if there and not figure.overwrite:
        raise Stop(f"{', '.join(there)} exists. Use --overwrite to replace it, or another --out.")
    found = find(figure.runs)
    for reason in found.others:
        say(reason)
    if not found.runs:
        raise Stop(f"no finished run in {', '.join(figure.runs)}. `flatmtl run RECIPE --out FOLDER` makes one.")
    comparable = tables(found.runs)
    for reason in (sentence for table in comparable for sentence in table.lacking):
        say(reason)
    _check_device(figure.device)
    _check_writable(folder)  # before minutes of measuring
    records = figure.records(comparable)
    if not records:
        raise Stop(f"there is nothing to draw of the runs in {', '.join(figure.runs)}. Choose other runs or options.")
    options = {key: value for key, value in vars(figure).items() if key not in ("out", "overwrite")}
    data = {"figure": name, "options": options, "records": records, "environment": environment()}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(paths["json"], json.dumps(data, indent=1, allow_nan=False) + "\n")
    with style():
        drawing = figure.draw(records)
        for ending in FORMATS:
            content = io.BytesIO()
            drawing.savefig(content, format=ending)
            write_whole(paths[ending], content.getbuffer())
    for path in paths.values():
        answer(path)
    return 0


def _check_writable(folder: Path) -> None:
    """Raise unless a folder is there, or can be made, and can be written to."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise Stop(f"{there} is no folder that can be written to. Choose another --out.")


def _check_device(name: str) -> None:
    """Raise unless a device is there that can hold numbers."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise Stop(f"--device {name} cannot be used here: {str(error).splitlines()[0]} Use --device cpu.") from None
