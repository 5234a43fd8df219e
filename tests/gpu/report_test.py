#!/usr/bin/env python3
"""report.py holds where the bar holds, and refuses what is missing, stale, partial or of a failed
run."""

import contextlib
import copy
import fnmatch
import io
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

import anchors
import build
import counters_parse
import exactness as exactness_runner
import exactness_groups
import report
import sources

HERE = pathlib.Path(__file__).resolve().parent
HASHES = sources.all_hashes()


def meta():
    return dict(gpu="A GPU", driver="1", commit="abc", date="2000-01-01T00:00:00Z", method="m",
                sources=dict(HASHES))


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
    groups = {"head_dims": dict.fromkeys((*exactness_groups.HEAD_DIMS, "72"), 4),
              "options": {"causal": 8, "bias": 0}, "numbers": {"gauss": 4, "x64": 4}}
    return dict(meta(), ratios=ratios, programs=programs, failed_groups=[],
                tensors_compared={p: 100 for p in report.PATHS},
                groups={kind: {p: dict(counts) for p in report.PATHS}
                        for kind, counts in groups.items()})


def served(path="flash_sm80", status=0, ratio=0.9, isa="sm_80", executed="flash_sm80"):
    share = {"kernel": 0.5, "wire": 0.5}
    calls = [dict(call=f"{c} x", path=path, device_kind="CUDA", share=share, total_ms=1.0, ok=True)
             for c in ("forward", "backward")]
    fixture = [dict(command=c, status=status) for c in ("forward", "backward")]
    sample = [dict(path=p, calls=10, max_ratio=ratio, failed=0) for p in report.PATHS]
    executions = [{"pass": c, "path": executed, "dtype": d, "calls": 3.0}
                  for c in ("forward", "backward") for d in ("fp16", "bf16")]
    return dict(meta(), stages=["kernel", "wire"], calls=calls, fixture=fixture, sample=sample,
                isa=[isa], executions=executions)


def sanitized(findings=0, tools=("memcheck", "racecheck", "initcheck", "synccheck")):
    return dict(meta(), runs=[dict(tool=t, program="p", head_dim=dim, cases=3, findings=findings,
                                   status=0, tensors={p: 5 for p in report.PATHS})
                              for t in tools for dim in (None, *exactness_groups.HEAD_DIMS)])


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


def sm90_forward(r=1.06, slowest=None, **other):
    """`r`: of every cell, but of one `slowest`."""
    cells = []
    for (which, dim, causal, seqlen), row in anchors.sweep().items():
        if which != "fwd":
            continue
        ahead = slowest if slowest is not None and not cells else r
        # cuDNN has another day than in the anchors, which must not show.
        ms = {"cudnn": 1.3, "fa2": 2.0,
              "flash_sm90": 1.3 / (ahead * row["best_peer"] / row["cudnn_9_19"])}
        cells.append(dict(cell=f"fwd_d{dim}_{causal}_s{seqlen}", which=which, head_dim=dim,
                          causal=causal, seqlen=seqlen, flops=1e12, ms=ms, kernel_id="k"))
    return dict(meta(), path="flash_sm90", cells=cells, **{"gpu": "NVIDIA H200", "cudnn": 91900,
                                                           **other})


def sm90_sustained(fp16=1.02, packed=1.04, grouped=0.99, path="flash_sm90"):
    """Times, of which the other of each cell has 1."""
    times = {"dtype": {"bf16": 1.0, "fp16": fp16, "fp16_same_numbers": 1.01, "cudnn": 1.1,
                       "cudnn_fp16": 1.21},
             "packed": {"dense": 1.0, "packed": packed},
             "grouped": {"dense": 1.0, "grouped": grouped}}
    # The causal cells alone decide: full ones are equal.
    cells = [dict(cell=f"{group}_{mask}", group=group, causal=mask == "causal", flops=7e11,
                  ms=ms if mask == "causal" else {n: 1.0 for n in ms})
             for group, ms in times.items() for mask in ("full", "causal")]
    return dict(meta(), path=path, calls=300, cells=cells)


def sm90_decode(ratio=0.98, replay=9.0):
    """`ratio`: of the last cell; the others are ahead."""
    cells = [dict(cell=f"b{b}_k{k}", batch=b, keys=k, path="flash_sm80", declined="OPTION",
                  kernel_id="k", ms={"ours": 1.0, "fa2": 1.5, "cudnn": 1.2},
                  gbps={"ours": 2000.0, "fa2": 1.0, "cudnn": 2.0}) for b, k in anchors.decode()]
    cells[-1]["ms"]["cudnn"] = ratio
    cells[0]["replay_us"] = {"ours": replay}
    return dict(meta(), cells=cells)


def sm90_few_queries(ratio=0.98):
    """`ratio`: of the last cell; the others are ahead."""
    cells = [dict(cell=f"b{b}", kv_heads=8, batch=b, queries=17, keys=4096, path="flash_sm90",
                  declined=None, kernel_id="k", ms={"ours": 1.0, "fa2": 1.5, "cudnn": 1.2})
             for b in range(32)]
    cells[-1]["ms"]["cudnn"] = ratio
    return dict(meta(), cells=cells)


def random_calls(calls=900, capability=(9, 0), failures=()):
    cell = dict(calls=calls, kernels={"k": calls}, worst=0.7)
    return dict(meta(), times=6, capability=list(capability), failures=list(failures),
                pairs={"flash_sm90": "flash_sm80", "flash_sm80": "standard_cuda"},
                paths={"flash_sm90": cell if capability == (9, 0) else dict(cell, calls=0),
                       "flash_sm80": cell})


def changed(result, change):
    copied = copy.deepcopy(result)
    change(copied)
    return copied


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
    "random-calls": {"random-calls": random_calls()},
    "build": {"build": built()},
    "sm90-exactness": {"exactness": exact(), "sanitizers": sanitized()},
    "sm90-forward": {"sm90-forward": sm90_forward()},
    "sm90-forward-sustained": {"sm90-forward-sustained": sm90_sustained()},
    "sm90-decode": {"sm90-decode": sm90_decode()},
    "sm90-few-queries": {"sm90-few-queries": sm90_few_queries()},
}


class ReportTest(unittest.TestCase):
    def setUp(self):
        # The tree does not change while the tests run; reading it takes a while.
        patch = mock.patch.object(sources, "all_hashes", return_value=HASHES)
        patch.start()
        self.addCleanup(patch.stop)
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
                ("end-to-end", {"end-to-end": served(isa="sm_90")}),
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

    def test_end_to_end_on_a_device_of_9_0(self):
        good = served(isa="sm_90", path="flash_sm90", executed="flash_sm90")
        self.assertEqual(self.report("end-to-end", {"end-to-end": good})[0], 0)

    def test_random_calls(self):
        def status(*args, **named):
            return self.report("random-calls", {"random-calls": random_calls(*args, **named)})
        self.assertEqual(status(failures=[{"wrong": "not bitwise the same"}])[0], 1)
        self.assertEqual(status(capability=(8, 0))[0], 0)
        few, line = status(calls=199)
        self.assertEqual(few, 1)
        self.assertIn("199 calls on flash_sm80", line)

    def test_sm90_forward_says_which_of_floor_and_goal_is_met(self):
        for result, status, words in (
                (sm90_forward(1.06), 0, "goal met, floor met"),
                (sm90_forward(1.04), 0, "goal not met, floor met"),
                (sm90_forward(1.06, slowest=0.99), 0, "goal not met, floor met"),
                (sm90_forward(0.89), 1, "goal not met, floor not met"),
                (sm90_forward(0.95, slowest=0.79), 1, "goal not met, floor not met")):
            got, line = self.report("sm90-forward", {"sm90-forward": result})
            self.assertEqual(got, status, line)
            self.assertIn(words, line)
        _, line = self.report("sm90-forward", {"sm90-forward": sm90_forward(0.95, slowest=0.85)})
        self.assertIn("least 0.850 (fwd_d64_False_s512), 36 cells", line)

    def refused(self, name, result, word):
        status, line = self.report(name, {name: result})
        self.assertEqual(status, 1, line)
        self.assertRegex(line, f"no verdict: .*{word}")

    def test_sm90_forward_refuses_what_the_anchors_cannot_judge(self):
        name, good = "sm90-forward", sm90_forward()
        self.refused(name, sm90_forward(gpu="NVIDIA H100"), "H200")
        self.refused(name, sm90_forward(cudnn=91002), "cuDNN 91002")
        self.refused(name, changed(good, lambda r: r.update(path="flash_sm80")), "flash_sm80")
        self.refused(name, changed(good, lambda r: r["cells"].pop()), "35 cells")
        self.refused(name, changed(good, lambda r: r["cells"][3].update(error="Refused: x")),
                     "Refused")
        self.refused(name, changed(good, lambda r: r["cells"][3]["ms"].pop("cudnn")), "peer")
        self.refused(name, changed(good, lambda r: r["cells"][3].update(seqlen=777)), "anchors")

    def test_sm90_sustained(self):
        name = "sm90-forward-sustained"
        status, line = self.report(name, {name: sm90_sustained()})
        self.assertEqual(status, 0, line)
        self.assertIn("full 700 TFLOP/s (1.045 of FlashAttention-3's 670", line)
        self.assertIn("fp16 / bf16 0.980 (on the same numbers 0.990; cuDNN's 0.909), "
                      "THD / dense 0.962, GQA / dense 1.000", line)
        for slow in (dict(fp16=1.04), dict(packed=1.06), dict(grouped=1.06)):
            status, line = self.report(name, {name: sm90_sustained(**slow)})
            self.assertEqual(status, 1, line)
            self.assertNotIn("no verdict", line)
        self.refused(name, sm90_sustained(path="flash_sm80"), "flash_sm80")
        self.refused(name, changed(sm90_sustained(), lambda r: r["cells"].pop()), "5 cells")

    def test_sm90_decode(self):
        name = "sm90-decode"
        status, line = self.report(name, {name: sm90_decode()})
        self.assertEqual(status, 0, line)
        self.assertIn("0.980 (b64_k65536), 9 cells by flash_sm80; above the anchors' best "
                      "in 1 of 9", line)
        self.assertIn("graph replay 9.0 us (goal < 10 met", line)
        status, line = self.report(name, {name: sm90_decode(replay=12.0)})
        self.assertEqual(status, 0, line)
        self.assertIn("not met", line)
        status, line = self.report(name, {name: sm90_decode(0.96)})
        self.assertEqual(status, 1)
        self.assertNotIn("no verdict", line)
        self.refused(name, changed(sm90_decode(), lambda r: r["cells"][0].update(keys=1)),
                     "anchors")
        self.refused(name, changed(sm90_decode(), lambda r: r["cells"].pop()), "8 cells")

    def test_sm90_few_queries(self):
        name = "sm90-few-queries"
        status, line = self.report(name, {name: sm90_few_queries()})
        self.assertEqual(status, 0, line)
        self.assertIn("geometric mean 1.192, least 0.980 (b31), 32 cells", line)
        status, line = self.report(name, {name: sm90_few_queries(0.96)})
        self.assertEqual(status, 1)
        self.assertNotIn("no verdict", line)
        self.refused(name, changed(sm90_few_queries(), lambda r: r["cells"].pop()), "31 cells")
        self.refused(name, changed(sm90_few_queries(), lambda r: r["cells"][3]["ms"].pop("fa2")),
                     "fa2 did not run in b3")

    def test_sm90_exactness(self):
        name = "sm90-exactness"

        def status(exactness=None, sanitizers=None):
            return self.report(name, {"exactness": exactness or exact(),
                                      "sanitizers": sanitizers or sanitized()})
        for bad in (dict(exactness=exact(worst=1.001)), dict(exactness=exact(failed=1)),
                    dict(sanitizers=sanitized(findings=1)),
                    dict(exactness=changed(exact(), lambda r: r["failed_groups"].append("x")))):
            self.assertEqual(status(**bad)[0], 1)
            self.assertNotIn("no verdict", status(**bad)[1])
        for change in (lambda r: r["ratios"].pop("flash_sm90"),
                       lambda r: r["groups"]["head_dims"]["flash_sm90"].update({"192x128": 0}),
                       lambda r: r["groups"]["head_dims"].pop("flash_sm90"),
                       lambda r: r["groups"]["numbers"]["flash_sm90"].update(x64=0)):
            self.assertIn("no verdict", status(exactness=changed(exact(), change))[1])
        bare = changed(sanitized(), lambda r: r["runs"][9].update(tensors={"flash_sm80": 3}))
        self.assertRegex(status(sanitizers=bare)[1], "no verdict: .*racecheck at head_dim 96$")

    def test_results_of_flash_sm80_outlive_changes_of_sm90(self):
        for name, files in GOOD.items():
            for file in files:
                old = copy.deepcopy(files)
                old[file]["sources"][sources.SM90] = "0" * 16
                with self.subTest(name, file=file):
                    stands = name in ("sm80-vs-fa2", "gpt2-medium", "decode", "block-sparse",
                                      "gpu-memory")
                    self.assertEqual(self.report(name, old)[0], 0 if stands else 1)
        old = copy.deepcopy(GOOD["sm90-forward"])
        old["sm90-forward"]["sources"]["kernels/cuda/sm80"] = "0" * 16
        self.assertEqual(self.report("sm90-forward", old)[0], 0)

    def test_unknown_name(self):
        with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
            report.main(["speed"])


class SourcesTest(unittest.TestCase):
    """On a tree of a few files."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        for name, text in (
                ("common/shared.cuh", '#include "kernels/cuda/ptx/both.cuh"\n'),
                ("common/params.cc", '#include "kernels/cuda/common/params.h"\n'),
                ("common/params.h", ""), ("ptx/both.cuh", ""), ("ptx/unused.cuh", ""),
                ("ptx/new.cuh", '#include "kernels/cuda/ptx/newer.cuh"\n'), ("ptx/newer.cuh", ""),
                ("sm80/a.cuh", '#include "kernels/cuda/common/shared.cuh"\n'),
                ("sm90/b.cuh", '#include "kernels/cuda/ptx/new.cuh"\n'
                               '#include "kernels/cuda/common/params.h"\n'
                               '#include "kernels/cuda/ptx/both.cuh"\n')):
            self.write(name, text)
        self.before = self.hashes()

    def write(self, name, text):
        path = self.root / "kernels/cuda" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def hashes(self):
        sources.sm90_only.cache_clear()
        self.addCleanup(sources.sm90_only.cache_clear)
        return sources.all_hashes(self.root)

    def changed_by(self, name):
        self.write(name, "// new\n")
        now = self.hashes()
        return {part.removeprefix("kernels/cuda/") for part in now
                if now[part] != self.before[part]}

    def test_headers_of_sm90_alone_count_with_it(self):
        self.assertEqual(self.changed_by("ptx/newer.cuh"), {"sm90"})

    def test_shared_headers_count_with_their_folder(self):
        for name in ("ptx/both.cuh", "ptx/unused.cuh", "common/params.h"):
            with self.subTest(name):
                self.assertEqual(self.changed_by(name), {name.split("/")[0]})
                self.setUp()

    def test_what_no_measured_program_holds_counts_nowhere(self):
        self.assertEqual(self.changed_by("../../client/python/x.txt"), set())
        self.assertEqual(self.changed_by("../../client/lib/x.txt"), {"client"})

    def test_a_file_of_a_kernel_counts_with_it(self):
        self.write("sm80/c.cuh", "")
        self.before = self.hashes()
        self.assertEqual(self.changed_by("sm80/c.cuh"), {"sm80"})


class AnchorsTest(unittest.TestCase):
    def test_every_cell_has_its_row(self):
        rows = anchors.sweep()
        self.assertEqual(set(rows), {(w, d, c, s) for w in ("fwd", "bwd") for d in (64, 128, 256)
                                     for c in (False, True)
                                     for s in (512, 1024, 2048, 4096, 8192, 16384)})
        for row in rows.values():
            self.assertEqual(row["best_peer"], max(row["flashattention3"], row["cudnn_9_19"]))
        self.assertEqual(len(anchors.decode()), 9)

    def test_relative(self):
        row = {"best_peer": 600.0, "cudnn_9_19": 500.0}
        self.assertAlmostEqual(anchors.relative(2.0, 2.4, row), 1.0)
        self.assertAlmostEqual(anchors.relative(1.0, 2.4, row), 2.0)


class ParsersTest(unittest.TestCase):
    def test_groups_of_cases(self):
        listing = ("HeadDim/ExactnessTest.\n"
                   "  EveryPath/bf16_b1_h4_q63_k125_d192_dv128_causal  # GetParam() = x (seed 1)\n"
                   "  EveryPath/fp32_b1_h4_q63_k125_d64  # GetParam() = x (seed 1)\n"
                   "Option/ExactnessTest.\n"
                   "  EveryPath/fp16_b2_h4_kv2_q33_k200_d128  # GetParam() = x\n"
                   "  EveryPath/fp16_b2_h2_q65_k129_d32_lensk32k63  # GetParam() = x\n"
                   "  EveryPath/bf16_b2_h2_q65_k129_d32_causal_tl_wl40  # GetParam() = x\n"
                   "Numbers/ExactnessTest.\n"
                   "  EveryPath/bf16_b1_h2_q256_k256_d64_causal_x64  # GetParam() = x\n"
                   "  EveryPath/fp16_b1_h2_q256_k256_d64_x64  # GetParam() = x\n"
                   "Random/ExactnessTest.\n"
                   "  EveryPath/bf16_b1_h2_q256_k256_d64_n7  # GetParam() = x\n")
        groups = exactness_groups.groups_of(listing)
        self.assertEqual({key: len(names) for key, names in groups.items()},
                         {("head_dims", "192x128"): 1, ("options", "gqa"): 1,
                          ("options", "lengths"): 1, ("options", "causal tl wl40"): 1,
                          ("numbers", "x64"): 2})
        self.assertEqual(groups["options", "gqa"],
                         ["Option/ExactnessTest.EveryPath/fp16_b2_h4_kv2_q33_k200_d128"])

    def test_filter_of_a_head_dim(self):
        def matches(name, head_dim):
            return any(fnmatch.fnmatchcase(name, pattern)
                       for pattern in exactness_groups.filter_of(head_dim).split(":"))
        case = "HeadDim/ExactnessTest.EveryPath/bf16_b1_h4_q63_k125_d"
        self.assertTrue(matches(case + "192_dv128_causal", "192x128"))
        self.assertTrue(matches(case + "64", "64"))
        for name in (case + "192_dv128", case + "16", case.replace("bf16", "fp32") + "192",
                     case.replace("HeadDim", "Random") + "192"):
            self.assertFalse(matches(name, "192"), name)

    def test_compared(self):
        self.assertEqual(exactness_groups.compared(
            "x\ntensors compared on flash_sm90: 12\ntensors compared on flash_sm80: 7\n"),
            {"flash_sm90": 12, "flash_sm80": 7})

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
