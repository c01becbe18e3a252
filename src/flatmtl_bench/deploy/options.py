"""The options of the commands that let a trained model leave the harness."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import Positional, arg

from flatmtl_bench.recipes.config import Split


@dataclass(frozen=True)
class Evaluate:
    """Measure the model of a finished run again: losses and metrics on its test data, or another split."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """Folder of the run."""
    split: Split = "test"
    """Part of the data."""
    epoch: int | None = None
    """Epoch of which there is a snapshot (`flatmtl run --keep-every`); None: the one that counts."""
    root: str | None = None
    """Folder of the data; None: where they were when the run was trained."""
    device: str = "cpu"
    """Device, as torch names it."""
    json: bool = False
    """Print JSON, in the units of summary.json."""


@dataclass(frozen=True)
class Predict:
    """Ask the model of a finished run about pictures; the data that it was trained on need not be there.

    Labels and attributes are printed; maps, as of depth, are written as pictures. A picture that cannot be read is
    named and left out, and the exit code is 1 in the end.
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """Folder of the run."""
    inputs: Annotated[Positional[tuple[str, ...]], arg(metavar="INPUT ...")]
    """Pictures, or folders of pictures."""
    out: str | None = None
    """Folder for predictions.json, and for maps; None: labels are printed only."""
    device: str = "cpu"
    """Device, as torch names it."""
    json: bool = False
    """Print JSON: what predictions.json holds."""
    overwrite: bool = False
    """Replace files that are there."""

    def __post_init__(self) -> None:
        if not self.inputs:
            raise ValueError("name pictures or folders of pictures after the run: flatmtl predict RUN INPUT...")


@dataclass(frozen=True)
class Export:
    """Write the model of a finished run for programs that know nothing of flatmtl.

    There are model.pt2 (a program of torch.export), model.safetensors (the weights) and model.json (what to know). The
    data that it was trained on need not be there.
    """

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """Folder of the run."""
    out: str | None = None
    """Folder to write to; None: one of the run's name in exported/."""
    overwrite: bool = False
    """Replace files that are there."""
