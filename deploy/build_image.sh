#!/usr/bin/env bash
# Builds the container image with docker, podman or buildah, whichever works here. Without a daemon and
# without a registry too: buildah then starts from a base image that debootstrap makes.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: deploy/build_image.sh [options] [-- ARGS]

  --variant cpu|cuda   (default: cpu)
  --tag NAME           image name (default: attnd:VARIANT)
  --tool TOOL          docker, podman or buildah (default: the first that works, in that order)
  --debootstrap        no registry: make the Debian base image from packages (buildah; as root)
  --mirror URL         package mirror for --debootstrap (default: the one apt uses here)
  --storage DIR        keep buildah's images and containers in DIR, as plain folders (driver vfs)
  ARGS                 passed on to the tool's build command

The cuda variant takes its base images from a registry, or from
  -- --build-arg CUDA_BUILD_IMAGE=... --build-arg CUDA_RUNTIME_IMAGE=...
USAGE
}

die() {
  echo "build_image.sh: $*" >&2
  exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
variant=cpu
tag=""
tool=""
debootstrap=0
mirror=""
storage=""
while (($#)); do
  case "$1" in
    --variant | --tag | --tool | --mirror | --storage)
      (($# >= 2)) || die "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    --debootstrap)
      debootstrap=1
      shift
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *) die "unknown argument '$1' (see --help)" ;;
  esac
done
[[ $variant == cpu || $variant == cuda ]] || die "--variant must be cpu or cuda, got '$variant'"
[[ -n "$tag" ]] || tag="attnd:$variant"
((debootstrap)) && [[ -z "$tool" ]] && tool=buildah
((debootstrap)) && [[ "$tool" != buildah ]] && die "--debootstrap needs --tool buildah"
((debootstrap && EUID != 0)) && die "--debootstrap needs root"

works() {
  case "$1" in
    docker | podman) command -v "$1" >/dev/null && "$1" info >/dev/null 2>&1 ;;
    buildah) command -v buildah >/dev/null ;;
    *) die "--tool must be docker, podman or buildah, got '$1'" ;;
  esac
}
if [[ -z "$tool" ]]; then
  for candidate in docker podman buildah; do
    if works "$candidate"; then
      tool="$candidate"
      break
    fi
  done
  [[ -n "$tool" ]] || die "neither docker, podman nor buildah works here.
deploy/packages.sh image installs buildah, which needs no daemon."
fi
works "$tool" || die "$tool does not work here"

revision="$(git -C "$root" rev-parse --short=12 HEAD 2>/dev/null || echo unknown)"
version="$(sed -n 's/^project(attnd VERSION \([0-9.]*\).*/\1/p' "$root/CMakeLists.txt")"
args=(--build-arg "VARIANT=$variant" --build-arg "VERSION=${version:-dev}"
  --build-arg "REVISION=$revision" --tag "$tag")

buildah=(buildah)
if [[ -n "$storage" ]]; then
  mkdir -p "$storage"
  storage="$(cd "$storage" && pwd)"
  buildah+=(--storage-driver vfs --root "$storage/root" --runroot "$storage/run")
fi

# make_base NAME: a minimal Debian 12 as a local image.
make_base() {
  local name="$1" work
  if "${buildah[@]}" inspect --type image "$name" >/dev/null 2>&1; then
    echo "==> base image $name: already there"
    return
  fi
  command -v debootstrap >/dev/null || die "debootstrap not found: deploy/packages.sh image"
  if [[ -z "$mirror" ]]; then
    # shellcheck disable=SC2016  # the names are apt's, not the shell's
    mirror="$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' \
      2>/dev/null | awk '$1 == "bookworm" {print $2; exit}')"
  fi
  echo "==> base image $name: debootstrap"
  work="$(mktemp -d)"
  # shellcheck disable=SC2064  # the folder of now
  trap "rm -rf '$work'" EXIT
  debootstrap --variant=minbase bookworm "$work/rootfs" ${mirror:+"$mirror"} >"$work/log" || {
    tail -n 20 "$work/log" >&2
    die "debootstrap failed"
  }
  rm -rf "$work/rootfs/var/cache/apt/archives/"*.deb "$work/rootfs/var/lib/apt/lists/"*
  tar -C "$work/rootfs" -cf "$work/rootfs.tar" .
  printf 'FROM scratch\nADD rootfs.tar /\nCMD ["/bin/bash"]\n' >"$work/Dockerfile"
  rm -rf "$work/rootfs"
  "${buildah[@]}" bud --isolation chroot --tag "$name" "$work"
  rm -rf "$work"
}

case "$tool" in
  docker | podman) build=("$tool" build) ;;
  # Format docker: the OCI format has no HEALTHCHECK. Isolation chroot: works without user namespaces
  # and inside containers.
  buildah) build=("${buildah[@]}" bud --format docker --isolation chroot) ;;
esac
if ((debootstrap)); then
  base=localhost/attnd-base:bookworm
  make_base "$base"
  # Both pairs: buildah looks at every stage, also at those the variant leaves unused.
  args+=(--build-arg "CPU_BUILD_IMAGE=$base" --build-arg "CPU_RUNTIME_IMAGE=$base")
  [[ $variant == cuda ]] ||
    args+=(--build-arg "CUDA_BUILD_IMAGE=$base" --build-arg "CUDA_RUNTIME_IMAGE=$base")
elif [[ $tool == buildah && $variant == cpu ]]; then
  args+=(--build-arg CUDA_BUILD_IMAGE=debian:12 --build-arg CUDA_RUNTIME_IMAGE=debian:12-slim)
fi

echo "==> $tool: building $tag ($variant)"
SECONDS=0
"${build[@]}" "${args[@]}" "$@" "$root"
echo "==> built $tag in ${SECONDS} s"
