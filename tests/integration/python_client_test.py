"""attn_client, the Python client, against a real attnd: it gets what a stock client gets."""

import asyncio
import concurrent.futures
import contextlib
import io
import pathlib
import pickle
import shutil
import tempfile
import time
import unittest

import attn_client
import attn_client.call
import grpc
import numpy as np
from attn_client import AttentionError, BFloat16, BlockMask, Dropout, Spec
from grpc import StatusCode

from harness import contract
from harness.cases import random_case
from harness.certs import make_certs
from harness.contract import pb
from harness.readme import python_blocks
from harness.server import SLOWNESS, Attnd, wait_idle, wait_until

T = contract.TIMEOUT_S * SLOWNESS
CASES = 120
FIELDS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv", "dbias", "dsink")}
NAMES = {pb.DTYPE_FP32: "fp32", pb.DTYPE_FP16: "fp16", pb.DTYPE_BF16: "bf16"}


def array(values, dtype):
    """float64 values, already rounded to `dtype`, as an argument of attn_client."""
    if dtype == pb.DTYPE_BF16:
        return BFloat16.from_float32(values.astype(np.float32))
    return values.astype({pb.DTYPE_FP32: np.float32, pb.DTYPE_FP16: np.float16}[dtype])


def bits(value):
    """A result as bytes."""
    return (value.bits if isinstance(value, BFloat16) else value).tobytes()


def arguments_of(case):
    """A Case of the harness as arguments of attn_client, tensors left out."""
    found = {"causal": case.causal, "deterministic": case.deterministic}
    for name, value in (
            ("softmax_scale", case.scale), ("window_left", case.window_left),
            ("window_right", case.window_right), ("softcap", case.softcap),
            ("seqlens_q", case.seqlens_q or None), ("seqlens_k", np.array(case.seqlens_k, np.int64)
                                                    if case.seqlens_k else None),
            ("out_dtype", NAMES.get(case.out_dtype)),
            ("alignment", "top-left" if case.top_left else None),
            ("cu_seqlens_q", case.cu_q or None), ("cu_seqlens_k", case.cu_k or None)):
        if value is not None:
            found[name] = value
    if case.alibi is not None:
        found["alibi_slopes"] = array(case.alibi, pb.DTYPE_FP32)
    if case.bias is not None:
        found["bias"] = array(case.bias, case.bias_dtype)
    if case.sinks is not None:
        found["sinks"] = array(case.sinks, pb.DTYPE_FP32)
    if case.dropout is not None:
        found["dropout"] = Dropout(*case.dropout)
    if case.block_mask is not None:
        found["block_mask"] = BlockMask(case.block_mask.astype(bool), *case.block)
    if case.policy is not None:
        found["path_policy"] = {pb.PATH_POLICY_AUTO: "auto",
                                pb.PATH_POLICY_REQUIRE_FLASH: "require-flash",
                                pb.PATH_POLICY_FORCE_STANDARD: "force-standard",
                                pb.PATH_POLICY_NAMED: case.policy.path}[case.policy.mode]
    if case.report_level == pb.REPORT_LEVEL_FULL:
        found["report_level"] = "full"
    return found


def gaussian(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def inputs(seqlen=33, heads=4, kv_heads=2, head_dim=32, dtype=np.float32):
    return (gaussian(2, seqlen, heads, head_dim, seed=1, dtype=dtype),
            gaussian(2, seqlen + 5, kv_heads, head_dim, seed=2, dtype=dtype),
            gaussian(2, seqlen + 5, kv_heads, head_dim + 8, seed=3, dtype=dtype))


class PythonClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd())
        cls.stub = cls.server.stub()
        cls.client = cls.enterClassContext(attn_client.Client(cls.server.target))

    def raises(self, code, call, *args, **kwargs):
        with self.assertRaises(AttentionError) as caught:
            call(*args, **kwargs)
        self.assertEqual(caught.exception.code, code)
        return caught.exception

    def same(self, which, found, expected):
        """`found`, a result of attn_client, against a stock client's response."""
        for name in FIELDS[which]:
            value = getattr(found, name)
            if not expected.header.HasField(name):
                self.assertIsNone(value)
                continue
            tensor = getattr(expected.header, name)
            self.assertEqual(tuple(value.shape), tuple(tensor.shape), name)
            self.assertEqual(bits(value), expected.payload[tensor.payload], name)
        self.assertEqual(found.report.kernel, expected.report.kernel)
        self.assertEqual(found.path, expected.report.path)
        self.assertEqual(found.rejections,
                         [(r.path, pb.Reason.Name(r.reason).replace("REASON_", ""), r.detail)
                          for r in expected.report.rejections])

    def test_gets_what_a_stock_client_gets(self):
        rng = np.random.default_rng(20261130)
        refused = 0

        async def asynchronously(method, *args, **kwargs):
            async with attn_client.AsyncClient(self.server.target) as client:
                return await getattr(client, method)(*args, **kwargs)

        for number in range(CASES):
            case = random_case(rng)
            case.strided = ()  # attn_client sends what lies in memory
            streaming, use_asyncio = number % 2 == 1, number % 4 >= 2

            def call(method, *args, **kwargs):
                kwargs.update(timeout=T, streaming=streaming)
                if use_asyncio:
                    return asyncio.run(asynchronously(method, *args, **kwargs))
                return getattr(self.client, method)(*args, **kwargs)

            with self.subTest(number=number, streaming=streaming, asyncio=use_asyncio):
                arguments = arguments_of(case)
                q, k, v = (array(getattr(case, x), case.dtype) for x in "qkv")
                try:
                    expected = self.stub.Forward(case.forward_request(), timeout=T)
                except grpc.RpcError as error:
                    found = self.raises(error.code(), call, "forward", q, k, v, **arguments)
                    self.assertEqual(found.details, error.details())
                    trailer = dict(error.trailing_metadata()).get("attn-rejections", "")
                    self.assertEqual(",".join(map(":".join, found.rejections)), trailer)
                    refused += 1
                    continue
                found = call("forward", q, k, v, **arguments)
                self.assertEqual((found.streamed, found.attempts), (streaming, 1))
                self.same("forward", found, expected)

                out = contract.read_tensor(expected.header.out, expected.payload)
                lse = contract.read_tensor(expected.header.lse, expected.payload)
                dout = contract.round_to(rng.standard_normal(out.shape), case.dtype)
                dlse = contract.round_to(rng.standard_normal(lse.shape), pb.DTYPE_FP32)
                dlse = dlse if number % 3 else None
                expected = self.stub.Backward(case.backward_request(out, lse, dout, dlse),
                                              timeout=T)
                found = call("backward", q, k, v, found.out, found.lse, array(dout, case.dtype),
                             None if dlse is None else dlse.astype(np.float32), **arguments)
                self.same("backward", found, expected)
        self.assertLess(refused, CASES / 2)

    def test_plan_with_arrays_or_shapes_is_what_a_stock_client_gets(self):
        rng = np.random.default_rng(5)
        for number in range(40):
            case = random_case(rng)
            case.strided = ()
            which = ("forward", "backward")[number % 2]
            expected = self.stub.Plan(case.plan_request(getattr(pb, f"PASS_{which.upper()}")),
                                      timeout=T)
            tensors = [array(getattr(case, x), case.dtype) for x in "qkv"]
            if number % 3:
                tensors = [Spec(t.shape, NAMES[case.dtype]) for t in tensors]
            found = self.client.plan(*tensors, pass_=which, timeout=T, **arguments_of(case))
            self.assertEqual(
                [found.path, found.kernel, found.flops, found.visible_pairs, found.workspace_bytes],
                [expected.path, expected.kernel, expected.flops, expected.visible_pairs,
                 expected.workspace_bytes])

    def test_axes_exchanged_in_memory_travel_as_strides(self):
        q, k, v = inputs()
        expected = self.client.forward(q, k, v, causal=True)
        views = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
        found = self.client.forward(*views, layout="bhsd", causal=True)
        self.assertEqual(found.out.shape, (2, 4, 33, 40))
        np.testing.assert_array_equal(found.out.swapaxes(1, 2), expected.out)
        np.testing.assert_array_equal(found.lse, expected.lse)
        request = attn_client.call.Request("Forward", *views, {"layout": "bhsd"})
        for view, payload in zip(views, request.payloads):  # no copy was made
            self.assertTrue(np.shares_memory(view, np.frombuffer(payload, np.uint8)))
        dout = gaussian(*expected.out.shape)
        expected = self.client.backward(q, k, v, expected.out, expected.lse, dout, causal=True)
        found = self.client.backward(*views, found.out, found.lse, dout.swapaxes(1, 2),
                                     layout="bhsd", causal=True)
        for name in FIELDS["backward"][:3]:
            np.testing.assert_array_equal(getattr(found, name).swapaxes(1, 2),
                                          getattr(expected, name))

    def test_any_memory_order_gives_the_same(self):
        q, k, v = inputs(dtype=np.float16)
        expected = self.client.forward(q, k, v)
        wide = np.repeat(q, 2, axis=-1)
        for name, value in (("step", wide[..., ::2]), ("reversed", q[:, ::-1].copy()[:, ::-1]),
                            ("fortran", np.asfortranarray(q)), ("big-endian", q.astype(">f2")),
                            ("list of axes", q.transpose(3, 0, 2, 1).copy().transpose(1, 3, 2, 0)),
                            ("broadcast", None)):
            with self.subTest(name):
                if value is None:
                    value = np.broadcast_to(q[:1], q.shape)
                    expected = self.client.forward(value.copy(), k, v)
                found = self.client.forward(value, k, v)
                np.testing.assert_array_equal(found.out, expected.out)
        self.assertTrue(found.out.flags.writeable)

    def test_an_axis_of_extent_one_lies_anywhere(self):
        q, v = inputs()[0][..., :1].copy(), inputs()[2][:, :33].copy()
        expected = self.client.forward(q, q[:, :, :2], v)
        views = [x.swapaxes(1, 2).copy() for x in (q, v)]
        found = self.client.forward(views[0][..., ::-1], views[0][:, :2], views[1], layout="bhsd")
        np.testing.assert_array_equal(found.out.swapaxes(1, 2), expected.out)

    def test_one_tensor_in_three_places_travels_once(self):
        q = gaussian(1, 64, 2, 32)
        found = self.client.forward(q, q, q)
        self.assertEqual(found.report.traffic.wire_request_bytes, q.nbytes)
        np.testing.assert_array_equal(found.out, self.client.forward(q, q.copy(), q.copy()).out)
        every_second = np.repeat(q, 2, axis=-1)[..., ::2]  # which is copied first
        found = self.client.forward(every_second, every_second, every_second)
        self.assertEqual(found.report.traffic.wire_request_bytes, q.nbytes)

    def test_empty_tensors(self):
        q, k, v = inputs()
        found = self.client.forward(q, k[:, :0], v[:, :0])
        np.testing.assert_array_equal(found.out, np.zeros((2, 33, 4, 40), np.float32))
        self.assertTrue(np.isneginf(found.lse).all())
        for streaming in (False, True):
            found = self.client.forward(q[:, :0], k, v, streaming=streaming)
            self.assertEqual((found.out.shape, found.lse.shape), ((2, 0, 4, 40), (2, 4, 0)))

    def test_large_tensors_are_streamed(self):
        q = gaussian(1, 1024, 8, 64, dtype=np.float16)
        reply_bytes = q.nbytes + 1024 * 8 * 4  # out and lse
        with attn_client.Client(self.server.target, stream_threshold_bytes=reply_bytes) as client:
            self.assertFalse(client.forward(q, q, q, timeout=T).streamed)
            found = client.forward(q, q, q.copy(), timeout=T)
            self.assertTrue(found.streamed)
        np.testing.assert_array_equal(found.out, self.client.forward(q, q, q, timeout=T).out)

    def test_a_unary_message_over_the_limit_is_not_sent(self):
        with Attnd("--max-unary-bytes=2MiB") as server, attn_client.Client(server.target) as client:
            q = gaussian(1, 1024, 8, 64)
            error = self.raises(StatusCode.RESOURCE_EXHAUSTED, client.forward, q, q, q,
                                streaming=False)
            self.assertIn("limit is 2097152 B", error.details)
            self.assertTrue(client.forward(q, q, q).streamed)

    def test_what_cannot_be_sent_is_refused_by_name(self):
        q, k, v = inputs()
        mask = np.ones((1, 1, 1, 1))
        for error, words, kwargs in (
                (TypeError, "q has dtype float64; it must be one of fp32, fp16, bf16",
                 {"q": q.astype(np.float64)}),
                (TypeError, "q cannot be read as an array", {"q": [[1], [1, 2]]}),
                (TypeError, "q is a masked array", {"q": np.ma.masked_array(q, q > 0)}),
                (TypeError, "a Spec has no contents", {"q": Spec(q.shape, "fp32")}),
                (TypeError, "v has dtype int32", {"v": v.astype(np.int32)}),
                (TypeError, "bias has dtype uint8", {"bias": np.zeros((1, 1, 33, 38), np.uint8)}),
                (TypeError, "sinks has dtype float16", {"sinks": np.zeros(4, np.float16)}),
                (TypeError, "block_mask.mask has dtype float64", {"block_mask": BlockMask(mask)}),
                (TypeError, "block_mask is array.*; it must be of type BlockMask",
                 {"block_mask": mask}),
                (TypeError, "dropout is 0.1; it must be of type Dropout", {"dropout": 0.1}),
                (TypeError, "dropout.p is 'x'; it must be a number", {"dropout": Dropout("x", 1)}),
                (ValueError, f"dropout.seed is -1; it must be at least 0 and at most {2 ** 64 - 1}",
                 {"dropout": Dropout(0.1, -1)}),
                (TypeError, "cancellation is 'x'; it must be of type Cancellation",
                 {"cancellation": "x"}),
                (ValueError, r"k has shape \[38, 2, 32\]; its rank must be 4", {"k": k[0]}),
                (ValueError, "layout is 'sbhd'; it must be one of bshd, bhsd, thd",
                 {"layout": "sbhd"}),
                (ValueError, "alignment is 'left'; it must be one of", {"alignment": "left"}),
                (ValueError, "report_level is 'all'; it must be one of", {"report_level": "all"}),
                (ValueError, "out_dtype is 'fp64'; it must be one of", {"out_dtype": "fp64"}),
                (TypeError, "path_policy is 3; it must be of type str", {"path_policy": 3}),
                (TypeError, r"seqlens_k\[0\] is 1.5; it must be an integer",
                 {"seqlens_k": [1.5, 2]}),
                (TypeError, "seqlens_k is 5; it must be a sequence", {"seqlens_k": 5}),
                (TypeError, "window_left is 1.5; it must be an integer", {"window_left": 1.5}),
                (ValueError, f"window_left is {2 ** 63}; it must be at least",
                 {"window_left": 2 ** 63}),
                (TypeError, "softmax_scale is '3'; it must be a number", {"softmax_scale": "3"}),
                (TypeError, "timeout is '1'; it must be a number", {"timeout": "1"}),
                (ValueError, "timeout is nan", {"timeout": float("nan")}),
                (ValueError, "traceparent is 'x'; it must be as W3C", {"traceparent": "x"}),
                (TypeError, "unknown argument 'casual'; there are alibi_slopes, ",
                 {"casual": True})):
            with self.subTest(words), self.assertRaisesRegex(error, words):
                self.client.forward(**{"q": q, "k": k, "v": v, **kwargs})
        with self.assertRaisesRegex(TypeError, "lse has dtype float16"):
            self.client.backward(q, k, v, q, np.zeros((2, 4, 33), np.float16), q)
        with self.assertRaisesRegex(TypeError, "must be uint16, not int32"):
            BFloat16(np.zeros(3, np.int32))
        with self.assertRaisesRegex(TypeError, "service is 3"):
            self.client.healthy(3)
        for error, words, kwargs in (
                (TypeError, "target is None", {"target": None}),
                (ValueError, "max_retries is -1", {"max_retries": -1}),
                (ValueError, "tls_cert and tls_key", {"tls_cert": "client.crt"}),
                (TypeError, "connect_timeout is 'x'", {"connect_timeout": "x"})):
            for kind in (attn_client.Client, attn_client.AsyncClient):
                with self.subTest(words), self.assertRaisesRegex(error, words):
                    kind(**kwargs)

    def test_arguments_of_any_like_kind(self):
        q, k, v = inputs()
        expected = self.client.forward(q, k, v, seqlens_k=[3, 38], timeout=float("inf"))
        for lengths in ((np.int64(3), np.int32(38)), np.array([3, 38], np.uint8), range(3, 39, 35)):
            found = self.client.forward(q, k, v, seqlens_k=lengths, timeout=1e300)
            np.testing.assert_array_equal(found.out, expected.out)
        sinks = [np.float32(0)] * 4
        forward = self.client.forward(q, k, v, sinks=sinks)
        found = self.client.backward(q, k, v, forward.out, forward.lse, forward.out, sinks=sinks)
        self.assertEqual(found.dsink.shape, (4,))

    def test_errors_can_be_pickled(self):
        q, k, v = inputs()
        error = self.raises(StatusCode.FAILED_PRECONDITION, self.client.forward, q, k, v,
                            path_policy="flash_sm90")
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((str(again), again.code, again.rejections),
                         (str(error), error.code, error.rejections))

    def test_the_servers_refusals_arrive(self):
        q, k, v = inputs()
        error = self.raises(StatusCode.INVALID_ARGUMENT, self.client.forward, q, k, v, softcap=-1.0)
        self.assertIn("softcap is -1", error.details)
        self.raises(StatusCode.INVALID_ARGUMENT, self.client.forward, q, k[:, :, :1], v)
        self.raises(StatusCode.INVALID_ARGUMENT, self.client.plan, q, k, v[..., None, 0, :1, :1])
        error = self.raises(StatusCode.NOT_FOUND, self.client.healthy, "nobody")
        self.assertEqual(error.rejections, [])

    def test_the_readmes_examples_run(self):
        readme, blocks = python_blocks("README.md"), python_blocks("client/python/README.md")
        readme, first, second = (block.replace("127.0.0.1:50051", self.server.target)
                                 for block in (readme[0], *blocks[:2]))
        names = {}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(readme, {})
            exec(first, names)
        self.assertEqual(printed.getvalue().count("(2, 128, 4, 64)"), 2)
        self.assertEqual(names["result"].out.shape, (2, 1024, 8, 64))
        lines = "".join(f"    {line}\n" for line in second.splitlines())
        exec(f"import asyncio\nasync def main():\n{lines}    return results", names)
        results = asyncio.run(names["main"]())
        np.testing.assert_array_equal(results[7].out, names["result"].out)

    def test_deadline_and_cancellation_stop_the_server(self):
        q = np.zeros((1, 32768, 16, 8), np.float16)
        k = np.zeros((1, 32768, 1, 8), np.float16)
        for streaming in (False, True):
            start = time.monotonic()
            self.raises(StatusCode.DEADLINE_EXCEEDED, self.client.forward, q, k, k, timeout=0.2,
                        streaming=streaming)
            self.assertLess(time.monotonic() - start, 10 * SLOWNESS)
            wait_idle(self.server)

        async def cancel(streaming):
            async with attn_client.AsyncClient(self.server.target) as client:
                task = asyncio.ensure_future(client.forward(q, k, k, streaming=streaming))
                await asyncio.to_thread(wait_until, lambda: self.server.metrics().total(
                    "attn_inflight_requests") == 1, "the call runs")
                task.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await task
                await asyncio.to_thread(wait_idle, self.server)

        asyncio.run(cancel(False))
        asyncio.run(cancel(True))
        self.raises(StatusCode.DEADLINE_EXCEEDED, self.client.server_info, timeout=0)

    def test_one_client_serves_many_threads(self):
        q, k, v = inputs()
        expected = [self.client.forward(q * i, k, v).out for i in range(4)]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: self.client.forward(
                q * (i % 4), k, v, streaming=i % 3 == 0, timeout=T).out, range(64)))
        for i, out in enumerate(found):
            np.testing.assert_array_equal(out, expected[i % 4])

    def test_traceparent_reaches_the_report(self):
        trace = "0af7651916cd43dd8448eb211c80319c"
        found = self.client.forward(*inputs(), traceparent=f"00-{trace}-b7ad6b7169203331-01")
        self.assertEqual(found.report.trace_id, trace)

    def test_server_info_and_health(self):
        self.assertTrue(self.client.healthy())
        self.assertTrue(self.client.healthy("attention.v1.Attention"))
        self.assertEqual(self.client.server_info().version, self.server.info().version)

    def test_no_server(self):
        start = time.monotonic()
        for target in ("127.0.0.1:1", "unix:/nonexistent/socket"):
            with self.assertRaises(AttentionError) as caught:
                attn_client.Client(target, connect_timeout=0.5, max_retries=0)
            # A machine that stands still may leave no time for more than one attempt, or for none.
            self.assertIn(caught.exception.code,
                          (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED))
            self.assertIn(f"no answer from {target} within 0.5 s: ", caught.exception.details)
        with self.assertRaisesRegex(AttentionError, "within 0 s: there was no time to ask"):
            attn_client.Client(self.server.target, connect_timeout=0)
        self.assertLess(time.monotonic() - start, 20 * SLOWNESS)

    def test_unix_socket_and_tls(self):
        directory = pathlib.Path(tempfile.mkdtemp(prefix="attn_python_"))
        self.addCleanup(shutil.rmtree, directory, ignore_errors=True)
        certs = make_certs()
        q, k, v = inputs()
        expected = self.client.forward(q, k, v)
        with Attnd(listen=f"unix:{directory}/socket"):
            with attn_client.Client(f"unix:{directory}/socket") as client:
                np.testing.assert_array_equal(client.forward(q, k, v).out, expected.out)
        with Attnd(f"--tls-cert={certs}/server.crt", f"--tls-key={certs}/server.key",
                   f"--tls-client-ca={certs}/ca.crt") as server:
            ours = {"tls_ca": certs / "ca.crt", "tls_cert": certs / "client.crt",
                    "tls_key": certs / "client.key"}
            with attn_client.Client(server.target, **ours) as client:
                np.testing.assert_array_equal(client.forward(q, k, v).out, expected.out)
            for wrong in ({}, {"tls_ca": ours["tls_ca"]}):
                with self.assertRaises(AttentionError):
                    attn_client.Client(server.target, connect_timeout=0.5, **wrong)
        with self.assertRaises(FileNotFoundError):
            attn_client.Client(tls_ca="/nonexistent/ca.crt")


if __name__ == "__main__":
    unittest.main()
