#!/usr/bin/env bash
# From a bare checkout to attention over gRPC: installs what is missing, builds attnd and attn, starts
# a server on free ports, runs forward and backward on tensors of a real transformer
# (tests/fixtures), compares the results with float64 ones, shows the server's metrics, and stops it.
# Exit status 0 only if all of that went well. Leaves nothing running.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: deploy/quickstart.sh [options]

  --build-dir DIR   build here (default: build)
  --jobs N          parallel compiler jobs (default: number of cores)
  --no-install      do not look for missing packages
USAGE
}

die() {
  echo "quickstart.sh: $*" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
build_dir="$root/build"
jobs="$(nproc)"
install=1
while (($#)); do
  case "$1" in
    --build-dir)
      (($# >= 2)) || die "$1 needs a value"
      build_dir="$2"
      shift 2
      ;;
    --jobs)
      [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || die "--jobs needs a positive number, got '${2:-}'"
      jobs="$2"
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

if [[ -t 1 && -z "${NO_COLOR:-}" ]]; then
  bold=$'\e[1m' plain=$'\e[0m'
else
  bold="" plain=""
fi
step() { printf '\n%s==> %s%s\n' "$bold" "$*" "$plain"; }
# Shows a command, then runs it. The reader can repeat what is shown while a server of theirs runs.
show() {
  printf '%s$ %s%s\n' "$bold" "$*" "$plain"
  "$@"
}

work="$(mktemp -d)"
server_pid=""
stop_server() {
  if [[ -n "$server_pid" ]] && kill -0 "$server_pid" 2>/dev/null; then
    kill -KILL "$server_pid" 2>/dev/null || true
    wait "$server_pid" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap stop_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
SECONDS=0

step "1/6 packages"
if ((install)); then
  "$root/deploy/packages.sh" build
else
  echo "skipped (--no-install)"
fi

step "2/6 build attnd and attn in $build_dir ($jobs jobs; a few minutes the first time)"
started=$SECONDS
if [[ ! -f "$build_dir/build.ninja" ]]; then
  if ! cmake -S "$root" -B "$build_dir" -G Ninja -DCMAKE_BUILD_TYPE=Release -DATTN_BUILD_TESTS=OFF \
    -DATTN_BUILD_BENCH=OFF >"$work/configure.log" 2>&1; then
    cat "$work/configure.log" >&2
    die "cmake could not configure the build"
  fi
fi
cmake --build "$build_dir" -j "$jobs" --target attnd attn attn_python_client
attnd="$(find "$build_dir" -type f -name attnd -perm -u+x -print -quit)"
attn="$(find "$build_dir" -type f -name attn -perm -u+x -print -quit)"
[[ -n "$attnd" && -n "$attn" ]] || die "the build made no attnd or no attn in $build_dir"
echo "built in $((SECONDS - started)) s"

step "3/6 start attnd on free ports"
"$attnd" --listen 127.0.0.1:0 --metrics-listen 127.0.0.1:0 --ports-file "$work/ports.json" \
  </dev/null >"$work/attnd.log" 2>&1 &
server_pid=$!
for ((i = 0; i < 600; ++i)); do
  [[ -s "$work/ports.json" ]] && break
  kill -0 "$server_pid" 2>/dev/null || break
  sleep 0.1
done
[[ -s "$work/ports.json" ]] || {
  cat "$work/attnd.log" >&2
  die "attnd did not become ready"
}
# The file names what was bound: {"listen": ["127.0.0.1:41607"], "metrics": "127.0.0.1:39123", ...}.
ATTN_SERVER="$(sed -n 's/.*"listen": *\["\([^"]*\)".*/\1/p' "$work/ports.json")"
export ATTN_SERVER
metrics_url="http://$(sed -n 's/.*"metrics": *"\([^"]*\)".*/\1/p' "$work/ports.json")/metrics"
cat "$work/attnd.log"
show "$attn" status

inputs="$root/tests/fixtures/minilm_inputs.safetensors"
expected="$root/tests/fixtures/minilm_expected.safetensors"
# Four passages of different length, padded to 48 tokens.
lengths=48,41,29,13
failed=0

step "4/6 forward: 12 heads of a MiniLM layer on four passages of literature, against float64"
forward="$work/forward.safetensors"
show "$attn" forward --input "$inputs" --seqlens-q $lengths --seqlens-k $lengths \
  --output "$forward" --check "$expected" || failed=1

step "5/6 backward: dq, dk, dv of a real loss, against float64"
show "$attn" backward --input "$inputs" --out "$forward:out" --lse "$forward:lse" \
  --seqlens-q $lengths --seqlens-k $lengths --check "$expected" || failed=1

step "6/6 what Prometheus sees at $metrics_url"
curl -sSf --noproxy '*' --max-time 10 "$metrics_url" >"$work/metrics"
grep -E '^attn_(executions|rejections|kernel_seconds|flops|bytes|errors|requests)_total[{ ]' \
  "$work/metrics" | grep -v ' 0$' || true
for pass in forward backward; do
  count="$(sed -n "/^attn_executions_total{.*pass=\"$pass\"/s/.*} //p" "$work/metrics" |
    awk '{sum += $1} END {print sum + 0}')"
  if [[ "$count" == 0 ]]; then
    echo "the metrics count no $pass" >&2
    failed=1
  fi
done

kill -TERM "$server_pid"
status=0
wait "$server_pid" || status=$?
server_pid=""
if ((status != 0)); then
  tail -n 20 "$work/attnd.log" >&2
  echo "attnd ended with status $status" >&2
  failed=1
fi

if ((failed)); then
  printf '\n%sNOT all well: see above.%s (%d s)\n' "$bold" "$plain" "$SECONDS"
  exit 1
fi
printf '\n%sAll well:%s forward and backward agree with float64; the server has stopped. %d s in all.\n' \
  "$bold" "$plain" "$SECONDS"
cat <<NEXT
Next: start a server of your own with
  $attnd
and, in another terminal, try
  $attn plan --seqlen-q 4096 --num-heads 16 --head-dim 64 --causal
  $attn forward --random --seqlen-q 4096 --causal
NEXT
