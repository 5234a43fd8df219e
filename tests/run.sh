#!/usr/bin/env bash
# Installs what is missing, builds everything (CUDA code too where CMake finds nvcc) and runs the
# tests. Ends with CTest's summary; its exit status is CTest's.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: tests/run.sh [options]

  --build-dir DIR   build here (default: build)
  --label REGEX     only tests with such a CTest label: cpu, slow, gpu, sm90 (default: all)
  --build-type T    CMake build type (default: Release)
  --jobs N          parallel jobs of build and tests (default: number of cores)
  --no-install      do not look for missing packages
USAGE
}

die() {
  echo "tests/run.sh: $*" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
build_dir="$root/build"
build_type=Release
label=""
jobs="$(nproc)"
install=1
while (($#)); do
  case "$1" in
    --build-dir | --label | --build-type | --jobs)
      (($# >= 2)) || die "$1 needs a value"
      case "$1" in
        --build-dir) build_dir="$2" ;;
        --label) label="$2" ;;
        --build-type) build_type="$2" ;;
        --jobs) jobs="$2" ;;
      esac
      shift 2
      ;;
    --no-install)
      install=0
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) die "unknown argument '$1' (see --help)" ;;
  esac
done
[[ "$jobs" =~ ^[1-9][0-9]*$ ]] || die "--jobs must be a positive number, got '$jobs'"

say() { printf '==> %s\n' "$*"; }

if ((install)); then
  "$root/deploy/packages.sh" build test
fi

say "configure ($build_type) in $build_dir"
cmake -S "$root" -B "$build_dir" -G Ninja -DCMAKE_BUILD_TYPE="$build_type" -DATTN_BUILD_SERVER=ON \
  -DATTN_BUILD_CLIENT=ON -DATTN_BUILD_TESTS=ON -DATTN_BUILD_BENCH=ON

say "build"
SECONDS=0
cmake --build "$build_dir" -j "$jobs"
say "built in ${SECONDS} s"

say "test"
ctest_args=(--test-dir "$build_dir" -j "$jobs" --output-on-failure --no-tests=error)
[[ -z "$label" ]] || ctest_args+=(-L "$label")
exec ctest "${ctest_args[@]}"
