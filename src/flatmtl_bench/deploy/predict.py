"""The command that asks a trained model about pictures."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatmtl_bench.analysis.trained import check_device
from flatmtl_bench.deploy.answers import endings, explained, in_words, is_map, label, write_map
from flatmtl_bench.deploy.model import Deployed, deployed
from flatmtl_bench.deploy.options import Predict
from flatmtl_bench.deploy.pictures import find_pictures, read_picture
from flatmtl_bench.files import check_writable, write_whole
from flatmtl_bench.output import Stop, answer, say

BATCH = 32
"""Pictures that the model is given at a time."""
NAME = "predictions.json"
Answers = dict[str, Any]
"""Task -> what the model says."""


def predict(command: Predict) -> int:
    """Print, or write, what a model says about pictures; return the exit code, 1 if some could not be read.

    Raises:
        Stop: maps have no folder, or a file is there already.
        RunError, ValueError, OSError: the run is not finished or not whole, or there are no pictures.
        WriteError: what was found cannot be written.
    """
    check_device(command.device)
    model = deployed(Path(command.run), command.device)
    paths, others = find_pictures(command.inputs)
    for sentence in others:
        say(sentence)
    _make_room(command, model, paths)
    asked, pictures = Asked(model, command.out), []
    for path, answers in asked.about(paths):
        pictures.append(json.dumps({"picture": str(path), "tasks": answers}))
        if not command.json:
            answer(f"{path}: {in_words(answers)}")
    text = _json(_head(model), asked.left_out, pictures)
    if command.json:
        answer(text)
    if command.out is not None:
        write_whole(Path(command.out, NAME), f"{text}\n")
        say(f"{len(pictures)} predictions are in {Path(command.out, NAME)}")
    return 1 if asked.left_out else 0


class Asked:
    """A model that is asked about pictures, and those that were left out, with the reason.

    Args:
        model: it.
        out: where maps are written to.
    """

    def __init__(self, model: Deployed, out: str | None) -> None:
        self.left_out: list[dict[str, str]] = []
        self._model, self._out = model, out
        self._resized = False

    def about(self, paths: Sequence[Path]) -> Iterator[tuple[Path, Answers]]:
        """Yield each picture that can be read, and what the model says about it."""
        for start in range(0, len(paths), BATCH):
            inputs = dict(self._inputs(paths[start : start + BATCH]))
            if not inputs:
                continue
            outputs = self._model.outputs(torch.stack(list(inputs.values())))
            for k, path in enumerate(inputs):
                of_picture = {task: output[k] for task, output in outputs.items()}
                if all(output.isfinite().all() for output in of_picture.values()):
                    yield path, self._answers(path, of_picture)
                else:
                    self._leave_out(path, f"{path}: the model gives numbers that are not finite.")

    def _inputs(self, paths: Sequence[Path]) -> Iterator[tuple[Path, Tensor]]:
        """Yield each picture that can be read, and the input that it becomes."""
        for path in paths:
            try:
                picture = read_picture(path, gray=self._model.form.gray)
            except ValueError as error:
                self._leave_out(path, str(error))
                continue
            self._tell_resized(path, picture)
            yield path, self._model.prepare(picture)

    def _tell_resized(self, path: Path, picture: Tensor) -> None:
        height, width = self._model.size
        if not self._resized and picture.shape[1:] != (height, width):
            self._resized = True
            given = " x ".join(map(str, picture.shape[1:]))
            say(f"{path} has {given} pixels; it and others that have not {height} x {width} are resized to that.")

    def _answers(self, path: Path, outputs: Mapping[str, Tensor]) -> Answers:
        found: Answers = {}
        for task, objective in self._model.objectives.items():
            if is_map(objective) and self._out is not None:
                place = Path(self._out, task, path.stem)
                found[task] = write_map(objective, outputs[task], self._model.form, place)
            else:
                found[task] = label(objective, outputs[task])
        return found

    def _leave_out(self, path: Path, reason: str) -> None:
        say(reason)
        self.left_out.append({"picture": str(path), "reason": reason})


def _make_room(command: Predict, model: Deployed, paths: Sequence[Path]) -> None:
    """Make the folders for what is written.

    Raises:
        Stop: something would be replaced, or has no place.
        OSError: they cannot be made.
    """
    maps = {task: endings(objective) for task, objective in model.objectives.items() if is_map(objective)}
    if command.out is None:
        if maps:
            raise Stop(f"{', '.join(maps)} of {model.run.name} are maps; say with --out FOLDER where to write them.")
        return
    out = Path(command.out)
    check_writable(out)
    if maps:
        _check_names(paths)
    files = [out / task / f"{path.stem}{ending}" for task in maps for ending in maps[task] for path in paths]
    there = next((path for path in (out / NAME, *files) if path.exists()), None)
    if there is not None and not command.overwrite:
        raise Stop(f"{there} exists. Use --overwrite to replace what is there, or another --out.")
    for folder in (out, *(out / task for task in maps)):
        folder.mkdir(parents=True, exist_ok=True)


def _check_names(paths: Sequence[Path]) -> None:
    """Raise unless the maps of all pictures have names of their own."""
    first: dict[str, Path] = {}
    for path in paths:
        if not path.stem.strip("."):
            raise Stop(f"{path} has no name that a map could have. Rename it.")
        other = first.setdefault(path.stem, path)
        if other != path:
            raise Stop(f"{other} and {path} would have maps of one name, {path.stem}. Give each its own --out.")


def _head(model: Deployed) -> dict[str, Any]:
    """Return the description of a model, with what the files of maps hold."""
    description = model.description()
    height, width = model.size
    for task, objective in model.objectives.items():
        if is_map(objective):
            size = f"{height} x {width} pixels, the size of the input"
            description["tasks"][task]["files"] = f"{size}; {explained(objective, model.form)}"
    return description


def _json(head: Mapping[str, Any], left_out: Sequence[Mapping[str, str]], pictures: Sequence[str]) -> str:
    """Return everything as JSON: what stands at the head, and a line for each picture."""
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    parts += [f'"left_out": {json.dumps(left_out)}', '"pictures": [\n' + ",\n".join(pictures) + "\n]"]
    return "{\n" + ",\n".join(parts) + "\n}"
