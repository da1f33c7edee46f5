"""From logits to a token. Pure numpy, and the same whatever else is in the batch.

A draw at position *n* of an output depends on the request and on *n* only: its one random number
comes from the Philox generator keyed by the seed with the counter at *n*, never from a stream that
other draws advance. So another node that resumes a generation, or a batch that is put together
otherwise, draws the same tokens.

Order: penalties and bias act on the logits; then temperature; then the filters top-k, top-p and
min-p, each on what the one before left; then one draw by inverting the cumulative distribution in
order of token id. (In that order and not by probability: two tokens that are about equally likely
may swap ranks with the last bit of a logit, and the draw must not care.) Log probabilities are
those of the model itself, before all of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.generation import SamplingParams

Floats = NDArray[np.float32]

# Below this temperature a draw could only be the most likely token.
_GREEDY_BELOW = 1e-5
# The cumulative sum over a vocabulary is taken in runs of this many tokens: first over the runs,
# then inside one of them.
_RUN = 256
_COUNTER_KEY = 0x6D657368  # sets this use of Philox apart from others with the same seed


class SamplingError(Exception):
    """Nothing can be drawn: logits that are no numbers, or parameters that make them so or name
    tokens that the model does not have."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token. ``logprob`` is None unless it was asked for; ``top`` holds (token id, logprob)
    of the most likely tokens, best first, ties by lower id."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """What the draws of one generation need to remember: its parameters and token counts.

    ``prompt`` are the prompt's token ids (the repetition penalty counts them). Token ids that came
    by ``resume`` are told with :meth:`count` like any others.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int] = ()) -> None:
        self.params = params
        self.greedy = params.temperature < _GREEDY_BELOW
        self._counts: dict[int, int] = {}
        self._penal = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._repeat = params.repetition_penalty != 1
        self._seen = set(prompt) if self._repeat else set()
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self._bias = np.fromiter(params.logit_bias.values(), np.float32)
        self._largest = max((*self._seen, *params.logit_bias), default=-1)  # token id to adjust
        self.adjusts = self._penal or self._repeat or len(self._bias_ids) > 0
        self.plain = self.greedy and not self.adjusts and params.logprobs is None

    def count(self, token_id: int) -> None:
        """A token has become part of the output."""
        if self._penal:
            self._counts[token_id] = self._counts.get(token_id, 0) + 1
        if self._repeat:
            self._seen.add(token_id)
        if self.adjusts:
            self._largest = max(self._largest, token_id)

    def adjust(self, row: Floats) -> Floats:
        """Penalties and bias on one row of logits: a changed copy. Raises SamplingError."""
        if self._largest >= len(row):
            raise SamplingError(f"the model has {len(row)} tokens, none with id {self._largest}")
        row = row.copy()
        params = self.params
        if self._repeat and self._seen:
            ids = np.fromiter(self._seen, np.int64, len(self._seen))
            seen = row[ids]
            factor = np.float32(params.repetition_penalty)
            row[ids] = np.where(seen > 0, seen / factor, seen * factor)
        if self._penal and self._counts:
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            row[ids] -= params.presence_penalty + np.float32(params.frequency_penalty) * counts
        row[self._bias_ids] += self._bias
        return row


def sample(
    logits: Floats, samplers: Sequence[Sampler], positions: Sequence[int]
) -> list[Sampled | SamplingError]:
    """Draw one token for each row of ``logits`` f32 ``[rows, vocabulary]``.

    ``positions[i]`` is how many tokens row *i*'s output has already. A row that nothing can be
    drawn from gives its error in place of a token, so that the other rows go on.
    """
    best = logits.argmax(axis=1)  # one pass for all rows; a NaN counts as the largest
    peaks = logits[np.arange(len(best)), best]
    drawn: list[Sampled | SamplingError] = []
    for number, sampler in enumerate(samplers):
        if not np.isfinite(peaks[number]):
            drawn.append(SamplingError("the model gave logits that are no numbers"))
        elif sampler.plain:
            drawn.append(Sampled(int(best[number])))
        else:
            try:
                drawn.append(_sample_row(logits[number], sampler, positions[number]))
            except SamplingError as error:
                drawn.append(error)
    return drawn


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of a position: 53 bits of Philox-4x64 (Salmon et al., 2011)."""
    bits = int(np.random.Philox(key=(_COUNTER_KEY << 64) | seed, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def _sample_row(row: Floats, sampler: Sampler, position: int) -> Sampled:
    params = sampler.params
    adjusted = row
    if sampler.adjusts:
        with np.errstate(over="ignore"):
            adjusted = sampler.adjust(row)
        if not np.isfinite(adjusted.max()):
            raise SamplingError("penalties have made the logits too large")
    if sampler.greedy:
        token = int(adjusted.argmax())
    else:
        token = _draw(*filtered(adjusted, params), uniform(params.seed, position))
    if params.logprobs is None:
        return Sampled(token)
    return _with_logprobs(row, token, params.logprobs)


def filtered(row: Floats, params: SamplingParams) -> tuple[NDArray[np.intp], Floats]:
    """The token ids that may be drawn, ascending, and their weights: f32, the largest is 1.

    Tokens that tie with the last one kept are kept too.
    """
    weights = np.exp((row - row.max()) / np.float32(params.temperature))
    ids = np.arange(len(weights))
    if 0 < params.top_k < len(weights):
        ids, weights = _keep(ids, weights, _kth_largest(weights, params.top_k))
    if params.top_p < 1:
        # All tokens below the first threshold together have less than 1 - top_p, so they cannot
        # belong to the nucleus and need no sorting.
        total = float(weights.sum(dtype=np.float64))
        ids, weights = _keep(ids, weights, (1 - params.top_p) * total / len(weights))
        largest = np.sort(weights)[::-1]
        share = np.cumsum(largest, dtype=np.float64)
        last = int(np.searchsorted(share, params.top_p * total))
        ids, weights = _keep(ids, weights, float(largest[min(last, len(largest) - 1)]))
    if params.min_p > 0:
        ids, weights = _keep(ids, weights, params.min_p)
    return ids, weights


def _keep(
    ids: NDArray[np.intp], weights: Floats, threshold: float
) -> tuple[NDArray[np.intp], Floats]:
    kept = np.flatnonzero(weights >= np.float32(threshold))
    return ids[kept], weights[kept]


def _kth_largest(values: Floats, k: int) -> float:
    """The k-th largest of ``values``, without partitioning all of them.

    Of the maxima of the runs the k-th largest has at least k values at or above it, so nothing
    below it can be the answer.
    """
    starts = np.arange(0, len(values), _RUN)
    if k < len(starts):
        maxima = np.maximum.reduceat(values, starts)
        values = values[values >= np.partition(maxima, len(maxima) - k)[len(maxima) - k]]
    return float(np.partition(values, len(values) - k)[len(values) - k])


def _draw(ids: NDArray[np.intp], weights: Floats, u: float) -> int:
    """The token at share ``u`` of the cumulative distribution, in order of token id."""
    starts = np.arange(0, len(weights), _RUN)
    runs = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = min(u * float(runs[-1]), float(np.nextafter(runs[-1], 0)))
    run = int(np.searchsorted(runs, target, side="right"))  # has weight: it ends above the target
    before = float(runs[run - 1]) if run else 0.0
    inside = weights[starts[run] : starts[run] + _RUN]
    shares = before + np.cumsum(inside, dtype=np.float64)
    token = int(np.searchsorted(shares, target, side="right"))
    if token == len(inside):  # by rounding: then it is the last token with any weight
        token = int(np.flatnonzero(inside)[-1])
    return int(ids[starts[run] + token])


def _with_logprobs(row: Floats, token: int, count: int) -> Sampled:
    peak = row.max()
    log_total = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
    logprob = float(row[token]) - log_total
    if not count:
        return Sampled(token, logprob)
    count = min(count, len(row))
    candidates = np.flatnonzero(row >= np.float32(_kth_largest(row, count)))
    order = np.lexsort((candidates, -row[candidates]))[:count]
    top = tuple((int(i), float(row[i]) - log_total) for i in candidates[order])
    return Sampled(token, logprob, top)
