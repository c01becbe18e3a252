"""The figures that `flatmtl figure` makes of finished runs."""

from flatmtl_bench.figures.base import Figure
from flatmtl_bench.figures.bound import BoundFigure
from flatmtl_bench.figures.calibration import CalibrationFigure
from flatmtl_bench.figures.conflict import ConflictFigure
from flatmtl_bench.figures.curves import CurvesFigure
from flatmtl_bench.figures.decomposition import DecompositionFigure
from flatmtl_bench.figures.gradnorm import GradnormFigure
from flatmtl_bench.figures.landscape import LandscapeFigure
from flatmtl_bench.figures.rho import RhoFigure
from flatmtl_bench.figures.robustness import RobustnessFigure
from flatmtl_bench.figures.segmentation import SegmentationFigure
from flatmtl_bench.figures.sharpness import SharpnessFigure
from flatmtl_bench.figures.spectrum import SpectrumFigure
from flatmtl_bench.figures.strategies import StrategiesFigure

FIGURES: dict[str, type[Figure]] = {
    "conflict": ConflictFigure,
    "calibration": CalibrationFigure,
    "curves": CurvesFigure,
    "landscape": LandscapeFigure,
    "rho": RhoFigure,
    "robustness": RobustnessFigure,
    "segmentation": SegmentationFigure,
    "sharpness": SharpnessFigure,
    "gradnorm": GradnormFigure,
    "strategies": StrategiesFigure,
    "bound": BoundFigure,
    "decomposition": DecompositionFigure,
    "spectrum": SpectrumFigure,
}
"""For each name what is measured and drawn."""
