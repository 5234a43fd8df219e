#!/usr/bin/env bash
# Everything there is to show on a GPU host: builds (or takes a bundle of bundle.sh), runs the steps,
# and writes tests/gpu/results/*.json, which report.sh reads. Goes on after a failed step; the exit
# status is 0 where every step passed.
#   tests/gpu/run.sh [--bundle DIR] [--build-dir DIR] [--out DIR] [--archive FILE] [--only STEP...]
# --archive: what lies in --out in the end, as one .tar.xz to carry away.
# Steps: exactness sanitizers sweep decode gpt2 block-sparse memory deterministic random
#        sm90-forward sm90-sustained sm90-decode sm90-few-queries counters sm90-counters end-to-end
#        load build
# Needs: an NVIDIA GPU with its driver; python3 with torch (CUDA) and numpy for the benchmarks, with
# grpcio for end-to-end and load; ncu (permitted to read counters) for counters; compute-sanitizer for
# sanitizers. Without --bundle: what deploy/packages.sh installs, and nvcc.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
all=(exactness sanitizers sweep decode gpt2 block-sparse memory deterministic random sm90-forward
  sm90-sustained sm90-decode sm90-few-queries counters sm90-counters end-to-end load build)
tests=(matrix probe merge known_inputs large long_sums fixture select)
bundle="" archive="" build_dir="$root/build-gpu" out="$here/results" steps=()

usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  exit 2
}

while (($#)); do
  case "$1" in
    --bundle | --build-dir | --out | --archive)
      (($# >= 2)) || usage
      case "$1" in
        --bundle) bundle="$(cd "$2" && pwd)" ;;
        --build-dir) build_dir="$2" ;;
        --out) out="$2" ;;
        --archive) archive="$2" ;;
      esac
      shift 2
      ;;
    --only)
      shift
      while (($#)) && [[ $1 != --* ]]; do
        steps+=("$1")
        shift
      done
      ;;
    *) usage ;;
  esac
done
((${#steps[@]})) || steps=("${all[@]}")
for step in "${steps[@]}"; do
  [[ " ${all[*]} " == *" $step "* ]] || {
    echo "run.sh: unknown step '$step'; steps: ${all[*]}" >&2
    exit 2
  }
done

programs=(host_backend_gpu_test ptx_gpu_test)
for name in "${tests[@]}"; do programs+=("exactness_${name}_cuda_test"); done

build() {
  cmake -S "$root" -B "$build_dir" -G Ninja -DATTN_BUILD_CUDA=ON -DATTN_BUILD_BENCH=OFF
  cmake --build "$build_dir" -j "$(nproc)" --target "${programs[@]}" attn_device attnd attn
  bundle="$build_dir/gpu-bundle"
  mkdir -p "$bundle"
  local built=()
  for program in "${programs[@]}" libattn_device.so attnd attn; do
    built+=("$(find "$build_dir" -path "$bundle" -prune -o -type f -name "$program" -print -quit)")
  done
  "$here/bundle.sh" "$bundle" "${built[@]}"
}

mkdir -p "$out"
out="$(cd "$out" && pwd)"
[[ -n $bundle || ${steps[*]} == build ]] || build
if [[ -n $bundle ]]; then
  export LD_LIBRARY_PATH="$bundle/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
  export ATTN_DEVICE_LIBRARY="$bundle/libattn_device.so" ATTND="$bundle/attnd" ATTN="$bundle/attn"
  export ATTN_SOURCES_FILE="$bundle/sources.json"
  ATTN_COMMIT="$(<"$bundle/commit")"
  [[ ! -d $bundle/contract ]] || export ATTN_CONTRACT_DIR="$bundle/contract"
else
  ATTN_COMMIT="$(git -C "$root" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)"
fi
export ATTN_FIXTURES="$root/tests/fixtures"
export ATTN_COMMIT PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

run_step() {
  case "$1" in
    exactness) python3 "$here/exactness.py" --out "$out" "${programs[@]/#/$bundle/}" ;;
    sanitizers) python3 "$here/sanitizers.py" --out "$out" "$bundle" ;;
    counters) python3 "$here/counters.py" --out "$out" ;;
    sm90-counters) python3 "$here/counters.py" --out "$out" --result sm90-counters sm90 ;;
    end-to-end) python3 "$here/end_to_end.py" --out "$out" ;;
    load) python3 "$here/load.py" --out "$out" ;;
    build) python3 "$here/build.py" --out "$out" ;;
    # Benchmarks, one or several: in one process, which starts torch once.
    *) python3 "$here/bench.py" --out "$out" "$@" ;;
  esac
}

failed=()
timed_step() {
  printf '\n===== %s\n' "$*"
  local begin=$SECONDS
  run_step "$@" || failed+=("$*")
  printf '===== %s: %d s\n' "$*" $((SECONDS - begin))
}

benches=() others=() background=""
for step in "${steps[@]}"; do
  case "$step" in
    sweep | decode | gpt2 | block-sparse | memory | deterministic | random) benches+=("$step") ;;
    sm90-forward | sm90-sustained | sm90-decode | sm90-few-queries) benches+=("$step") ;;
    sanitizers) background=sanitizers ;;
    *) others+=("$step") ;;
  esac
done
# Nothing runs beside what is timed; sanitizers, which take a while, run beside exactness.
log="$out/sanitizers.log"
if [[ -n $background ]]; then
  run_step sanitizers >"$log" 2>&1 &
  pid=$!
fi
[[ " ${others[*]} " != *" exactness "* ]] || timed_step exactness
if [[ -n $background ]]; then
  wait "$pid" || failed+=(sanitizers)
  printf '\n===== sanitizers\n'
  cat "$log"
  rm "$log"
fi
((${#benches[@]} == 0)) || timed_step "${benches[@]}"
for step in "${others[@]}"; do
  [[ $step == exactness ]] || timed_step "$step"
done
[[ -z $archive ]] || tar -C "$out" -cJf "$archive" .
if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
echo "every step passed"
