"""Times of several callables that take turns, and what they come to beside one another."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Seconds = dict[str, list[float]]  # one per round


def time_in_turns(
    calls: Mapping[str, Callable[..., object]],
    repeats: int,
    warm_up: int = 2,
    prepare: Mapping[str, Callable[[], object]] | None = None,
) -> Seconds:
    """Time each callable once a round, so that whatever else the machine does meets all of them.

    Args:
        calls: What to time, by name.
        repeats: Number of rounds; every other one goes backwards, so that none always follows the same neighbour.
        warm_up: Untimed rounds before the first.
        prepare: By name, what is done before each call, untimed; its result is the call's argument.

    Returns:
        Seconds of each call, one per round.
    """
    prepare = prepare or {}
    seconds: Seconds = {name: [] for name in calls}
    for turn in range(-warm_up, repeats):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            arguments = (prepare[name](),) if name in prepare else ()
            start = time.perf_counter()
            calls[name](*arguments)
            elapsed = time.perf_counter() - start
            if turn >= 0:
                seconds[name].append(elapsed)
    return seconds


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the quartiles, the median in the middle."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def ratio_to(seconds: Seconds, base: str) -> dict[str, list[float]]:
    """Return the quartiles of each callable's time over the base's in the same round."""
    return {
        name: quartiles([mine / theirs for mine, theirs in zip(values, seconds[base], strict=True)])
        for name, values in seconds.items()
    }


def summarize(seconds: Seconds, bases: Sequence[str], peak_bytes: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return a row per callable.

    Args:
        seconds: What time_in_turns returned.
        bases: Callables that the others are compared with.
        peak_bytes: Peak memory of each, or nothing.

    Returns:
        Rows with the median, every time, and by base the quartiles of the time ratio and the ratio of the peaks.
    """
    rows: dict[str, dict[str, Any]] = {
        name: {"median_s": statistics.median(values), "seconds": values, "time_ratio": {}, "memory_ratio": {}}
        for name, values in seconds.items()
    }
    for base in bases:
        for name, ratio in ratio_to(seconds, base).items():
            rows[name]["time_ratio"][base] = ratio
            if peak_bytes:
                rows[name]["memory_ratio"][base] = peak_bytes[name] / peak_bytes[base]
    for name, peak in peak_bytes.items():
        rows[name]["peak_bytes"] = peak
    return rows
