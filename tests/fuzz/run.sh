#!/usr/bin/env bash
# Runs every fuzzer for a bounded time under ASan and UBSan.
# Usage: tests/fuzz/run.sh SECONDS [BUILD_DIRECTORY]
# SECONDS is for each fuzzer. Configures and builds first where needed (clang). A finding is left in
# BUILD_DIRECTORY/findings, and the exit status is 1. The committed seeds are not written to.
set -euo pipefail

seconds=${1:?usage: tests/fuzz/run.sh SECONDS [BUILD_DIRECTORY]}
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "SECONDS \"$seconds\" is not a number over 0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=${2:-$root/build/fuzz}

mkdir -p "$build"
cmake -G Ninja -S "$root" -B "$build" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ \
  -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DATTN_SANITIZE=address,undefined \
  -DCMAKE_CXX_FLAGS=-fno-sanitize-recover=undefined -DATTN_BUILD_FUZZERS=ON \
  -DATTN_BUILD_SERVER=OFF -DATTN_BUILD_BENCH=OFF >"$build/configure.log" 2>&1 ||
  { cat "$build/configure.log" >&2; exit 2; }
cmake --build "$build" --target attn_fuzzers || exit 2

findings=$build/findings
mkdir -p "$findings"
failed=0
for name in unary stream header npy safetensors; do
  corpus=$(mktemp -d)
  cp "$root/tests/fuzz/corpus/$name"/* "$corpus/"
  # -timeout: one input may take 5 s under the sanitizers; -malloc_limit_mb: no input may ask for much.
  if "$build/tests/fuzz/fuzz_$name" "$corpus" -max_total_time="$seconds" -timeout=5 -rss_limit_mb=1024 \
      -malloc_limit_mb=256 -max_len=4096 -artifact_prefix="$findings/$name-" \
      -print_final_stats=1 >"$findings/$name.log" 2>&1; then
    runs=$(sed -n 's/^stat::number_of_executed_units: //p' "$findings/$name.log")
    coverage=$(sed -n 's/.* cov: \([0-9]*\).*/\1/p' "$findings/$name.log" | tail -1)
    echo "fuzz_$name: $runs inputs in ${seconds} s, coverage ${coverage}, no finding"
  else
    failed=1
    echo "fuzz_$name: FINDING, see $findings" >&2
    tail -40 "$findings/$name.log" >&2
  fi
  rm -rf "$corpus"
done
exit $failed
