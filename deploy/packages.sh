#!/usr/bin/env bash
# Installs the distribution packages that attnd needs, and only those that are missing.
# Debian 12 and Ubuntu 24.04 (universe enabled, as it is by default). Touches no package index and
# no network when nothing is missing.
# shellcheck disable=SC2034  # the groups are read through a nameref
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: packages.sh [--list | --check] [GROUP]...

Groups (default: build):
  build   compiler, build tools and the libraries that attnd and attn are built with
  test    what tests/run.sh needs on top: GoogleTest, benchmark, Python with grpcio and numpy
  ci      what .ci/run needs on top: clang and its sanitizer runtimes, clang-tidy, shellcheck
  image   what deploy/build_image.sh needs on a machine without docker or podman

  --list   print the groups' package names, install nothing
  --check  print the missing ones; exit status 1 if there are any
Runs apt-get as root or through sudo.
USAGE
}

build=(
  # Build tools. ccache only saves time; everything else is required.
  g++ cmake ninja-build ccache
  # RPC: gRPC C++ with reflection, Protocol Buffers, their compilers, TLS, and the Abseil they use.
  libgrpc++-dev libgrpc-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev
  libabsl-dev libssl-dev libc-ares-dev libre2-dev zlib1g-dev
  # SIMD of the CPU kernels.
  libhwy-dev
  # Server: log, metrics, allocator (tcmalloc).
  libspdlog-dev libfmt-dev prometheus-cpp-dev libgoogle-perftools-dev
  # Command lines and JSON.
  libcli11-dev nlohmann-json3-dev
  # HTTPS certificates of public authorities, and curl to look at /metrics.
  ca-certificates curl
)
test=(
  # Unit tests and benchmarks.
  libgtest-dev libgmock-dev libbenchmark-dev
  # Python: the stock gRPC client of the end-to-end tests, and the scripts around the fixtures.
  python3 python3-grpcio python3-protobuf python3-numpy python3-yaml
  # The real Prometheus, with promtool, that runs the rules, alerts and dashboards of deploy/.
  prometheus
  # Test certificates.
  openssl
)
ci=(
  # Second compiler: thread-safety analysis, libFuzzer, sanitizers.
  clang libclang-rt-dev
  # Linters. clang-format is pinned, since its output depends on its version.
  clang-tidy clang-format-14 shellcheck
  git
)
image=(buildah debootstrap)

die() {
  echo "packages.sh: $*" >&2
  exit 2
}

mode=install
groups=()
for arg in "$@"; do
  case "$arg" in
    --list) mode=list ;;
    --check) mode=check ;;
    -h | --help)
      usage
      exit 0
      ;;
    build | test | ci | image) groups+=("$arg") ;;
    *) die "unknown argument '$arg' (see --help)" ;;
  esac
done
((${#groups[@]})) || groups=(build)

wanted=()
for group in "${groups[@]}"; do
  declare -n group_packages="$group"
  wanted+=("${group_packages[@]}")
done
if [[ $mode == list ]]; then
  printf '%s\n' "${wanted[@]}"
  exit 0
fi

command -v apt-get >/dev/null || die "no apt-get here: this script knows Debian 12 and Ubuntu 24.04.
Install what '$0 --list ${groups[*]}' prints under your system's names, then use --no-install."

is_installed() {
  [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}
find_missing() {
  missing=()
  local package
  for package in "${wanted[@]}"; do
    is_installed "$package" || missing+=("$package")
  done
}

find_missing
if ((${#missing[@]} == 0)); then
  [[ $mode == check ]] || echo "packages (${groups[*]}): all ${#wanted[@]} present"
  exit 0
fi
if [[ $mode == check ]]; then
  printf '%s\n' "${missing[@]}"
  exit 1
fi

as_root=()
if ((EUID != 0)); then
  command -v sudo >/dev/null || die "missing: ${missing[*]}
Run as root, or install sudo, or install them yourself and use --no-install."
  as_root=(sudo)
fi
# Waits for another apt to finish instead of failing at once.
apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300)

echo "packages (${groups[*]}): installing ${#missing[@]} of ${#wanted[@]}: ${missing[*]}"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
# A third-party repository that does not answer must not stop us: the install below decides.
"${apt[@]}" update -qq >"$log" 2>&1 || {
  echo "packages: apt-get update failed, going on with the index at hand:" >&2
  tail -n 5 "$log" >&2
}
if ! "${apt[@]}" install -y -qq --no-install-recommends "${missing[@]}" </dev/null >"$log" 2>&1; then
  tail -n 30 "$log" >&2
  die "apt-get install failed"
fi
find_missing
((${#missing[@]} == 0)) || die "still missing after apt-get install: ${missing[*]}"
echo "packages (${groups[*]}): installed"
