"""The model of a finished run, ready for pictures; the data that it was trained on need not be there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatmtl_bench import assembly
from flatmtl_bench.analysis.trained import put_back
from flatmtl_bench.data.form import Form, form
from flatmtl_bench.metrics import Attribute, Classification, Depth, Normals, Objective, Segmentation
from flatmtl_bench.reports.reading import Run, find
from flatmtl_bench.runs import RunError


@dataclass(frozen=True, eq=False)
class Deployed:
    """A model as the epoch left it that counts, in eval mode.

    Attributes:
        run: what its folder tells.
        epoch: that left it.
        model: input, tasks -> {task: output}.
        objectives: of the tasks that the model was trained on.
        form: what its inputs are like.
        size: their height and width.
        device: of the model.
    """

    run: Run
    epoch: int
    model: nn.Module
    objectives: Mapping[str, Objective]
    form: Form
    size: tuple[int, int]
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an input."""
        return (1 if self.form.gray else 3, *self.size)

    def prepare(self, picture: Tensor) -> Tensor:
        """Return the input for a picture, uint8 ``(1 or 3, h, w)``, made as those were that it was trained on."""
        return self.form.prepare(picture, self.size)

    @torch.inference_mode()
    def outputs(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the output of each task for a batch of inputs, on the CPU."""
        outputs = self.model(inputs.to(self.device), list(self.objectives))
        return {task: outputs[task].cpu() for task in self.objectives}

    def description(self) -> dict[str, Any]:
        """Return what a user of the model has to know, as plain values."""
        return {
            "run": self.run.name,
            "epoch": self.epoch,
            "data": self.run.config.data.name,
            "model": self.run.config.model,
            "input": {
                "shape": list(self.shape),
                "dtype": "float32",
                "range": list(self.form.range),
                "channels": self.form.channels,
                "preprocessing": self.form.preprocessing,
            },
            "tasks": {task: _described(objective, self.form) for task, objective in self.objectives.items()},
        }


def _described(objective: Objective, form: Form) -> dict[str, Any]:
    kind = {"kind": type(objective).__name__.lower(), "outputs": objective.outputs}
    match objective:
        case Classification():
            return {**kind, "meaning": "logits of the classes (softmax)", "classes": list(objective.classes)}
        case Attribute():
            two = objective.logits == 2
            return {**kind, "meaning": "logits of no and yes (softmax)" if two else "logit of yes (sigmoid)"}
        case Segmentation():
            return {**kind, "meaning": "logits of the classes of each pixel", "classes": list(objective.classes)}
        case Depth():
            return {**kind, "meaning": form.depth}
        case Normals():
            return {**kind, "meaning": "direction of each pixel, of any length: x right, y up, z towards the camera"}
    return kind


def finished(path: Path) -> Run:
    """Return the finished run in a folder.

    Raises:
        RunError: there is none, or more than one.
        OSError: the folder is not there.
    """
    found = find([path])
    match found.runs:
        case [run]:
            return run
        case []:
            why = found.others[0] if found.others else f"{path} holds no run."
            raise RunError(f"{why} Expected the folder of a finished run, as `flatmtl run RECIPE` makes one.")
        case runs:
            raise RunError(f"{path} holds {len(runs)} runs. Name one of them, as {runs[0].path}.")


def deployed(path: Path, device: str = "cpu") -> Deployed:
    """Return the model of a finished run.

    Raises:
        RunError, ValueError, OSError: the run is not finished or not whole, or its model cannot be made.
    """
    run = finished(path)
    known = form(run.config.data)
    size, objectives = _size(run, known), assembly.trained(run.config, known.objectives)
    model = assembly.model(run.config, objectives, 1 if known.gray else 3)
    epoch, where = put_back(run, model), torch.device(device)
    return Deployed(run, epoch, model.eval().to(where), objectives, known, size, where)


def _size(run: Run, known: Form) -> tuple[int, int]:
    """Return height and width of the inputs that a run was trained on."""
    match run.summary.get("input"):
        case [int(), int(height), int(width)] if min(height, width) > 0:
            return height, width
        case None if known.size is not None:  # a run of before summaries had it
            return known.size
    raise RunError(
        f"{run.path / 'summary.json'} does not say which shape inputs have: 'input' should be channels, height and "
        "width. Train the run again."
    )
