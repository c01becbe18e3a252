"""Which of a run's test results counts: three protocols, always named beside the number."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def honest(rows: Sequence[Row], score: str) -> list[Row]:
    """The epoch with the best validation score, the first of equals."""
    return [_best(rows, f"validation/{score}")]


def paper(rows: Sequence[Row], score: str) -> list[Row]:
    """The last ten epochs, of which the mean counts."""
    return list(rows[-10:])


def official(rows: Sequence[Row], score: str) -> list[Row]:
    """The epoch with the best *test* score, as the authors' Multi-MNIST script has it."""
    return [_best(rows, f"test/{score}")]


PROTOCOLS: dict[str, Callable[[Sequence[Row], str], list[Row]]] = {
    "honest": honest,
    "paper": paper,
    "official": official,
}


def outcome(rows: Sequence[Row], protocol: str, score: str = "score") -> dict[str, Any]:
    """Return which epochs count under a protocol, and the means of their test and validation metrics.

    Args:
        rows: the metrics of each epoch, as in ``metrics.jsonl``.
        protocol: a key of ``PROTOCOLS``.
        score: the metric that epochs are chosen by; higher is better.

    Example:
        >>> rows = [{"epoch": e, "validation/score": v, "test/score": t}
        ...         for e, v, t in [(1, 0.5, 0.75), (2, 0.75, 0.5), (3, 0.25, 0.25)]]
        >>> outcome(rows, "honest")
        {'protocol': 'honest', 'epochs': [2], 'test': {'score': 0.5}, 'validation': {'score': 0.75}}
        >>> outcome(rows, "paper")
        {'protocol': 'paper', 'epochs': [1, 2, 3], 'test': {'score': 0.5}, 'validation': {'score': 0.5}}
    """
    chosen = PROTOCOLS[protocol](rows, score)
    means = {split: _means(chosen, f"{split}/") for split in ("test", "validation")}
    return {"protocol": protocol, "epochs": [row["epoch"] for row in chosen], **means}


def epochs_without_improvement(rows: Sequence[Row], protocol: str, score: str = "score") -> int:
    """Return how many epochs came after the first of the best, as a protocol that chooses one epoch sees it.

    Example:
        >>> rows = [{"epoch": e, "validation/score": v} for e, v in [(1, 0.25), (2, 0.5), (3, 0.5), (4, 0.25)]]
        >>> epochs_without_improvement(rows, "honest")
        2
    """
    return rows[-1]["epoch"] - PROTOCOLS[protocol](rows, score)[0]["epoch"] if rows else 0


def _means(rows: Sequence[Row], prefix: str) -> dict[str, float | None]:
    """Return the mean of each metric whose name begins so; a split that there is not has none."""
    names = [name for name in rows[0] if name.startswith(prefix)]
    return {name.removeprefix(prefix): _mean([row.get(name) for row in rows]) for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, None if a value was not finite and so is not in the file."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) else None


def _best(rows: Sequence[Row], name: str) -> Row:
    """Return the first of the best; a score that was not finite, and so is not in the file, is the worst."""
    return max(rows, key=lambda row: -math.inf if row[name] is None else row[name])
