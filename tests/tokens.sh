#!/usr/bin/env bash
# Compares the image rules with recorded token counts, expansions and refusals.
#
#   tests/tokens.sh [FILE]
#
# FILE holds rows as tests/vectors/tokens/README.md describes them (default: tests/vectors/tokens/image_token_counts.json).
# Last line of stdout: {"equal":N,"rows":M,"unsupported_families":[…]}, rows of supported families alone; what differs goes to stderr.
# Exit status 1 when equal < rows.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
file=$(realpath "${1:-$here/vectors/tokens/image_token_counts.json}")
cd "$here/.."
. deploy/build-needs.sh
profile=${FOVEA_PROFILE:-release}
cargo build --locked --quiet --profile "$profile" -p fovea-media --example tokens >&2
exec "${CARGO_TARGET_DIR:-target}/$profile/examples/tokens" "$file"
