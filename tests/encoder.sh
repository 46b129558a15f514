#!/usr/bin/env bash
# Holds the encoder's writers and its image processor to golden files.
#
#   tests/encoder.sh [DIR]
#
# DIR (default: tests/vectors/encoder) has the folders formats and resize, as tests/vectors/encoder/README.md describes them.
# Last line of stdout: {"formats_equal":N,"resize_max_steps":K,"ok":BOOL}; K = steps of 8 bits by which the worst pixel differs. Exit
# status 1 unless all formats are equal byte for byte, all resizes to the bit, and pixel values to 1e-6.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=$(cd "${1:-$here/vectors/encoder}" && pwd)
cd "$here/.."
. deploy/build-needs.sh
profile=${FOVEA_PROFILE:-release}
target=${CARGO_TARGET_DIR:-target}
cargo build --locked --quiet --profile "$profile" -p fovea-encoder --example format_vectors >&2
cargo build --locked --quiet --profile "$profile" -p fovea-pixels --example resize_vectors >&2
formats=$("$target/$profile/examples/format_vectors" "$dir/formats")
resize=$("$target/$profile/examples/resize_vectors" "$dir/resize")
printf '%s\n%s\n' "$formats" "$resize" >&2
read -r _ equal _ _ _ formats_ok <<< "$formats"
read -r _ steps _ _ _ _ _ resize_ok <<< "$resize"
[ "$formats_ok $resize_ok" = "true true" ] && ok=true || ok=false
printf '{"formats_equal":%s,"resize_max_steps":%s,"ok":%s}\n' "$equal" "$steps" "$ok"
[ "$ok" = true ]
