#!/usr/bin/env python3
"""Forward and backward over gRPC on a CUDA device: attnd, the attn command, and a stock client.

usage: end_to_end.py [--out DIR] [--sample N]          writes DIR/end-to-end.json
ATTND and ATTN name the programs; as for the integration tests, ATTN_CONTRACT_DIR may name stubs."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integration"))

import grpc  # noqa: E402
import numpy as np  # noqa: E402

import results  # noqa: E402
from harness import reference  # noqa: E402
from harness.cases import random_case, simple_case  # noqa: E402
from harness.contract import (UNLIMITED, pb, pb_grpc, read_tensor, round_to)  # noqa: E402
from harness.server import ATTND, Attnd  # noqa: E402

ATTN = os.environ.get("ATTN", "attn")
SM90, SM80, STANDARD = "flash_sm90", "flash_sm80", "standard_cuda"
# They take no backward: a request that names one is refused, and AUTO takes the next path.
FORWARD_ONLY = {SM90}
# Why a path that runs on the device may decline a call.
MAY_DECLINE = {pb.REASON_OPTION_UNSUPPORTED, pb.REASON_ALIGNMENT}
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
FIXTURES = ROOT / "tests/fixtures"
# Stages of a call in the report; what is left of the client's time is the wire's.
STAGES = ("parse", "gather", "queue", "device_queue", "host_to_device", "kernel", "device_to_host",
          "reply", "other", "wire")
METHOD = ("attnd on this host; the fixture (a real model's q, k, v) by the attn command with its "
          "check; calls of several sizes by a stock gRPC client with the report, median of the "
          "calls by client time; random calls on each CUDA path, held element by element against a "
          "float64 reference, what flash_sm90 does not take on the path that AUTO takes then. "
          "wire: client time less handler time; other: handler time that no stage accounts for")


def fixture_calls(server):
    """The attn command on the fixture: its check holds and a CUDA path ran."""
    lengths = ",".join(map(str, json.loads((FIXTURES / "fixture.json").read_text())
                           ["options"]["seqlens_k"]))
    for command in ("forward", "backward"):
        done = subprocess.run(
            [ATTN, command, "--input", FIXTURES / "minilm_inputs.safetensors", "--seqlens-q",
             lengths, "--seqlens-k", lengths, "--check",
             FIXTURES / "minilm_expected.safetensors", "--json", "--report-level", "full",
             "--server", server.target], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=120)
        document = json.loads(done.stdout) if done.stdout.strip() else {}
        yield dict(command=command, status=done.returncode, report=document,
                   error=done.stderr.strip()[-500:])


def shares(report, client_ns):
    """Milliseconds and share of the client's time for each stage."""
    times = report.times
    ns = {stage: getattr(times, f"{stage}_ns") for stage in STAGES[:-2]}
    ns["other"] = max(0, times.handler_ns - sum(ns.values()))
    ns["wire"] = max(0, client_ns - times.handler_ns)
    return ({stage: value / 1e6 for stage, value in ns.items()},
            {stage: round(value / client_ns, 4) for stage, value in ns.items()})


def timed(call, request):
    begin = time.perf_counter_ns()
    reply = call(request, timeout=120)
    return reply, time.perf_counter_ns() - begin


def selected(report, which, isa, decode):
    """Whether AUTO chose what it should: on a device of compute capability 9.0 flash_sm90 for what
    it takes, elsewhere and for backward flash_sm80, with the reason why not flash_sm90."""
    if not isa:
        return True  # the CPU paths
    why = {r.reason for r in report.rejections if r.path == SM90}
    if isa[0] == "sm_90" and which == "forward" and not (decode and why and why <= MAY_DECLINE):
        return report.path == SM90
    return report.path == SM80 and bool(why)


def row(name, case, reply, client_ns, ok):
    report = reply.report
    milliseconds, share = shares(report, client_ns)
    return dict(call=name, ok=ok, path=report.path, kernel=report.kernel,
                device_kind=pb.DeviceKind.Name(report.device_kind).removeprefix("DEVICE_KIND_"),
                device_index=report.device_index, dtype=pb.DType.Name(case.dtype),
                q_shape=list(case.q.shape), k_shape=list(case.k.shape),
                rejections=[f"{r.path}: {pb.Reason.Name(r.reason)}" for r in report.rejections],
                ms=milliseconds, share=share, total_ms=client_ns / 1e6,
                achieved_tflops=report.achieved_tflops,
                fraction_of_roofline=report.fraction_of_roofline,
                traffic={f.name: getattr(report.traffic, f.name)
                         for f in report.traffic.DESCRIPTOR.fields})


def executed(server):
    """Calls run to the end by path and pass, as the metrics say."""
    return [dict(dict(labels), calls=value) for labels, value in
            server.metrics().select("attn_executions_total").items() if value]


SIZES = (
    ("b1_h8_s512_d64", dict(batch=1, seqlen_q=512, seqlen_k=512, num_heads=8, num_kv_heads=8,
                            head_dim=64)),
    ("b2_h16_s2048_d128_causal", dict(batch=2, seqlen_q=2048, seqlen_k=2048, num_heads=16,
                                      num_kv_heads=16, head_dim=128, causal=True)),
    ("b4_h32_kv8_s1024_d128", dict(batch=4, seqlen_q=1024, seqlen_k=1024, num_heads=32,
                                   num_kv_heads=8, head_dim=128)),
    ("decode_b8_h32_kv8_k2048_d128", dict(batch=8, seqlen_q=1, seqlen_k=2048, num_heads=32,
                                          num_kv_heads=8, head_dim=128)),
)


def sized_calls(stub, isa, repeats=3):
    """Forward and backward at each of SIZES: the call of median client time."""
    rng = np.random.default_rng(1)
    for name, sizes in SIZES:
        decode = sizes["seqlen_q"] == 1
        case = simple_case(rng, dtype=pb.DTYPE_BF16, **sizes)
        request = case.forward_request()
        replies = [timed(stub.Forward, request) for _ in range(repeats)]
        reply, ns = sorted(replies, key=lambda r: r[1])[repeats // 2]
        out = read_tensor(reply.header.out, reply.payload)
        lse = read_tensor(reply.header.lse, reply.payload)
        good = np.isfinite(out).all() and selected(reply.report, "forward", isa, decode)
        yield row(f"forward {name}", case, reply, ns, bool(good))
        dout = round_to(rng.standard_normal(case.out_shape), case.dtype)
        request = case.backward_request(out, lse, dout)
        replies = [timed(stub.Backward, request) for _ in range(repeats)]
        reply, ns = sorted(replies, key=lambda r: r[1])[repeats // 2]
        finite = all(np.isfinite(read_tensor(getattr(reply.header, t), reply.payload)).all()
                     for t in ("dq", "dk", "dv"))
        good = finite and selected(reply.report, "backward", isa, decode)
        yield row(f"backward {name}", case, reply, ns, bool(good))


class Sample:
    """Random calls on one path, forward and backward, against the reference."""

    def __init__(self, stub, path, seed):
        self.stub, self.path, self.rng = stub, path, np.random.default_rng(seed)
        self.calls, self.refused, self.declined, self.worst = 0, 0, {}, {}
        self.next_calls, self.next_worst = 0, {}
        self.failures = []

    def run(self, count):
        tries, wanted = 0, count if self.path in FORWARD_ONLY else 2 * count
        while self.calls < wanted and tries < 20 * count:
            tries += 1
            case = random_case(self.rng, max_seqlen=70,
                               head_dims=(8, 16, 64, 72, 96, 128, 192, 256))
            if self.path in (SM90, SM80) and case.dtype == pb.DTYPE_FP32:
                continue
            if (self.path.startswith("flash") and case.block_mask is not None and
                    case.block[0] % 64):
                continue
            self.one(case)
        if self.calls < wanted:
            self.failures.append(f"{self.path} took {self.calls} calls of {tries} cases")
        return dict(path=self.path, calls=self.calls, ratios=self.worst,
                    max_ratio=max(self.worst.values(), default=0.0), failed=len(self.failures),
                    failures=self.failures[:10], declined=self.declined,
                    backward_refused=self.refused, next_path_calls=self.next_calls,
                    next_path_ratios=self.next_worst)

    def one(self, case):
        case.policy = pb.PathPolicy(mode=pb.PATH_POLICY_NAMED, path=self.path)
        expected = reference.forward(case)
        try:
            reply = self.stub.Forward(case.forward_request(), timeout=60)
        except grpc.RpcError as error:
            if self.path not in FORWARD_ONLY or error.code() != FAILED_PRECONDITION:
                raise
            self.decline(case, expected)
            return
        check(case, reply, expected, self.path, self.worst, self.failures)
        self.calls += 1
        self.backward(case, reply)

    def decline(self, case, expected):
        """The path does not take the case: another flash path does, and says why it was not this
        one."""
        case.policy = None
        reply = self.stub.Forward(case.forward_request(), timeout=60)
        check(case, reply, expected, SM80, self.next_worst, self.failures)
        self.next_calls += 1
        why = {r.reason: r.detail for r in reply.report.rejections if r.path == self.path}
        if not why or not set(why) <= MAY_DECLINE:
            self.failures.append(f"declined for {why or 'no reason'}: {described(case)}")
        for reason, detail in why.items():
            text = f"{pb.Reason.Name(reason)}: {detail}"
            self.declined[text] = self.declined.get(text, 0) + 1

    def backward(self, case, reply):
        out = read_tensor(reply.header.out, reply.payload)
        lse = read_tensor(reply.header.lse, reply.payload)
        dout = round_to(self.rng.standard_normal(case.out_shape), case.dtype)
        dlse = round_to(self.rng.standard_normal(case.lse_shape), pb.DTYPE_FP32)
        path, worst = self.path, self.worst
        if path in FORWARD_ONLY:
            request = case.backward_request(out, lse, dout, dlse)
            try:
                self.stub.Backward(request, timeout=60)
                self.failures.append(f"{path} took a backward: {described(case)}")
            except grpc.RpcError as error:
                if error.code() != FAILED_PRECONDITION:
                    raise
                self.refused += 1
            # Of its own out and lse by the path that AUTO takes.
            case.policy, path, worst = None, SM80, self.next_worst
            self.next_calls += 1
        else:
            self.calls += 1
        reply = self.stub.Backward(case.backward_request(out, lse, dout, dlse), timeout=60)
        check(case, reply, reference.backward(case, dout, dlse), path, worst, self.failures)


def described(case):
    """Options and shapes, without the numbers."""
    fields = {name: list(value.shape) if isinstance(value, np.ndarray) else value
              for name, value in vars(case).items()}
    return {name: str(value) for name, value in fields.items() if value not in (None, (), False)}


def check(case, reply, expected, path, worst, failures):
    problems = [] if reply.report.path == path else [f"ran on {reply.report.path}"]
    for name, want in expected.items():
        ratio = reference.worst_ratio(read_tensor(getattr(reply.header, name), reply.payload),
                                      want)
        worst[name] = max(ratio, worst.get(name, 0.0))
        if not ratio <= 1:
            problems.append(f"{name}: error / bound {ratio:.3g}")
    if problems:
        failures.append(f"{problems} of {described(case)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="results")
    parser.add_argument("--sample", type=int, default=60, help="random calls on each path")
    parser.add_argument("--devices", default="0", help="attnd's --cuda-devices; none: CPU paths")
    parser.add_argument("--paths", nargs="+",
                        help="default: standard_cuda, flash_sm80, and flash_sm90 where it runs")
    args = parser.parse_args()
    print(f"attnd: {ATTND}, attn: {ATTN}", flush=True)
    with Attnd(f"--cuda-devices={args.devices}", "--max-unary-bytes=1GiB") as server:
        stub = pb_grpc.AttentionStub(server.channel(options=UNLIMITED))
        fixture = list(fixture_calls(server))
        for call in fixture:
            print("fixture", call["command"], "exit status", call["status"], call["error"],
                  flush=True)
        devices = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).devices
        isa = [d.isa for d in devices if d.kind == pb.DEVICE_KIND_CUDA]
        calls = list(sized_calls(stub, isa))
        executions = executed(server)
        for call in calls:
            print(call["call"], call["path"], call["device_kind"], f"{call['total_ms']:.2f} ms",
                  call["share"], flush=True)
        paths = args.paths or [SM80, STANDARD, *([SM90] if isa[:1] == ["sm_90"] else [])]
        samples = [Sample(stub, path, seed).run(args.sample) for seed, path in enumerate(paths)]
        for one in samples:
            print("sample", one, flush=True)
        log = server.log()
    results.write_result(args.out, "end-to-end",
                         dict(stages=STAGES, fixture=fixture, isa=isa, calls=calls,
                              executions=executions, sample=samples,
                              log=log.splitlines()[:20]), METHOD)
    good = (all(c["status"] == 0 for c in fixture) and all(c["ok"] for c in calls) and
            all(s["failed"] == 0 for s in samples))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
