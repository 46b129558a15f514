#!/usr/bin/env python3
"""SGLang's real prefix cache, image padding and event publisher behind a small HTTP server, on a CPU.

Real, unchanged code of the installed SGLang: RadixCache or UnifiedRadixCache (Python or Rust tree), MultimodalDataItem and its padding,
hash_feature, ZmqEventPublisher with replay. Real code of transformers: template, tokenizer, image processor. Ours: the HTTP server, and a
"model" that answers with fixed token ids at once. Left out: schedulers, GPU memory, batching.

Served: /health, /v1/models, /server_info, /v1/chat/completions, /v1/completions (answers are never streamed), /flush_cache,
/evict?tokens=N (for tests). On stdout one line of JSON when ready: {"http": "127.0.0.1:PORT", "sglang": VERSION}.
"""
import argparse
import base64
import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import io
import json
import os
import socket
import sys
import threading
import types
from array import array
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlparse

# Imports of SGLang that need a GPU, or serve other models, and that nothing here calls.
ABSENT = {
    "sgl_kernel", "flashinfer", "flash_attn", "xgrammar", "llguidance", "outlines", "torchao", "deep_gemm", "deep_ep", "flash_mla",
    "tilelang", "cutlass", "quack", "torch_memory_saver", "gguf", "compressed_tensors", "kernels", "cuda", "pynvml", "nvshmem", "decord",
    "torchcodec", "torchaudio", "timm", "mistral_common", "modelscope", "datasets", "blobfile", "humming", "tml_renderers",
    "deepseek_recipe", "openai_harmony", "anthropic", "librosa", "av", "cv2", "smg_grpc_servicer", "smg_grpc_proto", "tvm_ffi", "numba",
}


class Anything(type):
    """A class that has every attribute and takes every call, so that module-level code of absent packages runs."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)

    def __getitem__(cls, _):
        return cls

    def __or__(cls, _):
        return cls

    __ror__ = __or__


def anything(name):
    def new(cls, *args, **named):
        decorated = len(args) == 1 and not named and callable(args[0]) and not isinstance(args[0], type)
        return args[0] if decorated else object.__new__(cls)

    def schema(_cls, _source, _handler):
        from pydantic_core import core_schema
        return core_schema.any_schema()

    return Anything(name, (), {
        "__new__": new,
        "__init__": lambda self, *args, **named: None,
        "__call__": lambda self, *args, **named: args[0] if len(args) == 1 and callable(args[0]) else None,
        "__getattr__": lambda self, name: anything(name),
        "__get_pydantic_core_schema__": classmethod(schema),
    })


class AbsentModule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return anything(name)


class AbsentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = AbsentModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="model directory with processor files")
    parser.add_argument("--served-model-name", default="tiny-vl")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--tree", choices=["radix", "unified_python", "unified_rust"], default="unified_rust")
    parser.add_argument("--capacity-tokens", type=int, default=16384)
    parser.add_argument("--max-model-len", type=int, default=2048)
    return parser.parse_args()


ARGS = arguments()
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
import transformers.models.llama.modeling_llama  # noqa: E402,F401  before sglang changes transformers
from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoProcessor, AutoTokenizer  # noqa: E402

for auto in (AutoConfig, AutoImageProcessor, AutoModel, AutoProcessor, AutoTokenizer):
    # SGLang registers model types that this transformers has already.
    def again(register):
        return lambda *args, **named: register(*args, **{**named, "exist_ok": True})
    auto.register = staticmethod(again(auto.register))
# Loaded before packages are made to look present that transformers would then use.
PROCESSOR = AutoProcessor.from_pretrained(ARGS.model)
sys.meta_path.insert(0, AbsentFinder())

import sglang.version  # noqa: E402
from PIL import Image  # noqa: E402
from sglang.srt.disaggregation.kv_events import EventPublisherFactory, KVEventBatch  # noqa: E402
from sglang.srt.managers import mm_utils, schedule_batch  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Memory:
    """Stands in for the KV pool of the plain tree."""
    device = "cpu"

    def free(self, _):
        pass

    def free_segment(self, _, start_pos=0):
        pass


def taken(call, named):
    known = inspect.signature(call).parameters
    return {name: value for name, value in named.items() if name in known}


class Cache:
    """The real tree and its publisher. One caller at a time."""

    def __init__(self):
        size = ARGS.page_size
        self.allocator = None
        if ARGS.tree == "radix":
            self.tree = RadixCache.create_simulated(mock_allocator=Memory(), page_size=size, enable_kv_cache_events=True)
        else:
            from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
            from sglang.test.kits.unified_radix_cache.config import CacheConfig
            from sglang.test.kits.unified_radix_cache.fixtures import build_fixture
            config = CacheConfig(page_size=size, kv_size=4 * ARGS.capacity_tokens)
            made, self.allocator, _ = build_fixture(config, enable_kv_cache_events=True, tree_core_backend="python")
            params = dataclasses.replace(made.cache_init_params, tree_core_backend=ARGS.tree.split("_")[1])
            self.tree = UnifiedRadixCache(params=params)
        events, replay = free_port(), free_port()
        self.ports = events, replay
        config = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "topic": "kv", "replay_endpoint": f"tcp://127.0.0.1:{replay}"}
        self.publisher = EventPublisherFactory.create(json.dumps(config), 0)
        self.publish()

    def key(self, ids, salt):
        named = taken(RadixKey.__init__, {"cache_salt": salt}) if salt else {}
        return RadixKey(array("q", ids), **named)

    def cached(self, ids, salt):
        """Tokens of the prompt that need no computing: whole pages, and never the last token."""
        size = ARGS.page_size
        ids = ids[:(len(ids) - 1) // size * size]
        if not ids:
            return 0
        found = self.tree.match_prefix(MatchPrefixParams(key=self.key(ids, salt)))
        return found.device_prefix_len if hasattr(found, "device_prefix_len") else len(found.device_indices)

    def insert(self, ids, salt, session):
        key = self.key(ids, salt)
        if self.allocator is None:
            self.tree.insert(InsertParams(key=key))
        else:
            size = ARGS.page_size
            values = self.allocator.alloc(max(len(ids) // size, 1) * size)
            if values is None:
                self.evict(4 * len(ids))
                values = self.allocator.alloc(max(len(ids) // size, 1) * size)
            self.tree.insert(InsertParams(key=key, value=values[:len(key)], session_id=session))
        self.publish()

    def evict(self, tokens):
        self.tree.evict(EvictParams(num_tokens=tokens))
        self.publish()

    def flush(self):
        self.tree.reset()
        self.publish()

    def publish(self):
        events = self.tree.take_events()
        if events:
            self.publisher.publish(KVEventBatch(ts=0.0, events=events))


class Refused(Exception):
    pass


class Engine:
    def __init__(self):
        self.lock = threading.Lock()
        self.cache = Cache()
        self.processor = PROCESSOR
        self.image_token = json.load(open(os.path.join(ARGS.model, "config.json")))["image_token_id"]

    def prompt(self, path, body):
        """Expanded ids with pads in place of placeholders."""
        tokenizer = self.processor.tokenizer
        if path == "/v1/completions":
            prompt = body["prompt"]
            return list(prompt) if isinstance(prompt, list) else tokenizer(prompt)["input_ids"]
        pictures = []
        messages = [self.message(message, pictures) for message in body["messages"]]
        named = {"tools": body.get("tools"), "add_generation_prompt": body.get("add_generation_prompt", True),
                 "continue_final_message": body.get("continue_final_message", False)}
        text = self.processor.apply_chat_template(messages, tokenize=False, **named, **(body.get("chat_template_kwargs") or {}))
        if not pictures:
            return tokenizer(text, add_special_tokens=False)["input_ids"]
        made = self.processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
        return self.padded(made["input_ids"][0].tolist(), made)

    def message(self, message, pictures):
        content = message.get("content")
        if not isinstance(content, list):
            return message
        parts = []
        for part in content:
            if part["type"] == "image_url":
                url = part["image_url"]["url"]
                if not url.startswith("data:"):
                    raise Refused("only data: URLs are served here")
                pictures.append(Image.open(io.BytesIO(base64.b64decode(url.split(",", 1)[1]))).convert("RGB"))
                parts.append({"type": "image"})
            elif part["type"] == "text":
                parts.append({"type": "text", "text": part["text"]})
            else:
                raise Refused(f"parts of type {part['type']} are not served here")
        return {**message, "content": parts}

    def padded(self, ids, made):
        items, at, row = [], 0, 0
        for grid in made["image_grid_thw"].tolist():
            rows, tokens = grid[0] * grid[1] * grid[2], grid[0] * grid[1] * grid[2] // 4
            at = ids.index(self.image_token, at)
            item = schedule_batch.MultimodalDataItem(modality=schedule_batch.Modality.IMAGE, offsets=[(at, at + tokens - 1)])
            digest = mm_utils.hash_feature(made["pixel_values"][row:row + rows].contiguous())
            if hasattr(item, "set_hash"):
                item.set_hash(digest)
            else:
                item.hash = digest
                item.set_pad_value()
            items.append(item)
            at, row = at + tokens, row + rows
        inputs = schedule_batch.MultimodalInputs(mm_items=items)
        inputs.im_token_id = self.image_token
        if hasattr(mm_utils, "pad_mm_tokens"):
            return list(mm_utils.pad_mm_tokens(array("q", ids), inputs))
        pattern = mm_utils.MultiModalityDataPaddingPatternMultimodalTokens()
        return list(pattern.pad_input_tokens(list(ids), inputs))

    def answer(self, path, body):
        ids = self.prompt(path, body)
        if len(ids) >= ARGS.max_model_len:
            raise Refused(f"the prompt has {len(ids)} tokens, the model takes {ARGS.max_model_len}")
        out = [(7 * i + 3) % 1000 for i in range(min(int(body.get("max_tokens") or body.get("max_completion_tokens") or 4), 16))]
        salt, session = body.get("cache_salt"), body.get("session_id")
        with self.lock:
            cached = self.cache.cached(ids, salt)
            self.cache.insert(ids, salt, session)
            # The last output token is never computed, so its KV does not exist.
            self.cache.insert(ids + out[:-1], salt, session)
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(out), "total_tokens": len(ids) + len(out),
                 "prompt_tokens_details": {"cached_tokens": cached}}
        chat = path == "/v1/chat/completions"
        choice = {"index": 0, "finish_reason": "length", **({"message": {"role": "assistant", "content": "x"}} if chat else {"text": "x"})}
        return {"id": "x", "object": "chat.completion" if chat else "text_completion", "model": ARGS.served_model_name,
                "choices": [choice], "usage": usage}

    def server_info(self):
        events, replay = self.cache.ports
        return {"version": sglang.version.__version__, "model_path": ARGS.model, "served_model_name": ARGS.served_model_name,
                "page_size": ARGS.page_size, "context_length": ARGS.max_model_len, "max_total_num_tokens": ARGS.capacity_tokens, "dp_size": 1,
                "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": events,
                              "replay_endpoint_port_base": replay, "topic": "kv", "block_size": ARGS.page_size, "dp_size": 1}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine = None

    def log_message(self, *_):
        pass

    def reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        path = urlparse(self.path).path
        if path == "/health":
            self.reply(200, {})
        elif path == "/v1/models":
            model = {"id": ARGS.served_model_name, "object": "model", "owned_by": "sglang", "root": ARGS.served_model_name,
                     "max_model_len": ARGS.max_model_len}
            self.reply(200, {"object": "list", "data": [model]})
        elif path in ("/server_info", "/get_server_info"):
            self.reply(200, self.engine.server_info())
        else:
            self.reply(404, {})

    def do_POST(self):
        size = int(self.headers.get("content-length") or 0)
        body, url = self.rfile.read(size), urlparse(self.path)
        if url.path == "/flush_cache":
            with self.engine.lock:
                self.engine.cache.flush()
            self.reply(200, {})
        elif url.path == "/evict":
            with self.engine.lock:
                self.engine.cache.evict(int(parse_qs(url.query)["tokens"][0]))
            self.reply(200, {})
        elif url.path in ("/v1/chat/completions", "/v1/completions"):
            try:
                self.reply(200, self.engine.answer(url.path, json.loads(body)))
            except (Refused, ValueError, StopIteration) as refused:
                # The processor's own complaint too: more placeholders in the text than pictures.
                self.reply(400, {"error": {"message": str(refused)}})
        else:
            self.reply(404, {})


def main():
    Handler.engine = Engine()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(json.dumps({"http": f"127.0.0.1:{server.server_address[1]}", "sglang": sglang.version.__version__}), flush=True)
    server.serve_forever()


main()
