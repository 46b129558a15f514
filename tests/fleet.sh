#!/usr/bin/env bash
# The fleet simulation. tests/fleet.sh [--seeds A..B | --seed S [--trace]] [--break NAME] | --scale [--blocks N]
set -euo pipefail
cd "$(dirname "$0")/.."
exec cargo run --quiet --locked --profile "${FOVEA_PROFILE:-ci}" -p fleet -- "$@"
