"""Small pictures of the dense tasks, and what several processes make of them."""

import numpy as np
import torch
from torch import distributed

from flatmtl_bench.metrics import Depth, Normals, Segmentation

CLASSES = 4
TASKS = {"segmentation": Segmentation(tuple("abcd")), "depth": Depth(), "normals": Normals()}
VOID = {"segmentation": -1, "depth": 0, "normals": 0}
HEIGHT, WIDTH = 3, 4


def pictures(task, count, seed=0, missing=0.3, dtype=torch.float64):
    """Return outputs and targets of a task, a share of them without label; the last picture has one in any case."""
    rng = np.random.default_rng(seed)
    outputs = rng.standard_normal((count, TASKS[task].outputs, HEIGHT, WIDTH))
    if task == "segmentation":
        targets = rng.integers(0, CLASSES, (count, HEIGHT, WIDTH))
        void = rng.random(targets.shape) < missing
    elif task == "depth":
        targets = rng.uniform(0.5, 10, outputs.shape)
        void = rng.random(targets.shape) < missing
    else:
        targets = rng.standard_normal(outputs.shape)
        targets /= np.linalg.norm(targets, axis=1, keepdims=True)
        void = np.repeat(rng.random((count, 1, HEIGHT, WIDTH)) < missing, 3, axis=1)
    void[-1, ..., 0, 0] = False
    targets[void] = VOID[task]
    targets = torch.from_numpy(targets)
    return torch.from_numpy(outputs).to(dtype), targets if task == "segmentation" else targets.to(dtype)


def computed(task, averaging, batches):
    metrics = TASKS[task].metrics(averaging)
    for outputs, targets in batches:
        metrics.update(outputs, targets)
    return {name: value.item() for name, value in metrics.compute().items()}


def cut(outputs, targets, sizes):
    return list(zip(outputs.split(sizes), targets.split(sizes), strict=True))


def shares(task):
    """Return the batches of three ranks: two, one without a label and one with few, and nothing at all."""
    outputs, targets = pictures(task, 5, seed=3)
    without = (outputs[:1], torch.full_like(targets[:1], VOID[task]))
    return [cut(outputs[:4], targets[:4], [3, 1]), [without, (outputs[4:], targets[4:])], []]


def one_of_three(rank, store):
    """Compute all metrics as one of three processes, which meet in a file."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    found = {(task, a): computed(task, a, shares(task)[rank]) for task in TASKS for a in ("pooled", "batches")}
    distributed.destroy_process_group()
    return found
