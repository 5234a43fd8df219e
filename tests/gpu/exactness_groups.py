"""What the matrix program compares on each path, by head_dim, option and magnitude of the numbers:
the cases of each, run by themselves."""

import collections
import concurrent.futures
import re
import subprocess
import time

PROGRAM = "exactness_matrix_cuda_test"
# Head dims that have a tile of their own; others are padded to one of them.
HEAD_DIMS = ("64", "96", "128", "192", "256", "192x128")
SUITES = {"HeadDim": "head_dims", "Option": "options", "Numbers": "numbers"}
NAME = re.compile(r"^  EveryPath/(?:fp16|bf16)_b\d+_h\d+(?P<gqa>_kv\d+)?_q\d+_k\d+_d(?P<dim>\d+)"
                  r"(?:_dv(?P<dim_v>\d+))?(?P<thd>_thd)?(?P<lens>_lens[qk\d]+)?(?P<rest>\S*)")
COMPARED = re.compile(r"^tensors compared on (\S+): (\d+)$", re.M)


def compared(text):
    """Tensors by path, as a program of exactness tests prints them."""
    return {path: int(count) for path, count in COMPARED.findall(text)}


def filter_of(head_dim):
    """A --gtest_filter: small cases of 16-bit element types at one of HEAD_DIMS."""
    names = "*16_b1_*_d" + head_dim.replace("x", "_dv")
    return ":".join(f"{suite}/{names}{mask}" for suite in ("HeadDim", "Numbers")
                    for mask in ("", "_causal"))


def key_of(kind, match):
    if kind == "head_dims":
        return match["dim"] + (f"x{match['dim_v']}" if match["dim_v"] else "")
    if kind == "numbers":
        return match["rest"].replace("_causal", "").strip("_") or "gauss"
    words = [word for word, there in (("gqa", match["gqa"]), ("head_dim_v", match["dim_v"]),
                                      ("thd", match["thd"]), ("lengths", match["lens"])) if there]
    words += [word for word in match["rest"].split("_") if word]
    return " ".join(words) or "odd head_dim"


def groups_of(listing):
    """{(kind, key): names of tests} of --gtest_list_tests, 16-bit element types only."""
    groups, suite = collections.defaultdict(list), ""
    for line in listing.splitlines():
        if not line.startswith(" "):
            suite = line.split("#")[0].strip()
            continue
        kind, match = SUITES.get(suite.split("/")[0]), NAME.match(line)
        if kind and match:
            groups[kind, key_of(kind, match)].append(suite + line.split("#")[0].strip())
    return groups


def run_group(program, names, limit):
    """(tensors compared by path, exit status)."""
    try:
        done = subprocess.run([program.resolve(), "--gtest_brief=1",
                               "--gtest_filter=" + ":".join(names)], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace", timeout=limit)
    except subprocess.TimeoutExpired:
        return {}, 124
    return compared(done.stdout), done.returncode


def counts(program, jobs, limit):
    """({kind: {path: {key: tensors}}}, groups that failed)."""
    listing = subprocess.run([program.resolve(), "--gtest_list_tests"], capture_output=True,
                             text=True, timeout=limit, check=True).stdout
    groups, begin = groups_of(listing), time.monotonic()
    result = {kind: collections.defaultdict(dict) for kind in SUITES.values()}
    failed = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = {group: pool.submit(run_group, program, names, limit)
                for group, names in groups.items()}
        answers = {group: run.result() for group, run in runs.items()}
    paths = {path for tensors, _ in answers.values() for path in tensors}
    for (kind, key), (tensors, status) in answers.items():
        if status:
            failed.append(f"{kind} {key}: exit status {status}")
        for path in paths:
            result[kind][path][key] = tensors.get(path, 0)
    print(f"{len(groups)} groups of cases: {time.monotonic() - begin:.0f} s", flush=True)
    return result, failed
