"""Calls in the background, on threads, until stopped."""

import threading

import grpc
import numpy as np

from harness import contract
from harness.cases import simple_case
from harness.contract import pb


def mixed_requests(rng):
    """(method, request) of every kind that a metric tells apart."""
    standard = pb.PathPolicy(mode=pb.PATH_POLICY_FORCE_STANDARD)
    calls = []
    for dtype in (pb.DTYPE_FP32, pb.DTYPE_FP16, pb.DTYPE_BF16):
        for head_dim in (16, 64, 128, 264):
            case = simple_case(rng, seqlen_q=40, seqlen_k=70, head_dim=head_dim, dtype=dtype,
                               causal=True)
            calls.append(("Forward", case.forward_request()))
            zeros = np.zeros(case.out_shape)
            backward = case.backward(zeros, np.zeros(case.lse_shape), zeros)
            calls.append(("Backward", pb.BackwardRequest(header=backward[0], payload=backward[1])))
    calls.append(("Forward", simple_case(rng, policy=standard).forward_request()))
    calls.append(("Forward", simple_case(rng, seqlen_q=300, seqlen_k=300, num_heads=4,
                                         num_kv_heads=4, head_dim=64).forward_request()))
    refused = simple_case(rng).forward_request()
    refused.header.shape.num_heads = 0
    calls.append(("Forward", refused))
    return calls


HOSTILE = '<img src=x onerror="document.title=\'pwned\'">\u2028\u0001'


def send_hostile(server):
    """A call that is refused with the caller's text in the error."""
    request = simple_case(np.random.default_rng(3)).forward_request()
    request.header.path_policy.mode = pb.PATH_POLICY_NAMED
    request.header.path_policy.path = HOSTILE
    try:
        server.stub().Forward(request, timeout=contract.TIMEOUT_S)
    except grpc.RpcError as error:
        return error.details()
    raise AssertionError("not refused")


class Load:
    """Sends `requests`, [(method, message)], over and over from `threads` threads, each waiting `pause`
    seconds between calls; a context manager. Counts what came back by status code."""

    def __init__(self, server, requests, threads=1, pause=0.0):
        self.codes = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(server.target, requests, i, threads, pause),
                             daemon=True) for i in range(threads)]

    def _run(self, target, requests, first, step, pause):
        with contract.channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            calls = [(channel.unary_unary(f"/{contract.SERVICE}/{method}"),
                      message.SerializeToString()) for method, message in requests]
            i = first
            while not self._stop.is_set():
                call, message = calls[i % len(calls)]
                i += step
                try:
                    call(message, timeout=contract.TIMEOUT_S)
                    code = "OK"
                except grpc.RpcError as error:
                    code = error.code().name
                with self._lock:
                    self.codes[code] = self.codes.get(code, 0) + 1
                if pause:
                    self._stop.wait(pause)

    def sent(self):
        with self._lock:
            return dict(self.codes)

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop()
