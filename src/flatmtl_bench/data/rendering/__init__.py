"""A small ray-caster, and the rooms and streets that it shows.

`shapes` knows where rays meet a surface, `textures` what is painted on it, `parts` puts both at a place, `camera` says
where from it is looked at, `lights` what shines, and `caster` makes the picture with its exact labels, depth and
normals. `furniture` and `rooms`, `traffic` and `streets` compose worlds of these; `flaws` takes away what a sensor or
an annotator would have missed.

Units are metres and radians. A world has x to the right, y ahead and z up; a camera has x to the right, y up and z
towards the viewer, so a surface at depth d in front of it lies at ``d * (x, y, -1)``.
"""
