"""The command that writes a trained model for programs that know nothing of flatmtl."""

import io
import json
import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from flatmtl_bench.deploy.model import Deployed, deployed
from flatmtl_bench.deploy.options import Export
from flatmtl_bench.environment import environment
from flatmtl_bench.files import check_writable, remove, write_whole
from flatmtl_bench.output import Stop, answer, say
from flatmtl_bench.runs import finite

PROGRAM, WEIGHTS, DESCRIPTION = "model.pt2", "model.safetensors", "model.json"
TRACED = 2
"""Pictures of the batch that a program is traced with: 0 and 1 would be taken for fixed sizes."""
TRIED = (1, 3, 5)
"""Sizes of the batches that a program is tried with."""
REMEDY = (
    "Write its forward without branches on the values of tensors, random numbers or a fixed batch size (see "
    f"https://docs.pytorch.org/docs/stable/export.html), or build it from its code and load {WEIGHTS}."
)
TOLERANCE = 1e-5
"""Part of the largest output by which a program may differ from the model."""


class Refused(Exception):
    """A model cannot be written as a program; the text says why."""


def export(command: Export) -> int:
    """Write program, weights and description of a model, and print their paths; return the exit code.

    It is 1 if torch.export refuses the model: weights and description are written all the same.

    Raises:
        Stop: a file is there already.
        RunError, ValueError, OSError: the run is not finished or not whole, or its weights are no plain tensors.
        WriteError: a file cannot be written.
    """
    model = deployed(Path(command.run))
    out = Path("exported", model.run.name) if command.out is None else Path(command.out)
    _make_room(out, command.overwrite)
    refused = None
    files: dict[str, bytes | memoryview] = {WEIGHTS: weights(model.model)}
    try:
        files[PROGRAM] = program(model)
    except Refused as error:
        refused = str(error)
    text = json.dumps(described(model, list(files), refused), indent=2, allow_nan=False)
    for name in (PROGRAM, WEIGHTS, DESCRIPTION):
        remove(out / name)  # all three are of one model, whenever this ends
    for name, content in {**files, DESCRIPTION: f"{text}\n"}.items():
        write_whole(out / name, content)
        answer(out / name)
    if refused is None:
        return 0
    say(f"flatmtl: {out / PROGRAM} is not there: {refused}")
    return 1


def _make_room(out: Path, overwrite: bool) -> None:
    check_writable(out)
    there = [str(out / name) for name in (PROGRAM, WEIGHTS, DESCRIPTION) if (out / name).exists()]
    if there and not overwrite:
        raise Stop(f"{', '.join(there)} exists. Use --overwrite to replace it, or another --out.")
    out.mkdir(parents=True, exist_ok=True)


def weights(model: nn.Module) -> bytes:
    """Return parameters and buffers as a file of safetensors, by the names of ``state_dict``.

    What several names share is in the file once for each, so that ``load_state_dict`` finds all of them.

    Raises:
        ValueError: the state holds something else than tensors.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> sorted(safetensors.torch.load(weights(nn.Sequential(layer, layer))))
        ['0.bias', '0.weight', '1.bias', '1.weight']
    """
    state = model.state_dict()
    if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ValueError(
            f"{', '.join(others)} of the model's state_dict are no tensors, so that safetensors cannot hold them. Keep "
            "them in buffers, or leave them out of the state."
        )
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    return safetensors.torch.save(copies, {"format": "pt"})


class Outputs(nn.Module):
    """A model as a function of the input alone: input -> {task: output}."""

    def __init__(self, model: nn.Module, tasks: list[str]) -> None:
        super().__init__()
        self.model, self.tasks = model, tasks

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the output of each task."""
        outputs = self.model(x, self.tasks)
        return {task: outputs[task] for task in self.tasks}


def program(model: Deployed) -> memoryview:
    """Return a model as a file of torch.export: inputs ``(B, C, H, W)`` for any ``B`` -> {task: output}.

    Raises:
        Refused: torch.export cannot take the model down, or what it takes down does something else.
    """
    outputs = Outputs(model.model, list(model.objectives)).eval()
    generator = torch.Generator().manual_seed(0)
    example = torch.rand(TRACED, *model.shape, generator=generator)
    content = io.BytesIO()
    try:
        with torch.no_grad(), _quiet():
            batch = {0: torch.export.Dim("batch")}
            taken = torch.export.export(outputs, (example,), dynamic_shapes=(batch,), strict=False)
            torch.export.save(taken, content)
            content.seek(0)
            loaded = torch.export.load(content).module()
            for size in TRIED:
                _compare(outputs, loaded, torch.rand(size, *model.shape, generator=generator))
    except Refused:
        raise
    except Exception as error:  # a model of anyone's can fail in any way
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise Refused(f"torch.export refuses {model.run.config.model} ({reason}). {REMEDY}") from error
    return content.getbuffer()


@contextmanager
def _quiet() -> Iterator[None]:
    """Within it torch does not print the graph of what it refuses: the reason is in its error."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _compare(model: nn.Module, loaded: nn.Module, inputs: Tensor) -> None:
    """Raise unless a program gives what the model gives."""
    expected, found = model(inputs), loaded(inputs)
    for task, output in expected.items():
        gap, largest = (found[task] - output).abs().max(), output.abs().max()
        if not gap <= TOLERANCE * largest:
            raise Refused(
                f"torch.export takes down something else than the model does: for {len(inputs)} pictures {task} "
                f"differs by {gap:.2g}, of at most {largest:.2g}. {REMEDY}"
            )


def described(model: Deployed, files: list[str], refused: str | None) -> dict[str, Any]:
    """Return what a user of the files has to know, as plain values."""
    run = model.run
    row = next((row for row in run.rows if row["epoch"] == model.epoch), {})
    return {
        **model.description(),
        "files": files,
        "refused": refused,
        "metrics": finite({name: value for name, value in row.items() if name.startswith(("test/", "validation/"))}),
        "better": run.better,
        "config": replace(run.config, root=None).to_dict(),
        "trained_with": run.environment.get("packages"),
        "exported_with": environment()["packages"],
    }
