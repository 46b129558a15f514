#!/usr/bin/env bash
# Everything CI runs, on a machine with Rust: format, lints, rules of the tree, all tests, the vectors, a short demo.
# No network but loopback, no GPU, no engine.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/build-needs.sh
profile=ci
step() { printf '\n== %s\n' "$*" >&2; }

step format
cargo fmt --all --check
step build
cargo build --locked --profile $profile --workspace --bins
step tests
cargo test --locked --profile $profile --workspace
step lints
cargo clippy --locked --workspace --all-targets --profile $profile -- -D warnings
step vectors
FOVEA_PROFILE=$profile tests/vectors.sh
step demo
FOVEA_PROFILE=$profile deploy/demo.sh --short --json
echo "all passed"
