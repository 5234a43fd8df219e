#!/usr/bin/env python3
"""What a result was measured of: a hash of the files of each part, as JSON. Without git, so that it
works on a copied tree."""

import functools
import hashlib
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SM90 = "kernels/cuda/sm90"
# A part is a folder. Headers of SHARED that the kernels of SM90 alone include count with SM90, so
# that work there leaves what was measured of the other kernels valid.
PARTS = ("kernels/api", "kernels/cuda/common", "kernels/cuda/ptx", "kernels/cuda/runtime",
         "kernels/cuda/sm80", SM90, "kernels/cuda/standard", "server", "proto", "client",
         "tests/exactness", "tests/reference")
SHARED = ("kernels/cuda/common", "kernels/cuda/ptx")
# In none of the programs that are measured.
APART = ("client/python",)
# Where a header of SHARED is used by more than SM90.
OTHERS = ("kernels/cuda/runtime", "kernels/cuda/sm80", "kernels/cuda/standard")
SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".in", ".proto", ".txt", ".map"}
INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.M)


def files_of(folder, root):
    files = (path.relative_to(root) for path in (root / folder).rglob("*")
             if path.is_file() and path.suffix in SUFFIXES)
    return {path.as_posix() for path in files
            if not any(path.is_relative_to(apart) for apart in APART)}


def reached(files, root):
    """`files` and what they include, and so on."""
    seen, left = set(), list(files)
    while left:
        name = left.pop()
        if name in seen or not (root / name).is_file():
            continue
        seen.add(name)
        left += INCLUDE.findall((root / name).read_text(errors="replace"))
    return seen


@functools.lru_cache
def sm90_only(root=ROOT):
    """Headers of SHARED that SM90 reaches and nothing else does. A file of SHARED that nobody
    includes stays with its folder."""
    shared = set().union(*(files_of(folder, root) for folder in SHARED))
    own = reached(files_of(SM90, root), root) & shared
    others = set().union(*(files_of(folder, root) for folder in OTHERS))
    others |= {name for name in shared - own if pathlib.PurePath(name).suffix in (".cc", ".cu")}
    return frozenset(own - reached(others, root))


def part_files(part, root=ROOT):
    files = files_of(part, root)
    if part in SHARED:
        files -= sm90_only(root)
    return files | sm90_only(root) if part == SM90 else files


def part_hash(part, root=ROOT):
    digest = hashlib.sha256()
    # In the order of path components.
    for name in sorted(part_files(part, root), key=lambda n: pathlib.PurePath(n).parts):
        digest.update(name.encode() + b"\0")
        digest.update(hashlib.sha256((root / name).read_bytes()).digest())
    return digest.hexdigest()[:16]


def all_hashes(root=ROOT):
    return {part: part_hash(part, root) for part in PARTS}


if __name__ == "__main__":
    json.dump(all_hashes(), sys.stdout)
    print()
