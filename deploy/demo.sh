#!/usr/bin/env bash
# Watch Fovea work: builds the programs, starts 4 simulated engines, 4 sidecars and a balancer on loopback, and compares
# round robin, session affinity and Fovea on a multimodal workload.
#
#   deploy/demo.sh            the comparison as a table
#   deploy/demo.sh --json     last line of stdout is one JSON object
#   deploy/demo.sh --serve    leaves the fleet running, until Ctrl-C
#   deploy/demo.sh --short    fewer requests
#
# FOVEA_PROFILE=ci builds with the profile of the tests.
set -euo pipefail
cd "$(dirname "$0")/.."

. deploy/build-needs.sh
profile=${FOVEA_PROFILE:-release}
cargo build --locked --profile "$profile" -p fovea-balancer -p fovea-sidecar -p engine-sim -p bench --bins >&2
exec "${CARGO_TARGET_DIR:-target}/$profile/demo" "$@"
