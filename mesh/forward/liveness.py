"""How long silence may last before a node that works for us counts as lost.

The serving side sends a beat whenever it has had nothing to send for :data:`BEAT_SECONDS`; the
event loop that serves sends it, so a node that is stopped, cut off or hung falls silent. A node
that is merely busy does not lose its sessions for it: a pause of one second, right after a beat
was due, stays below :data:`SILENCE_SECONDS`.

Silence is counted in slices and not by a clock, because this node can be the one that was busy:
after a pause of its own, one slice has passed, and the frames that came meanwhile are read before
the next.
"""

from __future__ import annotations

BEAT_SECONDS = 0.25
SILENCE_SLICES = 6
SILENCE_SECONDS = 1.4
SLICE_SECONDS = SILENCE_SECONDS / SILENCE_SLICES

# A node whose loop lives but whose engine makes no progress. Generous: a long prompt takes its time
# and waits behind others, and so does a session that was preempted.
FIRST_TOKEN_SECONDS = 900.0
NEXT_TOKEN_SECONDS = 120.0
