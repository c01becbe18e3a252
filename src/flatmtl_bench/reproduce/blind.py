"""What a model comes to that does not look at its input: the least that a trained one has to be better than."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from flatmtl_bench import assembly
from flatmtl_bench.metrics import Attribute, Classification, Depth, Meters, Normals, Objective, Segmentation
from flatmtl_bench.recipes import Config

BATCH = 64


def blind(config: Config) -> dict[str, float]:
    """Return the test metrics of a model whose answer is always the one that suits the training data of a run best.

    That is the most frequent class, or for each pixel the most frequent class, the median of the depths, the mean of
    the normals. Names and units are those of the results of a run, of all tasks, whichever the run has.
    """
    training, test = assembly.dataset(config, "train").clean, assembly.dataset(config, "test")
    batches = [targets for _, targets in _batches(training)]
    objectives = training.objectives
    answers = {task: constant(each, torch.cat([b[task] for b in batches])) for task, each in objectives.items()}
    meters = Meters(objectives, config.averaging)
    for inputs, targets in _batches(test):
        meters.update({task: answer.expand(len(inputs), *answer.shape) for task, answer in answers.items()}, targets)
    return meters.compute()


def _batches(data: Dataset[tuple[Tensor, dict[str, Tensor]]]) -> DataLoader[tuple[Tensor, dict[str, Tensor]]]:
    return DataLoader(data, batch_size=BATCH, generator=torch.Generator())  # no random stream is touched


def constant(objective: Objective, targets: Tensor) -> Tensor:
    """Return the output, without the dimension of the batch, that suits many targets best whatever the input.

    Where a pixel has no label in any of them, it is that of all pixels.

    Args:
        objective: of the task.
        targets: ``(N, ...)``, of the training data.

    Raises:
        TypeError: the objective is of another kind than those of the benchmarks.

    Example:
        >>> constant(Classification(("cat", "dog", "cow")), torch.tensor([1, 1, 0])).argmax().item()
        1
        >>> constant(Depth(), torch.tensor([[[[2.0, 0.0]]], [[[4.0, 0.0]]], [[[9.0, 0.0]]]])).tolist()
        [[[4.0, 4.0]]]
    """
    match objective:
        case Classification():
            return _log_shares(torch.bincount(targets, minlength=objective.outputs))
        case Attribute():
            no, yes = _log_shares(torch.bincount(targets, minlength=2))
            return torch.stack([no, yes]) if objective.logits == 2 else (yes - no)[None]
        case Segmentation():
            classes = torch.arange(objective.outputs)[:, None, None]
            return _log_shares(torch.stack([(labels == classes).long() for labels in targets]).sum(dim=0))
        case Depth():
            known = targets.where(targets != 0, torch.nan)
            return known.nanmedian(dim=0).values.nan_to_num(nan=float(known.nanmedian()))
        case Normals():
            mean = targets.sum(dim=0)
            anywhere = mean.sum(dim=(1, 2), keepdim=True)
            return F.normalize(mean.where((mean != 0).any(dim=0), anywhere), dim=0)
    raise TypeError(f"nothing is known of a {type(objective).__name__}; expected an objective of flatmtl_bench.")


def _log_shares(counts: Tensor) -> Tensor:
    """Return the logarithm of the share of each class, as if each had been seen once more (Laplace, 1812)."""
    return ((counts + 1.0) / (counts + 1.0).sum(dim=0)).log()
