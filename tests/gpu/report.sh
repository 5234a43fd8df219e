#!/usr/bin/env bash
# Reads what run.sh measured and says whether a bar holds: a table, then, last, one line
#   NAME: value (bar: …)
# with exit status 0 only where the bar holds. A result that is missing, of a failed or partial run, or
# of another state of the code gives no verdict (exit status 1).
#   tests/gpu/report.sh NAME [--results DIR] [--any-sources]
# NAME: exactness sanitizers sm80-vs-fa2 gpt2-medium decode block-sparse gpu-memory end-to-end build
#       sm90-exactness sm90-forward sm90-forward-sustained sm90-decode sm90-few-queries
set -euo pipefail
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/report.py" "$@"
