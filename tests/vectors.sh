#!/usr/bin/env bash
# Compares what `fovea-balancer explain` predicts with what a real engine announced, for every request of a capture folder.
#
#   tests/vectors.sh [DIR] [--base BASE] [--engine NAME]
#
# DIR (default: BASE) holds capture files as tests/vectors/vllm/README.md describes them. BASE (default tests/vectors/vllm) gives the
# model, engines.json, the images and the earlier records of each run when DIR has only part of them.
# Last line of stdout: {"exact":N,"supported":M,"unsupported":{reason: count}}; exit status 1 when exact < supported.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir='' base=$here/vectors/vllm engine=vllm
while [ $# -gt 0 ]; do
    case $1 in
        --base) base=$(cd "$2" && pwd); shift 2 ;;
        --engine) engine=$2; shift 2 ;;
        -*) echo "unknown option $1" >&2; exit 2 ;;
        *) dir=$(cd "$1" && pwd); shift ;;
    esac
done
cd "$here/.."
. deploy/build-needs.sh
profile=${FOVEA_PROFILE:-release}
cargo build --locked --quiet --profile "$profile" -p fovea-balancer -p fovea-sidecar -p e2e --bins >&2
exec "target/$profile/vectors" "${dir:-$base}" --base "$base" --engine "$engine"
