#!/usr/bin/env python3
"""report.py holds where the bar holds, and refuses what is missing, stale, partial or of a failed
run."""

import contextlib
import copy
import io
import json
import pathlib
import sys
import tempfile
import unittest

import build
import counters_parse
import exactness as exactness_runner
import report
import sources

HERE = pathlib.Path(__file__).resolve().parent


def meta():
    return dict(gpu="A GPU", driver="1", commit="abc", date="2000-01-01T00:00:00Z", method="m",
                sources=sources.all_hashes())


def sweep(ratio=1.0):
    cells = []
    for which in ("fwd", "bwd"):
        for dim in (64, 128, 256):
            for causal in (False, True):
                for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
                    cells.append(dict(cell=f"{which}{dim}{causal}{seqlen}", which=which,
                                      head_dim=dim, causal=causal, seqlen=seqlen,
                                      ms={"flash_sm80": 1.0, "fa2": ratio, "cudnn": 0.5}))
    return dict(meta(), path="flash_sm80", cells=cells)


def decode(ratio=1.1):
    cells = [dict(cell=f"b{b}_k{k}", batch=b, keys=k, ms={"flash_sm80": 1.0, "fa2": ratio},
                  gbps={"flash_sm80": 1.0, "fa2": 1.0}) for b in (1, 16, 64) for k in (1, 2, 3)]
    return dict(meta(), path="flash_sm80", cells=cells)


def sparse(over=1.2):
    return dict(meta(), shape={"seqlen": 65536}, dense_ms={"fwd": 10.0, "bwd": 20.0},
                cells=[dict(density=d, ms={"fwd": over * d * 10, "bwd": d * 20})
                       for d in (0.05, 0.1, 0.2, 0.35, 0.5)])


def memory(growth=2.0, longest=65536):
    points, seqlen, size = [], longest // 4, 2**30
    for _ in range(3):
        points.append(dict(seqlen=seqlen, flash={"device_bytes": size},
                           standard={"refused": "too long"}, standard_unchunked_bytes=2**40))
        seqlen, size = 2 * seqlen, size * growth
    return dict(meta(), series=[dict(head_dim=64, points=points)])


def exact(worst=0.99, failed=0, leave_out=None):
    tensors = {t: 0.5 for t in ("out", "lse", "dq", "dk", "dv", "dbias", "dsink")}
    ratios = {p: dict(tensors, dv=worst) for p in report.PATHS}
    programs = [dict(program=p, passed=5, failed=failed, skipped=0, status=int(failed > 0))
                for p in report.PROGRAMS if p != leave_out]
    return dict(meta(), ratios=ratios, programs=programs)


def served(path="flash_sm80", status=0, ratio=0.9):
    share = {"kernel": 0.5, "wire": 0.5}
    calls = [dict(call=f"{c} x", path=path, device_kind="CUDA", share=share, total_ms=1.0, ok=True)
             for c in ("forward", "backward")]
    fixture = [dict(command=c, status=status) for c in ("forward", "backward")]
    sample = [dict(path=p, calls=10, max_ratio=ratio, failed=0) for p in report.PATHS]
    return dict(meta(), stages=["kernel", "wire"], calls=calls, fixture=fixture, sample=sample)


def sanitized(findings=0, tools=("memcheck", "racecheck", "initcheck", "synccheck")):
    return dict(meta(), runs=[dict(tool=t, program="p", cases=3, findings=findings, status=0)
                              for t in tools])


def gpt2(flash=1.0, standard=1.4):
    def runs():
        return {"flash_sm80": {"ms": flash, "fwd_ms": 1.0, "bwd_ms": 1.0},
                "standard_cuda": {"ms": standard * 10, "model_budget_ms": 10.0},
                "fa2": {"ms": 1.0}, "cudnn": {"ms": 0.7}}
    return dict(meta(), cases=[dict(causal=False, dropout_p=p, runs=runs()) for p in (0.0, 0.1)])


def counted(ratio=1.05):
    cells = [dict(case="gpt2", path=p, **{"pass": w}, dram_bytes=1e9,
                  l2_to_sm_bytes=1e9 if p == "flash_sm80" else None,
                  plan=dict(tile_bytes=ratio * 1e9, compulsory_bytes=1e9))
             for p in report.PATHS for w in ("fwd", "bwd")]
    return dict(meta(), cells=cells)


def built(minutes=10, cores=2):
    kernel = dict(kernel="k", arch="sm_90", registers=255, stack=0, spill_stores=0, spill_loads=0,
                  shared=0)
    return dict(meta(), seconds=60 * minutes, cores=cores, kernels=[kernel])


# Name: results under which the bar holds.
GOOD = {
    "exactness": {"exactness": exact(), "end-to-end": served()},
    "sanitizers": {"sanitizers": sanitized()},
    "sm80-vs-fa2": {"sm80-vs-fa2": sweep()},
    "gpt2-medium": {"gpt2-medium": gpt2(), "counters": counted()},
    "decode": {"decode": decode()},
    "block-sparse": {"block-sparse": sparse()},
    "gpu-memory": {"gpu-memory": memory()},
    "end-to-end": {"end-to-end": served()},
    "build": {"build": built()},
}


class ReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def report(self, name, files, *arguments):
        """(exit status, last line)."""
        for old in pathlib.Path(self.folder.name).iterdir():
            old.unlink()
        for file, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (pathlib.Path(self.folder.name) / f"{file}.json").write_text(text)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            status = report.main([name, "--results", self.folder.name, *arguments])
        return status, out.getvalue().rstrip("\n").split("\n")[-1]

    def test_every_name_holds_on_good_results(self):
        self.assertEqual(set(GOOD), set(report.REPORTS))
        for name, files in GOOD.items():
            with self.subTest(name):
                status, line = self.report(name, files)
                self.assertEqual(status, 0, line)
                self.assertRegex(line, rf"^{name}: .* \(bar: .*\)$")

    def test_refuses_a_missing_file(self):
        for name, files in GOOD.items():
            for missing in files:
                with self.subTest(name, missing=missing):
                    rest = {f: c for f, c in files.items() if f != missing}
                    status, line = self.report(name, rest)
                    self.assertEqual(status, 1)
                    self.assertIn(f"{missing}.json", line)

    def test_refuses_results_of_another_state_of_the_code(self):
        for name, files in GOOD.items():
            for file in files:
                with self.subTest(name, file=file):
                    old = copy.deepcopy(files)
                    old[file]["sources"] = {part: "0" * 16 for part in sources.PARTS}
                    status, line = self.report(name, old)
                    self.assertEqual(status, 1)
                    self.assertIn("stale", line)
                    self.assertEqual(self.report(name, old, "--any-sources")[0], 0)

    def test_refuses_a_file_without_provenance_and_what_is_not_json(self):
        for name, files in GOOD.items():
            file = next(iter(files))
            for field in ("gpu", "driver", "commit", "date", "method", "sources"):
                with self.subTest(name, field=field):
                    bare = copy.deepcopy(files)
                    del bare[file][field]
                    status, line = self.report(name, bare)
                    self.assertEqual(status, 1)
                    self.assertIn(field, line)
            self.assertEqual(self.report(name, {**files, file: "{"})[0], 1)
            self.assertEqual(self.report(name, {**files, file: meta()})[0], 1)

    def test_bars_that_do_not_hold(self):
        slow = sweep()
        slow["cells"][7]["ms"]["fa2"] = 0.74
        wrong_dtype = sweep()
        wrong_dtype["path"] = "standard_cuda"
        for name, files in (
                ("exactness", {"exactness": exact(worst=1.001), "end-to-end": served()}),
                ("exactness", {"exactness": exact(failed=1), "end-to-end": served()}),
                ("exactness", {"exactness": exact(), "end-to-end": served(ratio=1.1)}),
                ("exactness", {"exactness": exact(leave_out="exactness_large_cuda_test"),
                               "end-to-end": served()}),
                ("sanitizers", {"sanitizers": sanitized(findings=1)}),
                ("sanitizers", {"sanitizers": sanitized(tools=("memcheck", "racecheck"))}),
                ("sm80-vs-fa2", {"sm80-vs-fa2": sweep(0.89)}),
                ("sm80-vs-fa2", {"sm80-vs-fa2": slow}),
                ("sm80-vs-fa2", {"sm80-vs-fa2": wrong_dtype}),
                ("gpt2-medium", {"gpt2-medium": gpt2(flash=1.11), "counters": counted()}),
                ("gpt2-medium", {"gpt2-medium": gpt2(standard=1.51), "counters": counted()}),
                ("gpt2-medium", {"gpt2-medium": gpt2(), "counters": counted(0.89)}),
                ("decode", {"decode": decode(0.99)}),
                ("block-sparse", {"block-sparse": sparse(1.31)}),
                ("gpu-memory", {"gpu-memory": memory(2.3)}),
                ("gpu-memory", {"gpu-memory": memory(longest=16384)}),
                ("end-to-end", {"end-to-end": served(path="flash_cpu")}),
                ("end-to-end", {"end-to-end": served(status=4)}),
                ("build", {"build": built(minutes=31)}),
                ("build", {"build": built(cores=16)})):
            with self.subTest(name):
                self.assertEqual(self.report(name, files)[0], 1)

    def test_refuses_a_partial_sweep_and_failed_cells(self):
        partial = sweep()
        partial["cells"].pop()
        self.assertEqual(self.report("sm80-vs-fa2", {"sm80-vs-fa2": partial})[0], 1)
        failed = sweep()
        failed["cells"][3] = dict(cell="x", error="RuntimeError: out of memory")
        status, line = self.report("sm80-vs-fa2", {"sm80-vs-fa2": failed})
        self.assertEqual(status, 1)
        self.assertIn("out of memory", line)

    def test_unknown_name(self):
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            report.main(["speed"])


class ParsersTest(unittest.TestCase):
    def test_ptxas_table(self):
        kernels = build.resource_usage(
            "ptxas info    : Compiling entry function 'kernel_a' for 'sm_90'\n"
            "ptxas info    : Function properties for kernel_a\n"
            "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
            "ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem\n"
            "[2/3] Building CUDA object b.cu.o\n"
            "ptxas info    : Compiling entry function 'kernel_b' for 'sm_80'\n"
            "ptxas info    : Function properties for kernel_b\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
            "ptxas info    : Used 32 registers, used 0 barriers\n")
        self.assertEqual(kernels, [
            dict(kernel="kernel_a", arch="sm_90", stack=8, spill_stores=4, spill_loads=12,
                 registers=168, shared=1024),
            dict(kernel="kernel_b", arch="sm_80", stack=0, spill_stores=0, spill_loads=0,
                 registers=32, shared=0)])

    def test_gtest_report(self):
        counts = exactness_runner.counts_of({"testsuites": [{"testsuite": [
            {"status": "RUN", "result": "COMPLETED"},
            {"status": "RUN", "result": "COMPLETED", "failures": [{"failure": "x"}]},
            {"status": "RUN", "result": "SKIPPED"},
            {"status": "NOTRUN", "result": "SUPPRESSED"}]}]})
        self.assertEqual(dict(counts), dict(passed=1, failed=1, skipped=1))

    def test_a_part_that_left_no_report_failed(self):
        row = exactness_runner.collect("p", [
            dict(counts=dict(passed=2, failed=0, skipped=0), status=0, seconds=1),
            dict(counts=None, status=-11, seconds=1)])
        self.assertEqual((row["passed"], row["failed"], row["status"]), (2, 1, -11))

    def test_ncu_table(self):
        header = ["ID", "Kernel Name", *counters_parse.METRICS.values()]
        units = ["", ""] + ["Mbyte"] * 2 + ["byte"] * 2 + ["sector"] * 4
        marker = ["0", "void FillFunctor(float)", *["0"] * 8]
        kernel = ["1", "void Forward<x>(attn::P)", "1.5", "0.5", "1,000", "600", "10", "20", "0",
                  "0"]
        text = "==PROF== x\n" + "\n".join(
            ",".join(f'"{field}"' for field in row) for row in (header, units, marker, kernel,
                                                                kernel)) + "\n"
        plan = {"case": "c", "plan": dict(tile_bytes=3200, tile_loaded_bytes=2000,
                                          tile_stored_bytes=1200)}
        kernels, = counters_parse.merge([counters_parse.parse(text, 1)] * 2)
        cell = counters_parse.summed(plan, kernels)
        self.assertEqual(cell["dram_bytes"], 4e6)
        self.assertEqual(cell["l2_to_sm_bytes"], 3200)
        self.assertEqual(cell["model_over_l2"], 1.0)
        self.assertEqual(cell["l2_slices_bytes"], 32 * 60)
        with self.assertRaises(RuntimeError):
            counters_parse.parse(text, 2)


if __name__ == "__main__":
    sys.exit(unittest.main())
