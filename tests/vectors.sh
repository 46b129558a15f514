#!/usr/bin/env bash
# Compares what is predicted with what a real engine announced, for every request of a capture folder.
#
#   tests/vectors.sh [DIR] [--base BASE] [--engine vllm|sglang|trtllm]
#
# DIR (default: BASE) holds capture files as tests/vectors/ENGINE/README.md describes them; BASE is tests/vectors/ENGINE by default.
#   vllm     `fovea-balancer explain` of every request. BASE gives the model, engines.json, the images and the earlier records of each
#            run when DIR has only part of them.
#   sglang   DIR is one version's folder or a folder of them. Every expanded prompt, with pads of images as learnt from earlier events.
#   trtllm   DIR has events.json. Samples of all writers against each other; config.json from DIR or BASE.
# Last line of stdout: {"exact":N,"supported":M,"unsupported":{reason: count}}; exit status 1 when exact < supported.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir='' base='' engine=vllm
while [ $# -gt 0 ]; do
    case $1 in
        --base) base=$(cd "$2" && pwd); shift 2 ;;
        --engine) engine=$2; shift 2 ;;
        -*) echo "unknown option $1" >&2; exit 2 ;;
        *) dir=$(cd "$1" && pwd); shift ;;
    esac
done
base=${base:-$here/vectors/$engine}
cd "$here/.."
. deploy/build-needs.sh
profile=${FOVEA_PROFILE:-release}
packages=(-p fovea-sidecar -p e2e)
[ "$engine" != vllm ] || packages+=(-p fovea-balancer)
cargo build --locked --quiet --profile "$profile" "${packages[@]}" --bins >&2
exec "${CARGO_TARGET_DIR:-target}/$profile/vectors" "${dir:-$base}" --base "$base" --engine "$engine"
