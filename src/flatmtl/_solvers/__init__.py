r"""Exact solutions of the ``m``-by-``m`` problems behind the aggregators, from the Gramian alone.

Everything here takes and returns float64 tensors on the CPU and uses relative tolerances only.

- :mod:`~flatmtl._solvers.quadratic`: weights that minimise a quadratic form, by an active-set method.
- :mod:`~flatmtl._solvers.conflict_averse`: the best direction for the worst-served row, in a ball around the mean.
- :mod:`~flatmtl._solvers.fair`: weights with :math:`G w = w^{-1/\alpha}`, by Newton's method.
"""
