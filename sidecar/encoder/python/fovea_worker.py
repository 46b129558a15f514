"""Runs one VisionEncoderBackend for fovea-sidecar, which gives a Unix socket as standard input.

Frames in both directions: u32 LE length of a JSON object, u32 LE length of the bytes behind it, the object, the bytes.
The main thread builds, runs and closes the encoder; one thread reads the socket; a pool preprocesses.
Standard library only; torch and numpy are met where the encoder brings them.
"""

import base64
import concurrent.futures
import hashlib
import importlib
import inspect
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import traceback

PROTOCOL = 1
MESSAGE_CHARS_MAX = 2000
JSON_BYTES_MAX = 1 << 24
BLOB_BYTES_MAX = 1 << 31


class StartError(Exception):
    """The encoder cannot run; `code` is one of those that the sidecar explains."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


class Link:
    """The socket. Frames of several threads do not mix."""

    def __init__(self):
        self.socket = socket.socket(fileno=os.dup(0))
        self.socket.setblocking(True)
        # An encoder that reads its standard input finds nothing there.
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self.lock = threading.Lock()
        self.file = self.socket.makefile("rb", buffering=1 << 16)

    def send(self, message):
        text = json.dumps(message, allow_nan=False).encode()
        with self.lock:
            self.socket.sendall(struct.pack("<II", len(text), 0) + text)

    def receive(self):
        """Next frame; None when the sidecar is gone."""
        head = self.file.read(8)
        if len(head) < 8:
            return None
        text_bytes, blob_bytes = struct.unpack("<II", head)
        if text_bytes > JSON_BYTES_MAX or blob_bytes > BLOB_BYTES_MAX:
            return None
        text, blob = self.file.read(text_bytes), self.file.read(blob_bytes)
        if len(text) < text_bytes or len(blob) < blob_bytes:
            return None
        return json.loads(text), blob


def die():
    """Ends the whole process group, whatever its threads are doing."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def die_with_parent():
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    except Exception:  # noqa: BLE001 - not Linux: the closed socket ends us
        pass


def fault(error):
    """What the sidecar is told of an exception: its type decides who reads the message."""
    text = str(error) or type(error).__name__
    names = {base.__name__ for base in type(error).__mro__}
    lowered = text.lower()
    if "OutOfMemoryError" in names or isinstance(error, MemoryError) or "out of memory" in lowered:
        kind = "oom"
    elif isinstance(error, (ValueError, TypeError)):
        kind = "invalid"
    elif "AcceleratorError" in names or "cuda error" in lowered or "cublas_status" in lowered:
        kind = "device"
    else:
        kind, text = "internal", f"{type(error).__name__}: {text}"
    return {"kind": kind, "message": text[:MESSAGE_CHARS_MAX]}


def log_exception():
    traceback.print_exc(file=sys.stderr)


# ---- the encoder's class ------------------------------------------------------------------------------------------------------


def resolve(dotted):
    """The class at `pkg.mod:Class` or `pkg.mod.Class`."""
    module_name, _, class_name = dotted.partition(":") if ":" in dotted else dotted.rpartition(".")
    if not module_name or not class_name:
        raise StartError("class_path", f"{dotted!r} names no module and class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        log_exception()
        raise StartError("import", f"{module_name}: {type(error).__name__}: {error}") from error
    cls = getattr(module, class_name, None)
    if cls is None:
        raise StartError("class_missing", f"module {module_name} has no {class_name}")
    from dynamo.vllm.multimodal_utils.custom_encoder import VisionEncoderBackend as Base

    if not (isinstance(cls, type) and issubclass(cls, Base)):
        raise StartError("not_a_backend", f"{dotted} is no subclass of VisionEncoderBackend")
    return cls, Base


def positive(value, name):
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise StartError("attribute", f"{name} is {value!r}, wanted an int from 1 or None")
    return value


def describe(backend, base, config):
    """Attributes of the encoder, read once and checked."""
    concurrency = backend.preprocess_concurrency
    if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 0:
        raise StartError("attribute", f"preprocess_concurrency is {concurrency!r}, wanted an int from 0")
    if config.get("preprocess_concurrency") is not None:
        concurrency = config["preprocess_concurrency"]
    if concurrency == 0 and type(backend).preprocess is not base.preprocess:
        raise StartError("preprocess_unused", f"{type(backend).__name__} overrides preprocess")
    dtype = getattr(backend, "dtype", None)
    width = getattr(backend, "width", None)
    return {
        "max_batch_cost": positive(backend.max_batch_cost, "max_batch_cost"),
        "max_batch_items": positive(getattr(backend, "max_batch_items", None), "max_batch_items"),
        "buckets": [positive(bucket, "buckets") for bucket in backend.buckets or []],
        "preprocess_concurrency": concurrency,
        "deterministic": getattr(backend, "deterministic", False) is True,
        "width": width if isinstance(width, int) else None,
        "dtype": None if dtype is None else str(dtype),
    }


def fingerprint(backend, config):
    """Hash of the class's source, the model's files and the operator's revision.

    Of a model's large files the size and both ends count: enough to tell checkpoints apart without reading them.
    """
    own = getattr(backend, "fingerprint", None)
    digest = hashlib.sha256()
    for part in (config["class"], config["model"], config.get("revision") or "", own if isinstance(own, str) else ""):
        digest.update(struct.pack("<I", len(part.encode())) + part.encode())
    if not isinstance(own, str):
        try:
            with open(inspect.getsourcefile(type(backend)), "rb") as file:
                digest.update(hashlib.sha256(file.read()).digest())
        except (OSError, TypeError):
            pass
    if os.path.isdir(config["model"]):
        for name in sorted(os.listdir(config["model"])):
            path = os.path.join(config["model"], name)
            if name.endswith((".json", ".safetensors", ".bin", ".pt", ".pth", ".onnx")) and os.path.isfile(path):
                digest.update(name.encode() + b"\0" + ends_of(path))
    return digest.hexdigest()


def ends_of(path):
    digest, size, end = hashlib.sha256(), os.path.getsize(path), 1 << 20
    with open(path, "rb") as file:
        digest.update(struct.pack("<Q", size) + file.read(end))
        file.seek(max(0, size - end))
        digest.update(file.read(end))
    return digest.digest()


# ---- images in, rows out ------------------------------------------------------------------------------------------------------

MAGIC = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\0", "image/tiff"),
    (b"MM\0*", "image/tiff"),
)


def raw_of(blob, mime, wanted):
    """An image as the encoder wants it: a `data:` URL as from Dynamo, or the file's bytes."""
    if wanted == "bytes":
        return blob
    if blob[:4] == b"RIFF" and blob[8:12] == b"WEBP":
        mime = "image/webp"
    found = next((name for magic, name in MAGIC if blob.startswith(magic)), None)
    mime = found or (mime if mime and mime.startswith("image/") else "image/png")
    return f"data:{mime};base64,{base64.b64encode(blob).decode()}"


FORMATS = {"f": "float32", "<f": "float32", "e": "float16", "<e": "float16"}


def rows_of(tensor):
    """(rows, width, dtype, bytes) of a torch tensor, a numpy array or any buffer of two dimensions."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if tensor.dim() != 2:
            raise RuntimeError(f"embeddings have shape {tuple(tensor.shape)}, wanted two dimensions")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ("float32", "float16", "bfloat16"):
            raise RuntimeError(f"embeddings are {dtype}, wanted float32, float16 or bfloat16")
        plain = tensor.detach().cpu().contiguous()
        data = plain.view(torch.uint8).numpy() if plain.numel() else b""
        return plain.shape[0], plain.shape[1], dtype, data
    try:
        view = memoryview(tensor)
    except TypeError:
        view = None
    if view is None:
        raise RuntimeError(f"embeddings are a {type(tensor).__name__}, wanted a tensor, an array or a buffer")
    if view.ndim != 2 or view.format not in FORMATS:
        raise RuntimeError(f"embeddings are a buffer of {view.ndim} dimensions of {view.format!r}, wanted 2 of 'f' or 'e'")
    return view.shape[0], view.shape[1], FORMATS[view.format], view if view.c_contiguous else view.tobytes()


def write_file(path, data):
    """A new file that nobody else may read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def grid_of(result):
    grid = getattr(result, "grid_thw", None)
    if grid is None:
        return None
    grid = [int(number) for number in grid]
    if len(grid) != 3 or min(grid) < 1:
        raise RuntimeError(f"grid_thw is {grid}, wanted three ints from 1")
    return grid


def hand_over(result, path):
    """Writes one result to `path` and says what it is. A result may be an exception: it fails that image alone."""
    if isinstance(result, BaseException):
        return {"error": fault(result)}
    try:
        rows, width, dtype, data = rows_of(getattr(result, "embeddings", result))
        grid = grid_of(result)
        write_file(path, data)
    except Exception as error:  # noqa: BLE001 - never the client's fault
        log_exception()
        return {"error": {"kind": "internal", "message": str(error)[:MESSAGE_CHARS_MAX]}}
    return {"rows": rows, "width": width, "dtype": dtype, "grid_thw": grid}


# ---- the loop -----------------------------------------------------------------------------------------------------------------


class Worker:
    def __init__(self, link, backend, spec, config):
        self.link, self.backend, self.config = link, backend, config
        self.wanted = getattr(backend, "raw_input", "url")
        self.buckets = bool(spec["buckets"])
        self.work = queue.Queue()
        self.items, self.lock, self.next_handle = {}, threading.Lock(), 1
        count = spec["preprocess_concurrency"]
        self.pool = concurrent.futures.ThreadPoolExecutor(count, "preprocess") if count else None

    def read(self):
        """The reading thread: answers at once what needs no encoder."""
        try:
            while (frame := self.link.receive()) is not None:
                message, blob = frame
                with self.lock:
                    for handle in message.get("drop", ()):
                        self.items.pop(handle, None)
                op = message["op"]
                if op == "ping":
                    self.link.send({"op": "pong"})
                elif op == "preprocess":
                    self.pool.submit(self.preprocess, message, blob)
                else:
                    self.work.put((message, blob))
        except BaseException:  # noqa: BLE001 - nothing may keep us alive without a sidecar
            log_exception()
        die()

    def preprocess(self, message, blob):
        try:
            done = self.backend.preprocess(raw_of(blob, message.get("mime"), self.wanted))
            cost = done.cost
            if isinstance(cost, bool) or not isinstance(cost, int) or cost < 1:
                raise RuntimeError(f"cost is {cost!r}, wanted an int from 1")
            key = getattr(done, "bucket_key", None)
            number = 0 if key is None else int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little") + 1
            with self.lock:
                handle = self.next_handle
                self.next_handle += 1
                self.items[handle] = done.item
            reply = {"id": message["id"], "handle": handle, "cost": cost, "key": number}
        except BaseException as error:  # noqa: BLE001 - each image answers for itself
            reply = {"id": message["id"], "error": fault(error)}
            if reply["error"]["kind"] != "invalid":
                log_exception()
        self.link.send(reply)

    def gather(self, message, blob):
        if "handles" in message:
            with self.lock:
                return [self.items[handle] for handle in message["handles"]]
        items, start = [], 0
        for length, mime in message["images"]:
            items.append(raw_of(blob[start : start + length], mime, self.wanted))
            start += length
        return items

    def forward(self, message, blob):
        results = []
        try:
            items = self.gather(message, blob)
            bucket = message.get("bucket") if self.buckets else None
            outcome = self.backend.forward_batch(items, bucket)
            if not isinstance(outcome, (list, tuple)):
                raise RuntimeError(f"forward_batch gave a {type(outcome).__name__}, wanted a list")
            for index, result in enumerate(outcome):
                if index >= len(message["files"]):
                    results.append({"error": {"kind": "internal", "message": "one result too many"}})
                    break
                results.append(hand_over(result, message["files"][index]))
            reply = {"id": message["id"], "results": results}
        except BaseException as error:  # noqa: BLE001 - the batch answers for itself
            kind = fault(error)
            if kind["kind"] != "invalid":
                log_exception()
            reply = {"id": message["id"], "error": kind}
            if kind["kind"] == "oom":
                self.free_memory()
        self.link.send(reply)

    def free_memory(self):
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            try:
                torch.cuda.empty_cache()
            except Exception:  # noqa: BLE001 - the device may be gone
                log_exception()

    def run(self):
        while True:
            message, blob = self.work.get()
            if message["op"] == "forward":
                self.forward(message, blob)
            elif message["op"] == "close":
                try:
                    self.backend.close()
                finally:
                    self.link.send({"id": message["id"], "closed": True})
                return


def start(config):
    sys.path[1:1] = config.get("path", [])
    import fovea_shim

    fovea_shim.install()
    if sys.byteorder != "little":
        raise StartError("byte_order", "this machine is big-endian")
    cls, base = resolve(config["class"])
    try:
        backend = cls()
    except Exception as error:
        log_exception()
        raise StartError("build", f"{cls.__name__}(): {type(error).__name__}: {error}") from error
    describe(backend, base, config)
    try:
        backend.build(config["model"])
    except Exception as error:
        log_exception()
        raise StartError("build", f"build: {type(error).__name__}: {error}") from error
    return backend, {**describe(backend, base, config), "fingerprint": fingerprint(backend, config)}


def main():
    die_with_parent()
    link = Link()
    link.send({"op": "hello", "protocol": PROTOCOL, "python": sys.version.split()[0]})
    frame = link.receive()
    if frame is None:
        return
    config = frame[0]
    try:
        backend, spec = start(config)
    except StartError as error:
        link.send({"op": "failed", "code": error.code, "message": str(error)[:MESSAGE_CHARS_MAX]})
        return
    worker = Worker(link, backend, spec, config)
    threading.Thread(target=worker.read, name="read", daemon=True).start()
    link.send({"op": "ready", **spec})
    worker.run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of the encoder's libraries do not hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main()
