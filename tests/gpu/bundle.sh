#!/usr/bin/env bash
# Copies programs and the libraries they need, less those of the C and C++ runtime, into a folder that
# runs on another host of the same kind. With them: which state of the code they were built from, and
# the stubs that a gRPC client in Python needs, where protoc is there to write them.
#   tests/gpu/bundle.sh DIR PROGRAM...
# What run.sh looks for in DIR: host_backend_gpu_test, ptx_gpu_test, the exactness_*_cuda_test
# programs, libattn_device.so, attnd, attn.
set -euo pipefail

(($# >= 2)) || {
  echo "usage: tests/gpu/bundle.sh DIR PROGRAM..." >&2
  exit 2
}
dir="$1"
shift
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
mkdir -p "$dir/lib"
for program in "$@"; do
  install -m 755 "$program" "$dir/"
  strip "$dir/$(basename "$program")"
  ldd "$program" | awk '$3 ~ /^\// { print $3 }' |
    { grep -vE '/(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|libresolv)\.so' || true; } |
    while read -r library; do install -m 644 "$library" "$dir/lib/"; done
done
python3 -B "$here/sources.py" >"$dir/sources.json"
{ git -C "$root" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown; } >"$dir/commit"
if command -v protoc >/dev/null && command -v grpc_python_plugin >/dev/null; then
  for python in python3 /usr/bin/python3; do
    "$python" -c 'import grpc, numpy' 2>/dev/null || continue
    "$python" -B "$root/tests/integration/harness/contract.py" "$dir/contract"
    break
  done
fi
