"""Discrete Gaussian numbers by integer arithmetic alone (Karney 2016, algorithm D, for centre 0 and an integer scale).

Pr[n] is proportional to exp(-n^2 / (2 scale^2)) over all integers, exactly: no logarithm, no rounding. The draws are
vectorised; each coordinate keeps trying until it accepts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparsedp.dp.randomness import BLOCK, Key, Words, words

Integers = npt.NDArray[np.int64]
CHUNK = 1 << 13  # coordinates that share a stream
LARGEST_SCALE = 1 << 26  # so that every product below fits in 64 bits


def discrete_gaussian(scale: int, key: Key, start: int, stop: int, name: str, *where: int | str) -> Integers:
    """Numbers [start, stop) of the stream; a part is the same whether drawn alone or with others."""
    if not 1 <= scale <= LARGEST_SCALE:
        raise AssertionError(f"scale {scale} is outside [1, 2**26]")
    parts = []
    for chunk in range(start // CHUNK, -(-stop // CHUNK)):
        drawn = _chunk(scale, _Source(key, name, *where, chunk))
        parts.append(drawn[max(start - chunk * CHUNK, 0) : stop - chunk * CHUNK])
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


class _Source:
    """Words of one stream, one after the other."""

    def __init__(self, key: Key, name: str, *where: int | str) -> None:
        self._key, self._place, self._next = key, (name, *where), 0
        self._spare: Words = np.zeros(0, np.uint64)

    def take(self, count: int) -> Words:
        if count > len(self._spare):
            more = -(-(count - len(self._spare)) // BLOCK) * BLOCK
            fresh = words(self._key, self._next, self._next + more, *self._place)  # type: ignore[arg-type]
            self._next += more
            self._spare = np.concatenate([self._spare, fresh])
        taken, self._spare = self._spare[:count], self._spare[count:]
        return taken

    def below(self, bound: Words) -> Words:
        """Exactly uniform integers in [0, bound), by rejection."""
        largest = np.uint64(2**64 - 1)
        limit = largest - (largest % bound + np.uint64(1)) % bound  # the last word before an incomplete cycle
        drawn = self.take(len(bound)).copy()
        again = np.flatnonzero(drawn > limit)
        while len(again):
            drawn[again] = self.take(len(again))
            again = again[drawn[again] > limit[again]]
        return drawn % bound


def _chunk(scale: int, source: _Source) -> Integers:
    numbers = np.zeros(CHUNK, np.int64)
    open_places = np.arange(CHUNK)
    while len(open_places):
        drawn, accepted = _attempt(scale, len(open_places), source)
        numbers[open_places[accepted]] = drawn[accepted]
        open_places = open_places[~accepted]
    return numbers


def _attempt(scale: int, count: int, source: _Source) -> tuple[Integers, npt.NDArray[np.bool_]]:
    k = _whole_part(count, source)
    accepted = _all_true(k * (k - np.minimum(k, 1)), source)  # with probability exp(-k (k - 1) / 2)
    sign = (source.take(count) & np.uint64(1)).astype(np.int64) * 2 - 1
    j = source.below(np.full(count, scale, np.uint64))
    accepted &= ~((k == 0) & (j == 0) & (sign < 0))  # zero has one sign
    tries = np.where(accepted, k + np.uint64(1), np.uint64(0))
    s = np.uint64(scale)
    accepted &= _exponential_trials(tries, j * (np.uint64(2) * k * s + j), np.uint64(2) * (k + np.uint64(1)) * s * s, source)
    return sign * (k * s + j).astype(np.int64), accepted


def _whole_part(count: int, source: _Source) -> Words:
    """k with probability proportional to exp(-k / 2)."""
    k = np.zeros(count, np.uint64)
    running = np.arange(count)
    while len(running):
        running = running[_half_trials(len(running), source)]
        k[running] += np.uint64(1)
    return k


def _all_true(tries: Words, source: _Source) -> npt.NDArray[np.bool_]:
    """Whether so many trials of probability exp(-1/2) all succeed."""
    good = np.ones(len(tries), np.bool_)
    done = np.uint64(0)
    while len(running := np.flatnonzero(good & (tries > done))):
        good[running] = _half_trials(len(running), source)
        done += np.uint64(1)
    return good


def _half_trials(count: int, source: _Source) -> npt.NDArray[np.bool_]:
    ones = np.ones(count, np.uint64)
    return _exponential(ones, np.uint64(2) * ones, source)


def _exponential_trials(tries: Words, num: Words, den: Words, source: _Source) -> npt.NDArray[np.bool_]:
    """Whether `tries` trials of probability exp(-num / den) all succeed, entry by entry."""
    good = np.ones(len(tries), np.bool_)
    done = np.uint64(0)
    while len(running := np.flatnonzero(good & (tries > done))):
        good[running] = _exponential(num[running], den[running], source)
        done += np.uint64(1)
    return good


def _exponential(num: Words, den: Words, source: _Source) -> npt.NDArray[np.bool_]:
    """Trials of probability exp(-num / den), for 0 <= num <= den: the first n with a failed trial of num / (den n) is odd."""
    rounds = np.ones(len(num), np.uint64)
    running = np.arange(len(num))
    while len(running):
        won = source.below(den[running] * rounds[running]) < num[running]
        running = running[won]
        rounds[running] += np.uint64(1)
    return (rounds & np.uint64(1)).astype(np.bool_)
