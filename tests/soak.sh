#!/usr/bin/env bash
# The real programs on loopback under steady load with churn: chats with pictures, clients that leave, engines and sidecars that are
# killed and come back. Watches memory and file descriptors of the balancer and of a sidecar that is never killed.
#
#   tests/soak.sh [--minutes N] [--rate REQUESTS_PER_SECOND] [--plot FILE.svg] [--seed S]
#
# Defaults: 30 minutes, 200 requests/s. Last line of stdout:
# {"requests","errors","cut","left","kills","rss_growth_ratio","fd_growth"}; exit status 1 on an unexpected error.
# errors   answers that should have come and did not: anything but 200 and a whole stream
# cut      streams that had begun on a program that was then killed: nobody can save those
# left     requests that the client itself gave up
# growth   last tenth of the time against the third tenth; the ratio is the larger one of the two programs
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/build-needs.sh
profile=${FOVEA_PROFILE:-release}
cargo build --locked --quiet --profile "$profile" -p fovea-balancer -p fovea-sidecar -p engine-sim -p bench --bins >&2
exec "${CARGO_TARGET_DIR:-target}/$profile/soak" "$@"
