"""What a call that did not succeed raises."""

from __future__ import annotations

import grpc


class AttentionError(Exception):
    """A call that failed, at the server or on the way. Never raised together with a result.

    code: grpc.StatusCode. details: the server's message; it names the field, the value and the
    limit. rejections: (path, reason) pairs, fastest path first, where the path policy could not be
    met.
    """

    def __init__(self, code: grpc.StatusCode, details: str, rejections=()):
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details
        self.rejections = list(rejections)

    def __reduce__(self):
        return AttentionError, (self.code, self.details, self.rejections)


def bad_reply(what: str) -> AttentionError:
    return AttentionError(grpc.StatusCode.INTERNAL, f"the server's reply cannot be used: {what}")


def cancelled(why: str = "cancelled by the caller") -> AttentionError:
    return AttentionError(grpc.StatusCode.CANCELLED, why)


def closed() -> AttentionError:
    return cancelled("the client is closed")
