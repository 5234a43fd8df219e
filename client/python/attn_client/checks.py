"""Arguments that are not tensors: each is what it must be, or an error names it."""

from __future__ import annotations

import math
import operator
import re

_LONGEST_TIMEOUT_S = 1e8  # three years; gRPC's own arithmetic ends at some 290
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def integer(name: str, value, bits: int = 64, signed: bool = True) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from None
    least, most = (-2 ** (bits - 1), 2 ** (bits - 1) - 1) if signed else (0, 2 ** bits - 1)
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; it must be at least {least} and at most {most}")
    return number


def integers(name: str, values) -> list:
    if values is None:
        return []
    try:
        values = list(values.tolist() if hasattr(values, "tolist") else values)
    except TypeError:
        raise TypeError(f"{name} is {values!r}; it must be a sequence of integers") from None
    return [integer(f"{name}[{i}]", value) for i, value in enumerate(values)]


def number(name: str, value) -> float:
    if isinstance(value, (str, bytes)):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"{name} is {value!r}; it must be a number") from None


def timeout(name: str, value):
    """Seconds, or None for no limit."""
    if value is None:
        return None
    seconds = number(name, value)
    if math.isnan(seconds):
        raise ValueError(f"{name} is {value!r}; it must be a number of seconds")
    return None if seconds == math.inf else min(seconds, _LONGEST_TIMEOUT_S)


def one_of(name: str, value, known: dict):
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    return known[value]


def instance(name: str, value, kind: type):
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; it must be of type {kind.__name__}")
    return value


def traceparent(value):
    """W3C Trace Context: metadata of a call."""
    if value is None:
        return ()
    if not _TRACEPARENT.fullmatch(instance("traceparent", value, str)):
        raise ValueError(f"traceparent is {value!r}; it must be as W3C Trace Context says: "
                         "00-<32 hex digits>-<16>-<2>")
    return (("traceparent", value),)
