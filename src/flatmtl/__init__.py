"""Flat-minima multi-task learning: any gradient aggregator, made sharpness-aware.

Three nouns and one verb: an aggregator (:mod:`flatmtl.aggregators`), a perturbation (:class:`SAM`,
:class:`ASAM`) and task parameters (:class:`TaskParameters`) meet in :meth:`FlatMTL.backward`.
"""

from flatmtl.mtl import FlatMTL
from flatmtl.parameters import TaskParameters, split_parameters
from flatmtl.perturbations import ASAM, SAM
from flatmtl.stats import Monitor, StepResult

__all__ = ["ASAM", "SAM", "FlatMTL", "Monitor", "StepResult", "TaskParameters", "split_parameters"]
