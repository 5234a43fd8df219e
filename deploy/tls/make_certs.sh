#!/usr/bin/env bash
# Makes a test certificate authority and, signed by it, one server and one client certificate.
# For trying TLS and mTLS and for the end-to-end tests. Not for production: the authority's key lies
# unencrypted beside the certificates.
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: make_certs.sh [--days N] [--san NAME]... OUT_DIR

Writes into OUT_DIR (made if missing; existing files of these names are replaced):
  ca.crt      ca.key       the authority          attnd --tls-client-ca, attn --tls-ca
  server.crt  server.key   for attnd              attnd --tls-cert, --tls-key
  client.crt  client.key   for a client (mTLS)    attn  --tls-cert, --tls-key

  --days N     days of validity (default 30)
  --san NAME   one more DNS name or IP address of the server; localhost, 127.0.0.1 and ::1 are
               always in
USAGE
}

die() {
  echo "make_certs.sh: $*" >&2
  exit 2
}

days=30
sans="DNS:localhost,IP:127.0.0.1,IP:::1"
out_dir=""
while (($#)); do
  case "$1" in
    --days)
      (($# >= 2)) || die "--days needs a number"
      [[ "$2" =~ ^[1-9][0-9]{0,4}$ ]] || die "--days must be 1 to 99999, got '$2'"
      days="$2"
      shift 2
      ;;
    --san)
      (($# >= 2)) || die "--san needs a name"
      if [[ "$2" =~ ^[0-9]+(\.[0-9]+){3}$ || "$2" == *:* ]]; then
        sans+=",IP:$2"
      elif [[ "$2" =~ ^[A-Za-z0-9*._-]+$ ]]; then
        sans+=",DNS:$2"
      else
        die "--san must be a DNS name or an IP address, got '$2'"
      fi
      shift 2
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    -*) die "unknown option '$1' (see --help)" ;;
    *)
      [[ -z "$out_dir" ]] || die "one OUT_DIR, got '$out_dir' and '$1'"
      out_dir="$1"
      shift
      ;;
  esac
done
[[ -n "$out_dir" ]] || {
  usage >&2
  exit 2
}
command -v openssl >/dev/null || die "openssl not found (package openssl)"

umask 077
mkdir -p "$out_dir"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

new_key() { openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out "$1"; }

# sign NAME COMMON_NAME EXTENSIONS: key, request and certificate of one party.
sign() {
  local name="$1" common_name="$2" extensions="$3"
  new_key "$work/$name.key"
  openssl req -new -key "$work/$name.key" -subj "/O=attnd test/CN=$common_name" \
    -out "$work/$name.csr"
  printf 'basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n%s\n' \
    "$extensions" >"$work/$name.ext"
  openssl x509 -req -in "$work/$name.csr" -CA "$work/ca.crt" -CAkey "$work/ca.key" \
    -set_serial "0x$(openssl rand -hex 16 | sed 's/^./1/')" -days "$days" -sha256 \
    -extfile "$work/$name.ext" -out "$work/$name.crt" 2>/dev/null
}

new_key "$work/ca.key"
openssl req -x509 -new -key "$work/ca.key" -days "$days" -sha256 \
  -subj "/O=attnd test/CN=attnd test CA" -addext "basicConstraints=critical,CA:TRUE,pathlen:0" \
  -addext "keyUsage=critical,keyCertSign,cRLSign" -out "$work/ca.crt"
sign server localhost "$(printf 'extendedKeyUsage=serverAuth\nsubjectAltName=%s' "$sans")"
sign client attn-client "extendedKeyUsage=clientAuth"

openssl verify -CAfile "$work/ca.crt" -purpose sslserver "$work/server.crt" >/dev/null
openssl verify -CAfile "$work/ca.crt" -purpose sslclient "$work/client.crt" >/dev/null

for name in ca server client; do
  install -m 600 "$work/$name.key" "$out_dir/$name.key"
  install -m 644 "$work/$name.crt" "$out_dir/$name.crt"
done
echo "wrote ca, server and client .crt and .key to $out_dir (valid $days days)"
