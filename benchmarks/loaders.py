"""How many pictures a second the data sets give, alone and while a model trains on them.

``python benchmarks/loaders.py`` writes ``results/loaders.json`` beside this file (10 minutes on 2 cores). The real
NYUv2, CityScapes and CelebA are not needed: files in exactly their formats are made of rendered pictures. A loader
keeps up if the share of the time in which the model waits for pictures is small.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import tyro
from PIL import Image
from torch.utils.data import DataLoader

from flatmtl_bench import data, recipes
from flatmtl_bench.data.base import TaskDataset
from flatmtl_bench.environment import environment
from flatmtl_bench.files import write_whole
from flatmtl_bench.recipes.config import Config
from flatmtl_bench.trainer import Trainer

MAPS = {"segmentation": "label", "depth": "depth", "normals": "normal"}
SIZES = {"nyuv2": (288, 384), "cityscapes": (128, 256)}
FACES, FACE_SIZE = 256, (178, 218)


@dataclass(frozen=True)
class Options:
    """Time the loaders and write the result as JSON."""

    workers: tuple[int, ...] = (0, 1, 2)
    """Numbers of loader processes."""
    seconds: float = 8.0
    """How long each measurement lasts, at least."""
    steps: int = 2
    """Training steps of each model, after one that is not counted."""
    out: Path = Path(__file__).parent / "results" / "loaders.json"
    """The file to write."""


def main(options: Options) -> None:
    """Measure, and write what was found."""
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        records = [record(name, config, options) for name, config in configs(Path(folder)).items()]
    result = {"records": records, "environment": environment()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, json.dumps(result, indent=1) + "\n")


def configs(folder: Path) -> dict[str, Config]:
    """Return the recipes whose data are read, at the paper's sizes."""
    for name, size in SIZES.items():
        write_maps(folder / name, name, size)
    write_faces(folder / "celeba")
    chosen = {name: replace(recipes.build(f"{name}_mgda"), root=str(folder / name)) for name in SIZES}
    chosen["celeba"] = replace(recipes.build("celeba_ls"), root=str(folder / "celeba"), batch_size=32)
    chosen["scenes"] = recipes.build("scenes_mgda")
    chosen["streets"] = recipes.build("streets_mgda")
    chosen["faces40"] = recipes.build("faces40_ls")
    chosen["multimnist"] = replace(recipes.build("multimnist_mgda"), source="mnist5k")
    return {name: replace(config, device="cpu", loggers=[]) for name, config in chosen.items()}


def write_maps(root: Path, name: str, size: tuple[int, int]) -> None:
    """Write rendered pictures in the format of a data set of scenes, 48 for training and 2 for testing."""
    label = "label_7" if name == "cityscapes" else "label"
    embedded = {"nyuv2": "scenes", "cityscapes": "streets"}[name]
    for part, split, samples in (("train", "train", 48), ("val", "test", 2)):
        items = data.build(embedded, split, samples=samples, size=size).clean
        for index in range(samples):
            picture, targets = items[index]
            arrays = {"image": picture, **{MAPS[task]: target for task, target in targets.items()}}
            for kind, array in arrays.items():
                path = root / part / (label if kind == "label" else kind) / f"{index}.npy"
                path.parent.mkdir(parents=True, exist_ok=True)
                values = array.numpy().astype(np.float32)
                np.save(path, values if values.ndim == 2 else np.moveaxis(values, 0, -1))


def write_faces(root: Path) -> None:
    """Write drawn faces in the format of CelebA."""
    faces = data.build("faces40", "train", samples=FACES)
    pictures = root / "Img" / "img_align_celeba"
    for folder in (pictures, root / "Anno", root / "Eval"):
        folder.mkdir(parents=True)
    names = [f"{index + 1:06}.jpg" for index in range(FACES)]
    lines, parts = [str(FACES), " ".join(faces.objectives)], []
    for index, name in enumerate(names):
        picture, targets = faces[index]
        pixels = (picture.permute(1, 2, 0).numpy() * 255).astype(np.uint8)
        Image.fromarray(pixels).resize(FACE_SIZE).save(pictures / name)
        lines.append(" ".join([name, *("1" if int(target) else "-1" for target in targets.values())]))
        parts.append(f"{name} {0 if index < FACES - 32 else 1 + index % 2}")
    (root / "Anno" / "list_attr_celeba.txt").write_text("\n".join(lines) + "\n")
    (root / "Eval" / "list_eval_partition.txt").write_text("\n".join(parts) + "\n")


def record(name: str, config: Config, options: Options) -> dict[str, Any]:
    """Return what one data set gives alone and in training."""
    trainer = Trainer(config)
    dataset = trainer.data["train"]
    alone = {str(workers): rate(dataset, config.batch_size, workers, options.seconds) for workers in options.workers}
    return {
        "data": name,
        "model": config.model,
        "width": config.width,
        "batch": config.batch_size,
        "size": list(dataset[0][0].shape[1:]),
        "alone": alone,
        "training": training(trainer, options.steps),
    }


def rate(dataset: TaskDataset, batch: int, workers: int, seconds: float) -> float:
    """Return pictures a second that a loader gives to nobody, from the second pass over the data on."""
    count, started = 0, None
    for epoch in range(1_000_000):
        dataset.start_epoch(epoch)
        for inputs, _ in DataLoader(dataset, batch, shuffle=True, num_workers=workers):
            count += len(inputs)
        if started is not None and perf_counter() - started > seconds:
            return count / (perf_counter() - started)
        if started is None:
            count, started = 0, perf_counter()
    raise AssertionError


def training(trainer: Trainer, steps: int) -> Mapping[str, float]:
    """Return pictures a second of training, and the share of the time in which the model waits for them."""
    waited = stepped = 0.0
    pictures = -1
    batches = endless(trainer)
    for _ in range(steps + 1):
        started = perf_counter()
        inputs, targets, share = next(batches)
        loaded = perf_counter()
        trainer._step(trainer._closure(inputs, targets, share))
        if pictures < 0:  # the first step makes what later ones use again
            pictures = 0
            continue
        waited, stepped = waited + loaded - started, stepped + perf_counter() - loaded
        pictures += len(inputs)
    return {"rate": pictures / (waited + stepped), "waiting": waited / (waited + stepped)}


def endless(trainer: Trainer) -> Iterator[Any]:
    """Yield batches of one epoch after the other."""
    for epoch in range(1_000_000):
        trainer.data["train"].start_epoch(epoch)
        yield from trainer._batches("train", epoch)


if __name__ == "__main__":
    main(tyro.cli(Options))
