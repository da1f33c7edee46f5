"""One model across machines: stages that pass activations on, and the head that runs the ring.

``frames`` and ``messages`` are what crosses the wire. ``sessions`` (a stage's side), ``schedule``
and ``recovery`` (the head's side) decide without a clock or a socket; ``host``, ``service`` and
``chain`` are the thin trio parts around them.
"""
