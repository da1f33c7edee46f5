"""Whether a peer may take part in chains: thresholds, three states, hysteresis. Pure.

::

                 fails FAILS tests in a row            fails badly WORSE tests in a row
     admitted  ------------------------->  quarantined  ------------------------->  rejected
        ^      <-------------------------       ^       <-------------------------     |
        |       passes PASSES in a row,         |          passes one                  |
        |       with room to spare              +--------------------------------------+

* *admitted*: serves, in chains too.
* *quarantined*: may use the mesh and serve whole models; gets no place in new chains. What runs
  over it goes on.
* *rejected*: gets no work of any kind from this node.

To come back a peer must be better than the threshold by a share, or it would go to and fro at the
border. A quarantined peer is tested again soon, then ever more seldom; an admitted one at a steady
pace. What was not measured fails no threshold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mesh.admission.measure import LinkSummary

State = Literal["admitted", "quarantined", "rejected"]

FAILS = 2  # failed tests in a row
PASSES = 3
WORSE = 4
BADLY = 4.0  # times the threshold
RECOVERED = 0.8  # of the threshold, to come back
RETEST = 60.0  # s between tests of an admitted peer
QUARANTINE_RETEST = 10.0  # s, doubled each time
LONGEST_RETEST = 300.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What a peer in a chain must reach. Seconds, bytes per second, shares, tokens per second.

    The defaults keep out what would spoil a chain for everyone: a token that takes half a second
    to the next stage, a link that carries no prompt in reasonable time, a machine at a crawl.
    """

    min_bandwidth: float = 250e3  # 2 Mbit/s: a chunk of 64 tokens of 4096 features in 2 s
    max_rtt: float = 0.5
    max_jitter: float = 0.2
    max_loss: float = 0.1
    min_tokens_per_second: float = 0.5


@dataclass(frozen=True, slots=True)
class Standing:
    """What is thought of a peer. ``reason`` is for people; ``next_test`` is when it is due."""

    state: State = "admitted"
    reason: str = ""
    since: float = 0.0
    fails: int = 0
    worse: int = 0
    passes: int = 0
    interval: float = RETEST
    next_test: float = 0.0


def next_look(standing: Standing, *, up: float, soon: float, now: float) -> float:
    """Seconds until the next look at a peer of which something is still to be measured.

    ``up`` is how long its link has been up: it is looked at after ``soon`` seconds, and ever more
    seldom, since what is in the way may go on. One in quarantine waits for its test.
    """
    test = max(0.0, standing.next_test - now)
    return min(test, max(soon, up / 4)) if standing.state == "admitted" else test


def judge(
    standing: Standing,
    measured: LinkSummary,
    tokens_per_second: float | None,
    thresholds: Thresholds,
    now: float,
) -> Standing:
    """The standing after a test. ``tokens_per_second``: what the peer says it makes, alone."""
    strict = standing.state != "admitted"
    found = problems(measured, tokens_per_second, thresholds, share=RECOVERED if strict else 1.0)
    badly = problems(measured, tokens_per_second, thresholds, by=BADLY)
    if found:
        after = replace(
            standing,
            fails=standing.fails + 1,
            worse=standing.worse + 1 if badly else 0,
            passes=0,
        )
        reason = "; ".join(badly or found)
    else:
        after = replace(standing, fails=0, worse=0, passes=standing.passes + 1)
        reason = ""
    match after.state:
        case "admitted" if after.fails >= FAILS:
            after = _enter(after, "quarantined", reason, now)
        case "quarantined" if after.worse >= WORSE:
            after = _enter(after, "rejected", reason, now)
        case "quarantined" if after.passes >= PASSES:
            after = _enter(after, "admitted", "recovered", now)
        case "rejected" if after.passes >= 1:
            after = replace(_enter(after, "quarantined", "recovering", now), passes=1)
        case "quarantined" | "rejected" if reason:
            after = replace(after, reason=reason)
    wait = after.interval if after.state != standing.state else _next_interval(after)
    return replace(after, next_test=now + wait, interval=wait)


def _enter(standing: Standing, state: State, reason: str, now: float) -> Standing:
    interval = RETEST if state == "admitted" else QUARANTINE_RETEST
    return replace(
        standing,
        state=state,
        reason=reason,
        since=now,
        fails=0,
        worse=0,
        passes=0,
        interval=interval,
    )


def _next_interval(standing: Standing) -> float:
    if standing.state == "admitted":
        # A first failure is looked into soon.
        return QUARANTINE_RETEST if standing.fails else RETEST
    # One that is recovering is not made to wait.
    if standing.passes:
        return QUARANTINE_RETEST
    return min(LONGEST_RETEST, standing.interval * 2)


def problems(
    measured: LinkSummary,
    tokens_per_second: float | None,
    limits: Thresholds,
    *,
    share: float = 1.0,
    by: float = 1.0,
) -> list[str]:
    """What is beyond ``share`` of its threshold, by a factor of ``by``."""
    found = []
    for name, value, limit, unit, scale in (
        ("rtt", measured.rtt, limits.max_rtt, "ms", 1e3),
        ("jitter", measured.jitter, limits.max_jitter, "ms", 1e3),
        ("loss", measured.loss, limits.max_loss, "%", 1e2),
    ):
        if value is not None and value > limit * share * by:
            found.append(f"{name} {value * scale:.3g} {unit}, allowed {limit * scale:.3g}")
    for name, value, limit, unit, scale in (
        ("upload", measured.upload, limits.min_bandwidth, "Mbit/s", 8e-6),
        ("download", measured.download, limits.min_bandwidth, "Mbit/s", 8e-6),
        ("speed", tokens_per_second, limits.min_tokens_per_second, "tokens/s", 1.0),
    ):
        if value is not None and value * share * by < limit:
            found.append(f"{name} {value * scale:.3g} {unit}, needed {limit * scale:.3g}")
    return found
