"""Faces that are drawn: `distribution` says which attributes they have, `face` draws one, with shapes on a `canvas`.

Nothing here takes logarithms or sines, whose last digit depends on the machine: the same numbers give the same bytes.
"""
