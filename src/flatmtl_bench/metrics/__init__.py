"""What a task's output is trained by and judged by: one objective for each kind of task."""

from flatmtl_bench.metrics.attribute import Attribute
from flatmtl_bench.metrics.classification import Classification
from flatmtl_bench.metrics.depth import Depth
from flatmtl_bench.metrics.normals import Normals
from flatmtl_bench.metrics.objective import Averaging, Better, MeanLoss, Meter, Meters, Objective
from flatmtl_bench.metrics.segmentation import Segmentation

__all__ = [
    "Attribute",
    "Averaging",
    "Better",
    "Classification",
    "Depth",
    "MeanLoss",
    "Meter",
    "Meters",
    "Normals",
    "Objective",
    "Segmentation",
]
