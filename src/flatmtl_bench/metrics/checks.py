"""Checks of outputs and targets, before two that do not fit make a wrong number."""

from collections.abc import Iterable, Sequence

from torch import Tensor

Shape = Sequence[str | int]
"""Sizes, and letters for sizes that are the same wherever the letter stands."""


def check_shapes(output: Tensor, expected_output: Shape, target: Tensor, expected_target: Shape) -> None:
    """Raise unless an output and a target have the shapes expected of them.

    Raises:
        ValueError: naming the shapes given and expected.

    Example:
        >>> import torch
        >>> check_shapes(torch.zeros(4, 2), ("B", 2), torch.zeros(4), ("B",))
        >>> check_shapes(torch.zeros(4, 2), ("B", 2), torch.zeros(3), ("B",))
        Traceback (most recent call last):
            ...
        ValueError: an output of shape (4, 2) with a target of shape (3); expected (B, 2) and (B). Let the model ...
    """
    sizes: dict[str, int] = {}
    for tensor, expected in ((output, expected_output), (target, expected_target)):
        if tensor.ndim != len(expected) or any(
            size != (want if isinstance(want, int) else sizes.setdefault(want, size))
            for want, size in zip(expected, tensor.shape, strict=True)
        ):
            raise ValueError(
                f"an output of shape {_words(output.shape)} with a target of shape {_words(target.shape)}; expected "
                f"{_words(expected_output)} and {_words(expected_target)}. Let the model give as many channels as the "
                "objective has outputs, at the size of the target."
            )


def check_labels(target: Tensor, low: int, high: int) -> None:
    """Raise if a label is not from ``low`` to ``high``.

    Raises:
        ValueError: naming the first such label.

    Example:
        >>> import torch
        >>> check_labels(torch.tensor([1, 0, 255]), 0, 1)
        Traceback (most recent call last):
            ...
        ValueError: a target holds the label 255; expected 0 to 1. Correct the labels, or say how many classes ...
    """
    outside = (target < low) | (target > high)
    if outside.any():
        raise ValueError(
            f"a target holds the label {target[outside][0].item()}; expected {low} to {high}. Correct the labels, or "
            "say how many classes there are."
        )


def _words(shape: Iterable[str | int]) -> str:
    return f"({', '.join(map(str, shape))})"
