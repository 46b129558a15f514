#!/usr/bin/env bash
# SGLang's real prefix cache, image padding and event publisher, twice, behind two sidecars and a balancer: every standard request twice,
# every prediction compared with what the cache reused. Opt-in: fills about 6 GB on the first run. Linux, Python 3.11.
#
#   tests/real_sglang.sh [--tree radix|unified_python|unified_rust] [--page-size N]
#
# No server of SGLang runs on a machine without a GPU; `tests/real/sglang_engine.py` says what is real here and what is not.
#
# Environment:
#   FOVEA_SGLANG_VENV   where SGLang is or will be installed (default target/real-sglang/venv)
#   FOVEA_VLLM_VENV     an environment of tests/real_vllm.sh, whose torch and transformers then serve (saves 5 GB)
#   PYTHON              interpreter for a new one (default python3.11)
#
# Last line of stdout: {"requests","exact","unlearnt","refused","repeats","same_worker","reused_tokens","verdicts"}; exit status 1 when
# more was promised than was reused, an exact view was wrong, or the sidecars' closed loop found a divergence.
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/build-needs.sh
version=0.5.23
work=$PWD/target/real-sglang
venv=${FOVEA_SGLANG_VENV:-$work/venv}
vectors=$PWD/tests/vectors/vllm
mkdir -p "$work"
tree=unified_rust page=16
while [ $# -gt 0 ]; do
    case $1 in
        --tree) tree=$2; shift 2 ;;
        --page-size) page=$2; shift 2 ;;
        *) echo "unknown option $1" >&2; exit 2 ;;
    esac
done

# SGLang without its GPU dependencies.
install_sglang() {
    "${PYTHON:-python3.11}" -m venv "$venv"
    local python=$venv/bin/python
    if [ -n "${FOVEA_VLLM_VENV:-}" ]; then
        echo "$FOVEA_VLLM_VENV"/lib/python3.11/site-packages > "$venv/lib/python3.11/site-packages/torch-of-vllm.pth"
    else
        "$python" -m pip install -q torch==2.14.1 torchvision==0.29.2 transformers==5.19.0 msgspec==0.23.0 pyzmq pydantic fastapi uvicorn \
            aiohttp psutil openai==2.8.0 tiktoken pillow requests einops prometheus_client opentelemetry-api grpcio protobuf
    fi
    "$python" -m pip install -q --no-deps "sglang==$version"
    "$python" -m pip install -q orjson uvloop interegular dill IPython ninja pybind11 watchfiles setproctitle partial-json-parser pybase64 \
        python-multipart sentencepiece soundfile xxhash zstandard
}

pids=()
stop() { for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null || true; done; wait 2> /dev/null || true; }
trap stop EXIT

profile=${FOVEA_PROFILE:-release}
cargo build --locked --profile "$profile" -p fovea-balancer -p fovea-sidecar -p e2e --bins >&2
"$venv/bin/python" -c 'import sglang' 2> /dev/null || install_sglang >&2

# The plain tree compiles its hash with ninja.
export PATH=$venv/bin:${FOVEA_VLLM_VENV:+$FOVEA_VLLM_VENV/bin:}$PATH
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 OMP_NUM_THREADS=1
urls=()
for i in 0 1; do
    : > "$work/engine-$i.out"
    (cd "$vectors" && exec "$venv/bin/python" ../../real/sglang_engine.py --model ./tiny-qwen3-vl --tree "$tree" --page-size "$page") \
        > "$work/engine-$i.out" 2> "$work/engine-$i.log" &
    pids+=($!)
done
for i in 0 1; do
    until [ -s "$work/engine-$i.out" ]; do
        kill -0 "${pids[i]}" 2> /dev/null || { echo "an engine died: see $work/engine-$i.log" >&2; exit 1; }
        sleep 1
    done
    urls+=("http://$("$venv/bin/python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["http"])' "$work/engine-$i.out")")
done
echo "caches ready: ${urls[*]}" >&2
# A block of the balancer is a whole number of pages, and 16 tokens at least.
block=$(((16 + page - 1) / page * page))
"${CARGO_TARGET_DIR:-target}/$profile/real" "${urls[@]}" --vectors "$vectors" --model-dir "$vectors/tiny-qwen3-vl" --block "$block" --page "$page" \
    --learns --base-only
