"""Loss weightings: aggregators that scale whole losses, and so the heads too.

Each takes the losses of the present tasks, shape ``(m,)``, and returns weights, constants of the step. Training is on
the weighted sum: one backward pass, whatever the number of tasks.

========  ==============  =======================================================================
name      class           weights
========  ==============  =======================================================================
ls        :class:`LS`     1: the sum of the losses
si        :class:`SI`     inverse losses: the sum of their logarithms
gls       :class:`GLS`    inverse losses times a common factor: their geometric mean
rlw       :class:`RLW`    drawn at each step
dwa       :class:`DWA`    larger for losses that fell less in the last epoch; counts epochs
uw        :class:`UW`     inverse variances, trained by the optimizer of the network
imtl_l    :class:`IMTLL`  scales that make losses equal, trained by the optimizer of the network
famo      :class:`FAMO`   such that losses fall at the same relative rate; learns after each step
========  ==============  =======================================================================
"""

from flatmtl.aggregators.weightings.dwa import DWA
from flatmtl.aggregators.weightings.famo import FAMO
from flatmtl.aggregators.weightings.gls import GLS
from flatmtl.aggregators.weightings.imtl_l import IMTLL
from flatmtl.aggregators.weightings.ls import LS
from flatmtl.aggregators.weightings.rlw import RLW
from flatmtl.aggregators.weightings.si import SI
from flatmtl.aggregators.weightings.uw import UW

__all__ = ["DWA", "FAMO", "GLS", "IMTLL", "LS", "RLW", "SI", "UW"]
