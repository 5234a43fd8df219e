#!/usr/bin/env python3
"""attn_client against a stock gRPC client (code generated from the .proto) that asks the same of
the same attnd: NumPy arrays in, NumPy arrays out. Prints a table, then "python-client: value (bar:
...)"; exit status 0 only where the bar holds. One key, so that out is v, which is checked, and no
time goes into attention."""

import statistics
import sys
import time

import observe

arguments = observe.parse(
    __doc__, package=("", "folder that holds attn_client"), seconds=(4.0, "for each size"),
    small_bar=(1.6, "most of a stock client's time at 1 KiB"), large_bar=(0.8, "and at 64 MiB"))
sys.path.insert(0, arguments.package)

import attn_client  # noqa: E402
import numpy as np  # noqa: E402

from harness import contract  # noqa: E402
from harness.contract import pb  # noqa: E402
from harness.server import Attnd  # noqa: E402

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)  # bytes of q, and of out
HEAD_DIM = 64


def main():
    print("median ms of a call with q of this size, and out of this size back; NumPy to NumPy\n")
    print(f"{'bytes each way':>14}{'stock':>10}{'attn_client':>13}{'ratio':>8}{'unary':>10}"
          f"{'streamed':>10}")
    ratios = []
    with Attnd() as server, attn_client.Client(server.target) as client:
        stub = server.stub()
        for size in SIZES:
            chosen, stock, unary, streamed = compare(client, stub, size, arguments.seconds)
            ratios.append(chosen / stock)
            print(f"{size:>14,}{stock * 1e3:>10.3f}{chosen * 1e3:>13.3f}{ratios[-1]:>8.2f}"
                  f"{unary * 1e3:>10.3f}{streamed * 1e3:>10.3f}", flush=True)
    print()
    observe.finish(
        "python-client",
        f"{ratios[0]:.2f} of a stock client's time at 1 KiB, {ratios[-1]:.2f} at 64 MiB",
        f"at most {arguments.small_bar:g} and {arguments.large_bar:g}",
        ratios[0] <= arguments.small_bar and ratios[-1] <= arguments.large_bar)


def compare(client, stub, size, seconds):
    """Medians of attn_client as it chooses, the stock client, attn_client unary and streamed."""
    rows = size // 2 // HEAD_DIM
    q = np.random.default_rng(0).standard_normal((1, rows, 1, HEAD_DIM)).astype(np.float16)
    k = np.zeros((1, 1, 1, HEAD_DIM), np.float16)
    v = np.arange(HEAD_DIM, dtype=np.float16).reshape(k.shape)
    calls = (lambda: client.forward(q, k, v).out, lambda: stock_forward(stub, q, k, v),
             lambda: client.forward(q, k, v, streaming=False).out,
             lambda: client.forward(q, k, v, streaming=True).out)
    times = [[] for _ in calls]
    for call in calls:
        np.testing.assert_array_equal(call(), np.broadcast_to(v, q.shape))
    # They take turns: short enough that all see the same machine, long enough that a small call
    # finds its own code in the caches, as a caller in a loop does.
    turn = 25 if size < 1 << 20 else 1
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < 5:
        for found, call in zip(times, calls):
            for _ in range(turn):
                start = time.perf_counter()
                call()
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]


def stock_forward(stub, q, k, v):
    """What the contract's README shows."""
    request = pb.ForwardRequest()
    header = request.header
    header.shape.layout = pb.LAYOUT_BSHD
    header.shape.num_heads = header.shape.num_kv_heads = 1
    for field, array in ((header.q, q), (header.k, k), (header.v, v)):
        field.dtype = pb.DTYPE_FP16
        field.shape.extend(array.shape)
        field.payload = len(request.payload)
        request.payload.append(array.tobytes())
    reply = stub.Forward(request, timeout=contract.TIMEOUT_S)
    out, lse = reply.header.out, reply.header.lse
    np.frombuffer(reply.payload[lse.payload], np.float32).reshape(lse.shape)
    return np.frombuffer(reply.payload[out.payload], np.float16).reshape(out.shape)


if __name__ == "__main__":
    main()
