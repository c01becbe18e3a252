"""What all figures have in common: runs are measured one by one, and what was measured is drawn."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from matplotlib.figure import Figure as Drawing
from tyro.conf import Positional, arg

from flatmtl_bench.output import say
from flatmtl_bench.reports.reading import Run
from flatmtl_bench.reports.results import Row, Table

Record = Mapping[str, Any]
"""One measurement: plain values by name, ready for JSON and for a table of pandas."""


@dataclass(frozen=True)
class Figure(ABC):
    """A kind of figure. Its fields are the flags of `flatmtl figure NAME`."""

    runs: Annotated[Positional[tuple[str, ...]], arg(metavar="RUNS ...")] = ("runs",)
    """Run folders, or folders of run folders; what is no finished run is named and left out."""
    out: str = "figures"
    """Folder of the figure (PNG and PDF) and of its data (JSON)."""
    overwrite: bool = False
    """Replace the files if they exist."""
    device: str = "cpu"
    """Where the models run: cpu or cuda."""

    @abstractmethod
    def measure(self, run: Run) -> Iterable[Record]:
        """Yield what is measured of one run, usually a record for each task; the run is not told in it.

        Raises:
            ValueError, OSError: the run has not what this needs; the message says what to do.
        """

    @abstractmethod
    def draw(self, records: Sequence[Record]) -> Drawing:
        """Return the picture of the records of all runs, which are those of :meth:`records`."""

    def records(self, tables: Sequence[Table]) -> list[Record]:
        """Return what is measured of each run of some tables, with ``data``, ``method``, ``flat`` and ``seed``."""
        found: list[Record] = []
        for table in tables:
            for row, label in table.names().items():
                found += self._records_of(row, {"data": data_name(table, tables), "method": label, "flat": row.flat})
        return found

    def _records_of(self, row: Row, whose: Record) -> list[Record]:
        found: list[Record] = []
        for run in row.runs:
            say(f"{whose['data']}, {whose['method']}, seed {run.config.seed}: {run.path}")
            try:
                found += [{**whose, "seed": run.config.seed, **record} for record in self.measure(run)]
            except FloatingPointError as error:  # of the run, as a value of a file that is wrong would be
                raise ValueError(f"{run.path}: {error}") from error
        return found


def data_name(table: Table, tables: Sequence[Table]) -> str:
    """Return the name of a table's data, with all that the runs have in common if the name is not its alone."""
    names = [other.config.data.name for other in tables]
    name = table.config.data.name
    return name if names.count(name) == 1 else table.title
