"""Loggers: who is told the metrics of each epoch, beside ``metrics.jsonl``, which stays the record of a run.

They write to ``logs/<name>/`` in the run folder. A run that goes on begins its logs anew and repeats the record to
them, so whatever an interruption tore out of a log or left in it twice, in the end it has each epoch once. With W&B,
and with an MLflow server (``MLFLOW_TRACKING_URI``), it is a new run there, which holds all epochs.

``logs/live/`` is for TensorBoard while an epoch is under way: means over every few steps of what steps tell anyway.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger

from flatmtl_bench.files import WriteError
from flatmtl_bench.runs import LOGS


def _tensorboard(path: Path) -> Logger:
    return TensorBoardLogger(path.parent, name="", version=path.name)


def _live(path: Path, steps: int) -> Logger:
    return TensorBoardLogger(path.parent, name="", version=path.name, purge_step=steps + 1, flush_secs=10)


def _csv(path: Path) -> Logger:
    return CSVLogger(path.parent, name="", version=path.name)


def _mlflow(path: Path) -> Logger:
    from lightning.pytorch.loggers import MLFlowLogger  # noqa: PLC0415  (seconds, which few need)

    if server := os.environ.get("MLFLOW_TRACKING_URI"):
        return MLFlowLogger("flatmtl", run_name=_run_name(path), tracking_uri=server)
    path.mkdir(parents=True)
    base = f"sqlite:///{path.absolute()}/mlflow.db"
    return MLFlowLogger("flatmtl", run_name=_run_name(path), tracking_uri=base, artifact_location=str(path.absolute()))


def _wandb(path: Path) -> Logger:
    from lightning.pytorch.loggers import WandbLogger  # noqa: PLC0415  (seconds, which few need)

    path.mkdir(parents=True)
    return WandbLogger(project="flatmtl", name=_run_name(path), save_dir=path)


LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "tensorboard": _tensorboard,
    "csv": _csv,
    "mlflow": _mlflow,
    "wandb": _wandb,
}
"""For each name how to make the logger that writes to a folder."""
LIVE = "live"
PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""What must be installed for a logger, where that is not part of Lightning."""


def check_installed(names: Iterable[str]) -> None:
    """Raise if a logger needs a package that is not there.

    Raises:
        ValueError: saying what to install.
    """
    for name in names:
        package = PACKAGES.get(name)
        if package is not None and find_spec(package) is None:
            raise ValueError(
                f"--loggers {name} needs the package {package}, which is not installed. "
                f"pip install {package}, or give --loggers without it, e.g. --loggers csv."
            )


class Logs:
    """The logs of one run, begun anew.

    Args:
        names: keys of ``LOGGERS``; the logs of others that lie in the folder are removed too.
        folder: the folder of the run.
        rows: the metrics of the epochs that it has finished so far.
        steps: that it has done so far; points of the live log after them are forgotten. None: there is no live log.

    Raises:
        WriteError: a log cannot be removed or written; the other methods raise it, too.
    """

    def __init__(
        self, names: Sequence[str], folder: Path, rows: Iterable[Mapping[str, Any]] = (), steps: int | None = None
    ) -> None:
        self.path = folder / LOGS
        live = None if "tensorboard" not in names else steps
        with self._writing():
            for name in (*LOGGERS, *([LIVE] if live is None else [])):
                if (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            self._loggers = [LOGGERS[name](self.path / name) for name in dict.fromkeys(names)]
            self._live = None if live is None else _live(self.path / LIVE, live)
        for row in rows:
            self.append(row)

    def append(self, row: Mapping[str, Any]) -> None:
        """Tell every logger the metrics of one more epoch, of which it gets those that are finite numbers."""
        values = {name: value for name, value in row.items() if name != "epoch" and _is_finite(value)}
        with self._writing():
            for logger in self._loggers:
                logger.log_metrics(values, step=row["epoch"])
                logger.save()

    def show(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to the live log, of what are finite numbers."""
        if self._live is not None:
            with self._writing():
                self._live.log_metrics({name: value for name, value in values.items() if _is_finite(value)}, step=step)

    def close(self, status: str = "success") -> None:
        """Let the loggers finish; ``status`` is ``"success"`` or ``"failed"``."""
        with self._writing():
            for logger in (*self._loggers, *([] if self._live is None else [self._live])):
                logger.finalize(status)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Within it what the system says of a file is a `WriteError` that names the logs."""
        try:
            yield
        except OSError as error:
            raise WriteError(f"{self.path} could not be written: {error}.") from error


def _run_name(path: Path) -> str:
    """Return the name of the run whose log lies at ``path``."""
    return path.absolute().parents[1].name


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
