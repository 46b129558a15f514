#!/usr/bin/env python3
"""A real vLLM behind a sidecar with a custom encoder: the engine's own vision tower, run by transformers in the sidecar's process.

Held: answers by embeddings are those by pixels; no file goes missing under eviction; a wrong width and a killed worker are typed errors that
the engine survives. `tests/real_vllm.sh --encoder` starts the engine and this. Standard library alone. Last line of stdout: one JSON object.
"""
import argparse
import base64
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

# A wrong image of the same size moved the first log-probability by 1.1e-3.
FIRST_MAX = 2e-4
COMPARED = [["a_96x64.png"], ["big_448x320.jpg"], ["c_160x96.png", "a_96x64.png"], ["odd_333x251.png"], ["rgba_96x96.png"],
            ["gray_100x80.png"], ["wide_640x64.webp"], ["exif6_160x64.jpg"], ["pal_120x72.gif"], ["t_16x16.png"], ["big_1400x1000.jpg"]]
MIME = {"png": "image/png", "jpg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}
NARROW = """
from qwen3_vl import Qwen3VLEncoder

class Narrow(Qwen3VLEncoder):
    def forward_batch(self, items, target_bucket=None):
        made = super().forward_batch(items, target_bucket)
        for one in made:
            object.__setattr__(one, "embeddings", one.embeddings[:, :-1].contiguous())
        return made
"""


def call(url, body=None, timeout=120):
    data = json.dumps(body).encode() if body is not None else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=timeout) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")
    except OSError as error:
        return 0, {"error": {"type": type(error).__name__}}


def chat(urls, tokens=8):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls] + [{"type": "text", "text": "What is this?"}]
    return {"model": "tiny-vl", "messages": [{"role": "user", "content": parts}], "max_tokens": tokens, "temperature": 0, "logprobs": True}


def png(width, height, seed):
    noise = random.Random(seed)
    rows = b"".join(b"\0" + noise.randbytes(width * 3) for _ in range(height))

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(file).decode()


class Sidecar:
    """One sidecar with an encoder, until closed."""

    def __init__(self, args, work, revision, python_class="qwen3_vl:Qwen3VLEncoder", handoff_bytes="64MiB", cache_bytes="64MiB"):
        here = os.path.dirname(os.path.abspath(__file__))
        examples = os.path.join(here, "..", "..", "deploy", "examples", "encoder")
        config = {
            "listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "engine": {"url": args.engine}, "model": {"dir": args.model_dir},
            "encoder": {
                "backend": "python", "cache_bytes": cache_bytes,
                "python": {"class": python_class, "model": args.model_dir, "interpreter": sys.executable,
                           "python_path": [work, os.path.abspath(examples)], "revision": revision},
                "handoff": {"mode": args.mode, "path": args.folder, "bytes": handoff_bytes, "grace": "1s", "engine_args": args.engine_args},
            },
        }
        path = os.path.join(work, f"{revision}.yaml")
        with open(path, "w") as file:
            json.dump(config, file)
        self.log = open(os.path.join(work, f"{revision}.log"), "w")
        self.process = subprocess.Popen([args.sidecar, "run", "--config", path], stdout=subprocess.PIPE, stderr=self.log, text=True)
        ready = json.loads(self.process.stdout.readline())
        self.url, self.admin = (f"http://{ready[name]}" for name in ("http", "admin"))
        self.wait()

    def wait(self, limit=120):
        end = time.time() + limit
        while time.time() < end:
            if ((self.state() or {}).get("health")) == "ready":
                return
            time.sleep(0.25)
        raise SystemExit(f"the encoder is not ready: see {self.log.name}: {self.state()}")

    def state(self):
        return (call(self.admin + "/debug/state")[1] or {}).get("encoder")

    def ask(self, body):
        return call(self.url + "/v1/chat/completions", body)

    def workers(self):
        tasks = f"/proc/{self.process.pid}/task"
        return [int(child) for task in os.listdir(tasks) for child in open(f"{tasks}/{task}/children").read().split()]

    def close(self):
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


def told(answer):
    choice = answer["choices"][0]
    return choice["message"]["content"], [token["logprob"] for token in choice["logprobs"]["content"]]


def outcome(answer):
    status, body = answer
    return f"{status}" if status == 200 else f"{status} {(body or {}).get('error', {}).get('type')}"


def compare(args, sidecar, images):
    same, first, most = 0, 0.0, 0.0
    for names in COMPARED:
        body = chat([images[name] for name in names])
        native, ours = call(args.engine + "/v1/chat/completions", body), sidecar.ask(body)
        if (native[0], ours[0]) != (200, 200):
            raise SystemExit(f"{names}: native {outcome(native)}, with the encoder {outcome(ours)}")
        (text, expect), (other, found) = told(native[1]), told(ours[1])
        same += text == other
        first = max(first, abs(expect[0] - found[0]))
        most = max([most, *(abs(a - b) for a, b in zip(expect, found))])
    return {"compared": len(COMPARED), "same_text": same, "first_logprob_max": first, "logprob_max": most}


def pressure(sidecar):
    pictures = [png(192, 192, 5000 + i) for i in range(300)]

    def one(number):
        chosen = random.Random(number).sample(pictures, 1 + number % 2)
        return outcome(sidecar.ask(chat(chosen, 4)))
    with ThreadPoolExecutor(8) as pool:
        answers = Counter(pool.map(one, range(500)))
    return {"answers": answers, "files": (sidecar.state() or {}).get("files")}


def killed(sidecar):
    fresh = [png(64, 64, 9000 + i) for i in range(80)]

    def one(number):
        time.sleep(0.02 * number)
        return outcome(sidecar.ask(chat([fresh[number]], 2)))
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(one, number) for number in range(60)]
        time.sleep(0.5)
        for worker in sidecar.workers():
            os.kill(worker, signal.SIGKILL)
        answers = Counter(each.result() for each in asked)
    sidecar.wait()
    return {"answers": answers, "again": outcome(sidecar.ask(chat([fresh[70]], 2)))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", required=True, help="base URL of the engine")
    parser.add_argument("--sidecar", required=True, help="the program fovea-sidecar")
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--mode", required=True, choices=["vllm-ec-shm", "vllm-image-embeds"])
    parser.add_argument("--folder", required=True, help="the engine's shared_storage_path")
    parser.add_argument("--engine-args", type=json.loads, required=True, help="the engine's flags, as a JSON list")
    args = parser.parse_args()
    images = {}
    for name in {name for names in COMPARED for name in names}:
        with open(os.path.join(args.images, name), "rb") as file:
            images[name] = f"data:{MIME[name.rsplit('.', 1)[1]]};base64,{base64.b64encode(file.read()).decode()}"
    found = {"mode": args.mode}
    with tempfile.TemporaryDirectory(prefix="fovea-encoder-") as work:
        with open(os.path.join(work, "narrow.py"), "w") as file:
            file.write(NARROW)
        sidecar = Sidecar(args, work, "whole")
        found.update(compare(args, sidecar, images))
        sidecar.close()
        sidecar = Sidecar(args, work, "narrow", "narrow:Narrow")
        found["wrong_width"] = outcome(sidecar.ask(chat([images["a_96x64.png"]])))
        sidecar.close()
        sidecar = Sidecar(args, work, "pressed", handoff_bytes="160KiB", cache_bytes="64KiB")
        found["pressure"] = pressure(sidecar)
        found["killed"] = killed(sidecar)
        sidecar.close()
    found["engine_lives"] = call(args.engine + "/health")[0] == 200
    alike = found["same_text"] == found["compared"] and found["first_logprob_max"] <= FIRST_MAX
    whole = set(found["pressure"]["answers"]) == {"200"} and found["killed"]["again"] == "200"
    found["ok"] = alike and whole and found["wrong_width"].startswith("500") and found["engine_lives"]
    print(json.dumps(found))
    raise SystemExit(not found["ok"])


main()
