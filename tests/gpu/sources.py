#!/usr/bin/env python3
"""What a result was measured of: a hash of the files of each part, as JSON. Without git, so that it
works on a copied tree."""

import hashlib
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PARTS = ("kernels/api", "kernels/cuda/common", "kernels/cuda/ptx", "kernels/cuda/runtime",
         "kernels/cuda/sm80", "kernels/cuda/standard", "server", "proto", "client",
         "tests/exactness", "tests/reference")
SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".in", ".proto", ".txt", ".map"}


def part_hash(part, root=ROOT):
    digest = hashlib.sha256()
    for path in sorted((root / part).rglob("*")):
        if path.is_file() and path.suffix in SUFFIXES:
            digest.update(str(path.relative_to(root)).encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def all_hashes(root=ROOT):
    return {part: part_hash(part, root) for part in PARTS}


if __name__ == "__main__":
    json.dump(all_hashes(), sys.stdout)
    print()
