"""A stock gRPC client (Python grpcio, code generated from the .proto) calls every method."""

import threading
import unittest

import grpc
import numpy as np

from harness import contract, reference
from harness.cases import random_case, simple_case
from harness.contract import (field, health_grpc, health_pb, pb, read_tensor, reflection_grpc,
                              reflection_pb, varint)
from harness.server import Attnd, wait_idle

T = contract.TIMEOUT_S


class StockClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = cls.enterClassContext(Attnd())
        cls.channel = cls.server.channel()
        cls.stub = contract.pb_grpc.AttentionStub(cls.channel)

    def setUp(self):
        self.rng = np.random.default_rng(20)

    # ------------------------------------------------------------------------------- attention

    def check_forward(self, case, header, payloads):
        expected = reference.forward(case)
        self.assertEqual(tuple(header.out.shape), case.out_shape)
        self.assertEqual(tuple(header.lse.shape), case.lse_shape)
        self.assertEqual(header.out.dtype, case.result_dtype)
        self.assertEqual(header.lse.dtype, pb.DTYPE_FP32)
        for name in ("out", "lse"):
            actual = read_tensor(getattr(header, name), payloads)
            self.assertLessEqual(reference.worst_ratio(actual, expected[name]), 1.0,
                                 f"{name} of {case}")

    def check_backward(self, case, header, payloads, dout, dlse):
        expected = reference.backward(case, dout, dlse)
        for name in ("dq", "dk", "dv", "dbias", "dsink"):
            self.assertEqual(header.HasField(name), name in expected, name)
            if name in expected:
                actual = read_tensor(getattr(header, name), payloads)
                self.assertLessEqual(reference.worst_ratio(actual, expected[name]), 1.0,
                                     f"{name} of {case}")

    def gradients_in(self, case):
        dout = contract.round_to(self.rng.standard_normal(case.out_shape), case.dtype)
        dlse = None
        if self.rng.random() < 0.5:
            dlse = contract.round_to(self.rng.standard_normal(case.lse_shape), pb.DTYPE_FP32)
        return dout, dlse

    def cases(self, count):
        made = 0
        while made < count:
            case = random_case(self.rng)
            case.policy = None  # path policies have their own tests
            made += 1
            yield case

    def test_forward_and_backward_meet_the_exactness_rule(self):
        for index, case in enumerate(self.cases(60)):
            with self.subTest(index=index):
                reply = self.stub.Forward(case.forward_request(), timeout=T)
                self.check_forward(case, reply.header, reply.payload)
                self.assertEqual(getattr(reply.report, "pass"), pb.PASS_FORWARD)
                out = read_tensor(reply.header.out, reply.payload)
                lse = read_tensor(reply.header.lse, reply.payload)
                dout, dlse = self.gradients_in(case)
                grads = self.stub.Backward(case.backward_request(out, lse, dout, dlse), timeout=T)
                self.check_backward(case, grads.header, grads.payload, dout, dlse)
                self.assertEqual(getattr(grads.report, "pass"), pb.PASS_BACKWARD)

    def test_streams_give_the_bytes_that_unary_calls_give(self):
        for index, case in enumerate(self.cases(20)):
            case.deterministic = True
            with self.subTest(index=index):
                chunk = int(self.rng.choice([7, 64, 1000, 1 << 20]))
                header, payloads = case.forward()
                unary = self.stub.Forward(pb.ForwardRequest(header=header, payload=payloads),
                                          timeout=T)
                streamed = contract.collect_stream(self.stub.ForwardStream(
                    contract.stream_requests(header, payloads, chunk), timeout=T))
                self.same_tensors(unary.header, unary.payload, streamed, ("out", "lse"))

                out = read_tensor(unary.header.out, unary.payload)
                lse = read_tensor(unary.header.lse, unary.payload)
                header, payloads = case.backward(out, lse, *self.gradients_in(case))
                unary = self.stub.Backward(pb.BackwardRequest(header=header, payload=payloads),
                                           timeout=T)
                streamed = contract.collect_stream(self.stub.BackwardStream(
                    contract.stream_requests(header, payloads, chunk, pb.BackwardStreamRequest),
                    timeout=T))
                self.same_tensors(unary.header, unary.payload, streamed, ("dq", "dk", "dv"))

    def same_tensors(self, header, payload, streamed, names):
        stream_header, stream_payload, report = streamed
        self.assertEqual(header, stream_header)
        self.assertTrue(report.path)
        for name in names:
            index = getattr(header, name).payload
            self.assertEqual(bytes(payload[index]), bytes(stream_payload.get(index, b"")), name)

    def test_interleaved_chunks(self):
        case = simple_case(self.rng, seqlen_q=33, seqlen_k=33)
        header, payloads = case.forward()
        queues = [list(contract.chunks_of([p], 100)) for p in payloads]
        for index, queue in enumerate(queues):
            for message in queue:
                message.chunk.payload_index = index

        def requests():
            yield pb.ForwardStreamRequest(header=header)
            while any(queues):
                for queue in queues:
                    if queue:
                        yield queue.pop(0)

        streamed = contract.collect_stream(self.stub.ForwardStream(requests(), timeout=T))
        self.check_forward(case, streamed[0], streamed[1])

    def test_report_accounts_for_the_call(self):
        case = simple_case(self.rng, batch=2, seqlen_q=64, seqlen_k=96, num_heads=4,
                           num_kv_heads=2, head_dim=32)
        reply, call = self.stub.Forward.with_call(case.forward_request(), timeout=T)
        report = reply.report
        self.assertEqual(report.path, "flash_cpu")
        self.assertEqual(report.path_class, pb.PATH_CLASS_FLASH)
        self.assertEqual(report.device_kind, pb.DEVICE_KIND_CPU)
        self.assertEqual(report.fused_batch, 1)
        self.assertTrue(report.kernel.startswith("flash_cpu_fwd_fp32_d32"), report.kernel)
        self.assertEqual(report.flops, 2 * (2 * 4 * 64 * 96) * (32 + 32))
        inputs = 4 * (2 * 64 * 4 * 32 + 2 * (2 * 96 * 2 * 32))
        outputs = 4 * (2 * 64 * 4 * 32 + 2 * 4 * 64)
        self.assertEqual(report.traffic.wire_request_bytes, inputs)
        self.assertEqual(report.traffic.wire_response_bytes, outputs)
        self.assertEqual(report.traffic.compulsory_bytes, inputs + outputs)
        self.assertGreaterEqual(report.traffic.tile_bytes, report.traffic.compulsory_bytes)
        self.assertEqual(report.traffic.standard_bytes,
                         inputs + outputs + 4 * 4 * (2 * 4 * 64 * 96))
        times = report.times
        stages = (times.parse_ns + times.gather_ns + times.queue_ns + times.kernel_ns
                  + times.reply_ns)
        self.assertGreater(times.kernel_ns, 0)
        self.assertGreaterEqual(times.handler_ns, times.kernel_ns)
        self.assertLessEqual(stages, times.handler_ns * 1.001 + 1000)
        self.assertAlmostEqual(report.achieved_tflops, report.flops / times.kernel_ns / 1e3,
                               delta=1e-3 * report.achieved_tflops)
        self.assertAlmostEqual(
            report.achieved_gb_per_s, report.traffic.compulsory_bytes / times.kernel_ns,
            delta=1e-3 * report.achieved_gb_per_s)
        trailing = dict(call.trailing_metadata())
        self.assertEqual(trailing["attn-path"], "flash_cpu")
        self.assertEqual(trailing["attn-kernel"], report.kernel)
        pairs = [f"{r.path}:{pb.Reason.Name(r.reason)[len('REASON_'):]}" for r in report.rejections]
        self.assertEqual(trailing["attn-rejections"].replace(" ", "").split(","), pairs)
        self.assertIn("flash_sm90", [r.path for r in report.rejections])

    def test_request_ids_differ(self):
        request = simple_case(self.rng).forward_request()
        ids = {self.stub.Forward(request, timeout=T).report.request_id for _ in range(20)}
        self.assertEqual(len(ids), 20)
        self.assertNotIn("", ids)

    def test_report_level_full_adds_sentences(self):
        case = simple_case(self.rng)
        basic = self.stub.Forward(case.forward_request(), timeout=T).report
        case.report_level = pb.REPORT_LEVEL_FULL
        full = self.stub.Forward(case.forward_request(), timeout=T).report
        self.assertTrue(full.rejections)
        self.assertEqual([r.reason for r in basic.rejections], [r.reason for r in full.rejections])
        for rejection in basic.rejections:
            self.assertEqual(rejection.sentence, "")
        for rejection in full.rejections:
            self.assertIn(rejection.path, rejection.sentence)

    def test_two_tensors_may_name_one_payload(self):
        case = simple_case(self.rng, seqlen_q=9, seqlen_k=9, num_heads=2, num_kv_heads=2)
        case.k = case.v = case.q
        header, payloads = case.forward()
        header.k.payload = header.v.payload = header.q.payload
        reply = self.stub.Forward(pb.ForwardRequest(header=header, payload=payloads[:1]), timeout=T)
        self.check_forward(case, reply.header, reply.payload)

    def test_offsets_into_one_payload(self):
        case = simple_case(self.rng, dtype=pb.DTYPE_BF16)
        header, payloads = case.forward()
        joined = b"\xff\xff"  # a NaN that nothing may read
        for name, data in zip("qkv", payloads):
            tensor = getattr(header, name)
            tensor.payload, tensor.offset_bytes = 0, len(joined)
            joined += data
        reply = self.stub.Forward(pb.ForwardRequest(header=header, payload=[joined]), timeout=T)
        self.check_forward(case, reply.header, reply.payload)

    def test_nan_in_padding_is_never_used(self):
        case = simple_case(self.rng, batch=3, seqlen_q=8, seqlen_k=8, causal=True,
                           seqlens_q=(5, 0, 8), seqlens_k=(3, 8, 0), strided=("q", "k", "v"))
        clean = reference.forward(case)
        for b in range(3):
            case.q[b, case.seqlens_q[b]:] = np.nan
            case.k[b, case.seqlens_k[b]:] = np.nan
            case.v[b, case.seqlens_k[b]:] = np.nan
        reply = self.stub.Forward(case.forward_request(), timeout=T)
        for name in ("out", "lse"):
            actual = read_tensor(getattr(reply.header, name), reply.payload)
            self.assertLessEqual(reference.worst_ratio(actual, clean[name]), 1.0, name)

    # ------------------------------------------------------------------------------- encodings

    def encodings(self, header, payloads):
        """Valid encodings of one request that no generated code writes."""
        head = field(1, header.SerializeToString())
        body = b"".join(field(2, p) for p in payloads)
        unknown = (field(1000, b"unknown bytes") + varint(77 << 3) + varint(12345)
                   + varint(78 << 3 | 5) + b"abcd" + varint(79 << 3 | 1) + b"abcdefgh"
                   + varint(80 << 3 | 3) + varint(1 << 3) + varint(7) + varint(80 << 3 | 4))
        yield "payload before header", body + head
        yield "header in the middle", field(2, payloads[0]) + head + b"".join(
            field(2, p) for p in payloads[1:])
        yield "unknown fields", unknown + head + unknown + body + unknown
        yield "wrong wire types of known fields", varint(1 << 3) + varint(5) + head + varint(
            2 << 3 | 5) + b"wxyz" + body
        half = type(header)()
        half.shape.CopyFrom(header.shape)
        rest = type(header)()
        rest.CopyFrom(header)
        rest.ClearField("shape")
        yield "header in two parts, merged", field(1, half.SerializeToString()) + body + field(
            1, rest.SerializeToString())
        yield "empty header first", field(1, b"") + head + body
        yield "non-minimal varints", b"\x8a\x80\x00" + varint(
            header.ByteSize())[:-1] + bytes([varint(header.ByteSize())[-1] | 0x80]) + b"\x00" + (
                header.SerializeToString()) + body

    def test_any_valid_encoding_is_read_as_protobuf_reads_it(self):
        case = simple_case(self.rng, seqlen_q=5, seqlen_k=5)
        header, payloads = case.forward()
        call = contract.raw_unary(self.channel, "Forward")
        for name, data in self.encodings(header, payloads):
            with self.subTest(name):
                parsed = pb.ForwardRequest.FromString(data)  # the test's own premise
                self.assertEqual(parsed.header.q, header.q)
                self.assertEqual(list(parsed.payload), payloads)
                reply = pb.ForwardResponse.FromString(call(data, timeout=T))
                self.check_forward(case, reply.header, reply.payload)

    def test_replies_parse_strictly(self):
        request = simple_case(self.rng).forward_request()
        data = contract.raw_unary(self.channel, "Forward")(request.SerializeToString(), timeout=T)
        reply = pb.ForwardResponse.FromString(data)
        self.assertEqual(len(reply.UnknownFields()), 0)
        self.assertEqual(len(reply.SerializeToString()), len(data))

    # -------------------------------------------------------------------------------- the rest

    def test_server_info(self):
        info = self.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=T)
        self.assertTrue(info.version)
        paths = {p.path: p for p in info.paths}
        self.assertEqual([p.path for p in info.paths],
                         ["flash_sm90", "flash_sm80", "standard_cuda", "flash_cpu", "standard_cpu"])
        self.assertTrue(paths["flash_cpu"].available)
        self.assertTrue(paths["standard_cpu"].available)
        for path in info.paths:
            self.assertEqual(path.available, not path.rejections, path.path)
        cpu = [d for d in info.devices if d.kind == pb.DEVICE_KIND_CPU]
        self.assertEqual(len(cpu), 1)
        self.assertGreater(cpu[0].cores, 0)
        self.assertGreater(cpu[0].memory_bytes, 0)
        self.assertEqual(info.limits.max_header_bytes, 64 * 1024)
        self.assertEqual(info.limits.max_chunk_bytes, 1 << 20)
        for name in ("max_unary_bytes", "max_request_bytes", "max_inflight_bytes",
                     "max_inflight_requests", "workspace_limit_bytes", "max_head_dim"):
            self.assertGreater(getattr(info.limits, name), 0, name)
        self.assertGreater(info.uptime_ns, 0)

    def test_plan_says_what_forward_does(self):
        case = simple_case(self.rng, batch=2, seqlen_q=100, seqlen_k=130, num_heads=4)
        plan = self.stub.Plan(case.plan_request(), timeout=T)
        report = self.stub.Forward(case.forward_request(), timeout=T).report
        self.assertEqual(plan.path, report.path)
        self.assertEqual(plan.kernel, report.kernel)
        self.assertEqual(plan.flops, report.flops)
        for level in ("wire_request_bytes", "wire_response_bytes", "compulsory_bytes",
                      "tile_bytes", "standard_bytes"):
            self.assertEqual(getattr(plan.traffic, level), getattr(report.traffic, level), level)
        self.assertEqual(plan.score_entries_per_head, 100 * 130)
        self.assertEqual(plan.visible_pairs, 2 * 4 * 100 * 130)
        for name in ("on_chip_elements", "tile_q", "tile_k", "standard_elements_per_head",
                     "flash_elements_per_head"):
            self.assertGreater(getattr(plan, name), 0, name)

    def test_plan_needs_no_sources(self):
        case = simple_case(self.rng)
        request = case.plan_request(pb.PASS_BACKWARD)
        request.ClearField("payload")
        for name in "qkv":
            getattr(request.header, name).ClearField("source")
        plan = self.stub.Plan(request, timeout=T)
        self.assertEqual(plan.path, "flash_cpu")

    def test_health(self):
        self.assertEqual(self.server.health(), health_pb.HealthCheckResponse.SERVING)
        self.assertEqual(self.server.health(contract.SERVICE),
                         health_pb.HealthCheckResponse.SERVING)
        with self.assertRaises(grpc.RpcError) as caught:
            self.server.health("no.such.Service")
        self.assertEqual(caught.exception.code(), grpc.StatusCode.NOT_FOUND)

    def test_health_watch(self):
        watch = health_grpc.HealthStub(self.channel).Watch(
            health_pb.HealthCheckRequest(service=contract.SERVICE), timeout=T)
        self.assertEqual(next(watch).status, health_pb.HealthCheckResponse.SERVING)
        watch.cancel()

    def test_reflection(self):
        stub = reflection_grpc.ServerReflectionStub(self.channel)
        requests = [
            reflection_pb.ServerReflectionRequest(list_services="*"),
            reflection_pb.ServerReflectionRequest(file_containing_symbol=contract.SERVICE)]
        listed, described = stub.ServerReflectionInfo(iter(requests), timeout=T)
        services = {s.name for s in listed.list_services_response.service}
        self.assertLessEqual({contract.SERVICE, "grpc.health.v1.Health"}, services)
        from google.protobuf import descriptor_pb2
        files = [descriptor_pb2.FileDescriptorProto.FromString(data)
                 for data in described.file_descriptor_response.file_descriptor_proto]
        methods = {m.name for f in files for s in f.service for m in s.method}
        self.assertEqual(methods, {"Forward", "Backward", "ForwardStream", "BackwardStream",
                                   "Plan", "GetServerInfo"})

    def test_many_callers_at_once(self):
        cases = list(self.cases(8))
        errors = []

        def work(case):
            try:
                for _ in range(5):
                    reply = self.stub.Forward(case.forward_request(), timeout=T)
                    self.check_forward(case, reply.header, reply.payload)
            except BaseException as error:  # reported by the main thread
                errors.append(error)

        threads = [threading.Thread(target=work, args=(case,)) for case in cases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    def test_nothing_is_left_in_flight(self):
        self.stub.Forward(simple_case(self.rng).forward_request(), timeout=T)
        wait_idle(self.server)


if __name__ == "__main__":
    unittest.main(verbosity=2)
