"""Losses and metrics of dense prediction in NumPy, pixel by pixel where that is plain.

Each function takes one batch, or a whole set as one batch, and returns None where no pixel has a label.
"""

import numpy as np


def segmentation(logits, labels):
    """Return loss and metrics; logits ``(B, C, H, W)``, labels ``(B, H, W)``, -1 for none."""
    classes = logits.shape[1]
    pairs = [
        (logits[b, :, i, j], labels[b, i, j]) for b, i, j in np.ndindex(labels.shape) if 0 <= labels[b, i, j] < classes
    ]
    if not pairs:
        return None
    losses = [np.log(np.exp(z - z.max()).sum()) + z.max() - z[label] for z, label in pairs]
    truth, predicted = np.array([label for _, label in pairs]), np.array([z.argmax() for z, _ in pairs])
    overlaps = []
    for c in range(classes):
        union = ((truth == c) | (predicted == c)).sum()
        if union:
            overlaps.append(((truth == c) & (predicted == c)).sum() / union)
    return {
        "loss": np.mean(losses),
        "miou": np.mean(overlaps),
        "pixel_accuracy": np.mean(truth == predicted),
        "valid": len(pairs),
    }


def depth(predicted, truth):
    """Return loss and metrics; both ``(B, 1, H, W)``, a truth of 0 for none."""
    pairs = [(p, t) for p, t in zip(predicted.ravel(), truth.ravel(), strict=True) if t != 0]
    if not pairs:
        return None
    absolute = np.array([abs(p - t) for p, t in pairs])
    relative = np.array([abs(p - t) / t for p, t in pairs])
    return {"loss": absolute.mean(), "abs_err": absolute.mean(), "rel_err": relative.mean(), "valid": len(pairs)}


def normals(predicted, truth):
    """Return loss and metrics; both ``(B, 3, H, W)``, a truth of (0, 0, 0) for none, else of length 1."""
    rows = [np.moveaxis(vectors, 1, -1).reshape(-1, 3) for vectors in (predicted, truth)]
    pairs = [(p / np.linalg.norm(p), t) for p, t in zip(*rows, strict=True) if any(t)]
    if not pairs:
        return None
    cosines = np.array([p @ t for p, t in pairs])
    degrees = np.degrees(np.arctan2([np.linalg.norm(np.cross(p, t)) for p, t in pairs], cosines))
    shares = {f"within_{limit}": np.mean(degrees < limit) for limit in (11.25, 22.5, 30)}
    means = {"mean": degrees.mean(), "median": np.median(degrees)}
    return {"loss": 1 - cosines.mean(), **means, **shares, "valid": len(pairs)}
