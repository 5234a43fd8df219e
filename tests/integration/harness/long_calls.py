"""Calls that run for a long time on little data, and ways to see where they are."""

import numpy as np

from harness.contract import pb, tensor
from harness.server import wait_until


def long_header(seqlen=32768, num_heads=16, head_dim=8):
    """A forward that takes tens of seconds of one core and a few MiB of bfloat16."""
    shape = [1, seqlen, num_heads, head_dim]
    kv_shape = [1, seqlen, 1, head_dim]
    header = pb.ForwardRequestHeader(
        shape=pb.AttentionShape(layout=pb.LAYOUT_BSHD, num_heads=num_heads, num_kv_heads=1),
        q=tensor(pb.DTYPE_BF16, shape, 0), k=tensor(pb.DTYPE_BF16, kv_shape, 1),
        v=tensor(pb.DTYPE_BF16, kv_shape, 1))
    payloads = [bytes(2 * int(np.prod(shape))), bytes(2 * int(np.prod(kv_shape)))]
    return header, payloads


def long_forward(**sizes):
    header, payloads = long_header(**sizes)
    return pb.ForwardRequest(header=header, payload=payloads)


def long_backward(seqlen=16384, num_heads=16, head_dim=8):
    header, payloads = long_header(seqlen, num_heads, head_dim)
    backward = pb.BackwardRequestHeader.FromString(header.SerializeToString())
    backward.out.CopyFrom(header.q)
    backward.dout.CopyFrom(header.q)
    backward.lse.CopyFrom(tensor(pb.DTYPE_FP32, [1, num_heads, seqlen], len(payloads)))
    payloads.append(bytes(4 * num_heads * seqlen))
    return pb.BackwardRequest(header=backward, payload=payloads)


def wait_running(server, running, queued=0, timeout=30):
    """Waits until `running` calls run and `queued` more wait for their turn."""
    def there():
        m = server.metrics()
        return (m.total("attn_inflight_requests") == running + queued
                and m.total("attn_queued_requests") == queued)

    wait_until(there, f"{running} running and {queued} queued calls", timeout, server.process)
