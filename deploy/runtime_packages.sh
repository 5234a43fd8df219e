#!/usr/bin/env bash
# Prints the packages that own the shared libraries which the given programs load, one a line. The
# runtime stage of the Dockerfile installs these, so that it carries no development files and needs
# no list of versioned library names (which differ between Debian and Ubuntu).
set -euo pipefail

die() {
  echo "runtime_packages.sh: $*" >&2
  exit 1
}

(($#)) || {
  echo "usage: runtime_packages.sh PROGRAM..." >&2
  exit 2
}

owner_of() {
  local path="$1" candidate
  # The package database may hold either name of a merged /lib.
  for candidate in "$path" "/usr$path" "${path#/usr}"; do
    if dpkg-query -S "$candidate" 2>/dev/null | sed 's/[:,].*//' | head -n 1 | grep .; then
      return
    fi
  done
  return 1
}

for program in "$@"; do
  [[ -x "$program" ]] || die "not a program: $program"
  libraries="$(ldd "$program")" || die "ldd failed on $program"
  if grep -q 'not found' <<<"$libraries"; then
    die "$program misses libraries: $(grep 'not found' <<<"$libraries" | xargs)"
  fi
  while read -r library; do
    owner_of "$library" || owner_of "$(realpath "$library")" || die "no package owns $library"
  done < <(awk '$2 == "=>" && $3 ~ /^\// {print $3}' <<<"$libraries")
done | sort -u
