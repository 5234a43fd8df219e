#!/usr/bin/env bash
# Measures one of attnd's promises, prints a table and ends with one line "NAME: value (bar: ...)".
# Exit status 0 only where the bar holds. Builds what it needs; leaves nothing running.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: tests/bench/run.sh [--build-dir DIR] [--no-build] NAME [ARGUMENT]...

  cpu-vs-torch     flash_cpu against PyTorch's CPU attention (installs PyPI torch into a venv)
  cpu-memory       peak memory of flash_cpu as the sequence doubles, beside standard_cpu
  rpc-overhead     p50 of a tiny call against a raw callback echo
  rpc-throughput   64 MiB each way against plain sockets, TCP and Unix, unary and streaming
  python-client    attn_client for Python against a stock gRPC client
  soak             10,000 random calls with cancels, deadlines and killed clients
  stalled-server   attn load while the server stands still: latency from the intended send
  histogram-error  attn load's percentiles against exact ones
  poisson-fit      attn load's arrivals against the Poisson process
  generator-ceiling  calls/s of attn load against a server that computes nothing
  stage-sum        the server's stages against its handler's time, as attn load sees them
  promql           every expression of every panel, rule and alert, against a real Prometheus
  induced-fallback flash switched off and on in a live server: share, reason, alert and status page follow
  scrape-storm     Prometheus scrapes ten times a second under full load
  metrics-cost     what counting costs a call

  --build-dir DIR  build here (default: build-bench; Release)
  --no-build       use what DIR holds
  ATTN_TORCH_PYTHON=PYTHON (environment) is a Python that has PyTorch; no venv is then made
  ATTN_PYTHON=PYTHON (environment) is a Python that has grpcio, numpy and yaml (default: the system's)

Arguments go to the program behind NAME (its --help lists them).
USAGE
}

die() {
  echo "tests/bench/run.sh: $*" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
build_dir="$root/build-bench"
build=1
while (($#)); do
  case "$1" in
    --build-dir)
      (($# >= 2)) || die "$1 needs a value"
      build_dir="$2"
      shift 2
      ;;
    --no-build)
      build=0
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    -*) die "unknown option '$1' (see --help)" ;;
    *) break ;;
  esac
done
(($#)) || {
  usage >&2
  exit 2
}
name="$1"
shift
mkdir -p "$build_dir"
build_dir="$(cd "$build_dir" && pwd)"

# build_targets TARGET...: what the bench needs, Release, without tests.
build_targets() {
  ((build)) || return 0
  {
    # Both are always said, so that one name does not inherit what another left in the cache.
    cmake -S "$root" -B "$build_dir" -G Ninja -DCMAKE_BUILD_TYPE=Release -DATTN_BUILD_TESTS=OFF \
      -DATTN_BUILD_BENCH=ON -DATTN_BUILD_SERVER=ON -DATTN_BUILD_CLIENT=ON "${cmake_options[@]}"
    cmake --build "$build_dir" -j "$(nproc)" --target "$@"
  } >"$build_dir/bench-build.log" 2>&1 || {
    tail -n 40 "$build_dir/bench-build.log" >&2
    die "the build failed (log: $build_dir/bench-build.log)"
  }
}

# pytorch: a Python with PyTorch, from a venv of its own in the build folder.
pytorch() {
  local venv="$build_dir/torch-venv"
  if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    {
      python3 -m venv "$venv"
      "$venv/bin/pip" install --quiet torch
    } >&2 || die "PyTorch could not be installed into $venv"
  fi
  echo "$venv/bin/python"
}

# observe_bench FILE ARGUMENT...: a bench in Python over the harness of the end-to-end tests.
observe_bench() {
  command -v prometheus >/dev/null || die "prometheus is needed: deploy/packages.sh test"
  build_targets attnd attn_fake_gpu_server
  PYTHONDONTWRITEBYTECODE=1 exec "${ATTN_PYTHON:-/usr/bin/python3}" "$root/tests/bench/$1" \
    --attnd "$build_dir/server/attnd" --fake-gpu-server "$build_dir/tests/fakes/attn_fake_gpu_server" "${@:2}"
}

bin="$build_dir/tests/bench"
cmake_options=()
case "$name" in
  cpu-vs-torch)
    cmake_options=(-DATTN_BUILD_SERVER=OFF -DATTN_BUILD_CLIENT=OFF)
    build_targets attn_cpu_bench
    python="${ATTN_TORCH_PYTHON:-$(pytorch)}"
    exec "$python" "$root/tests/bench/cpu_vs_torch.py" --bench "$bin/attn_cpu_bench" "$@"
    ;;
  cpu-memory)
    cmake_options=(-DATTN_BUILD_SERVER=OFF -DATTN_BUILD_CLIENT=OFF)
    build_targets attn_cpu_memory
    exec "$bin/attn_cpu_memory" "$@"
    ;;
  rpc-overhead)
    build_targets attn_rpc_bench_server attn_rpc_overhead
    exec "$bin/attn_rpc_overhead" --server "$bin/attn_rpc_bench_server" "$@"
    ;;
  rpc-throughput)
    build_targets attn_rpc_bench_server attn_rpc_throughput
    exec "$bin/attn_rpc_throughput" --server "$bin/attn_rpc_bench_server" "$@"
    ;;
  soak)
    build_targets attnd attn_soak
    exec "$bin/attn_soak" --attnd "$build_dir/server/attnd" "$@"
    ;;
  stalled-server | histogram-error | poisson-fit | generator-ceiling | stage-sum)
    build_targets attn attnd attn_null_server attn_load_histogram
    exec python3 "$root/tests/bench/load_bench.py" "$name" --attn "$build_dir/client/cli/attn" \
      --attnd "$build_dir/server/attnd" --null-server "$bin/attn_null_server" \
      --histogram "$bin/attn_load_histogram" "$@"
    ;;
  python-client)
    build_targets attnd attn_python_client
    PYTHONDONTWRITEBYTECODE=1 exec "${ATTN_PYTHON:-/usr/bin/python3}" "$root/tests/bench/python_client.py" \
      --attnd "$build_dir/server/attnd" --package "$build_dir/client/python" "$@"
    ;;
  promql) observe_bench promql.py "$@" ;;
  induced-fallback) observe_bench induced_fallback.py "$@" ;;
  scrape-storm) observe_bench scrape_storm.py "$@" ;;
  metrics-cost)
    build_targets attn_metrics_cost
    exec "$bin/attn_metrics_cost" "$@"
    ;;
  *) die "unknown name '$name' (see --help)" ;;
esac
