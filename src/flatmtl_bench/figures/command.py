"""The command that measures finished runs and draws what it found."""

import io
import json
from pathlib import Path

from flatmtl_bench.analysis.trained import check_device
from flatmtl_bench.environment import environment
from flatmtl_bench.figures.base import Figure
from flatmtl_bench.figures.style import style
from flatmtl_bench.files import check_writable, write_whole
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
    check_device(figure.device)
    check_writable(folder)  # before minutes of measuring
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
