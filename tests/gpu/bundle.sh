#!/usr/bin/env bash
# Copies programs and the libraries they need, less those of the C and C++ runtime, into a folder that
# runs on another host of the same kind.
#   tests/gpu/bundle.sh DIR PROGRAM...
set -euo pipefail

(($# >= 2)) || {
  echo "usage: tests/gpu/bundle.sh DIR PROGRAM..." >&2
  exit 2
}
dir="$1"
shift
mkdir -p "$dir/lib"
for program in "$@"; do
  install -m 755 "$program" "$dir/"
  strip "$dir/$(basename "$program")"
  ldd "$program" | awk '$3 ~ /^\// { print $3 }' |
    { grep -vE '/(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|libresolv)\.so' || true; } |
    while read -r library; do install -m 644 "$library" "$dir/lib/"; done
done
