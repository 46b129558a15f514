"""An encoder of nothing but Python's standard library: each row is the mean colour of its part of the picture.

For trials and as a pattern: it has all the parts that an encoder for fovea-sidecar has, and no model. Row counts and grids are those of
Qwen3-VL (patches of 16 pixels, four to a row, 65536 to 16777216 pixels). Reads PNG of 8 bits without interlacing, and binary PPM.
"""

import array
import base64
import json
import math
import os
import struct
import zlib

from dynamo.vllm.multimodal_utils.custom_encoder import Preprocessed, Qwen3VLImageEncoding, VisionEncoderBackend

CELL = 32  # Pixels of the resized picture along each side of a row's part: patch 16, merged 2 by 2.
PIXELS_MIN, PIXELS_MAX = 65536, 16777216
DECODED_BYTES_MAX = 64 * 1024 * 1024


def decode(raw):
    """(width, height, RGB bytes) of a `data:` URL. A ValueError is told to the client."""
    data = base64.b64decode(raw.partition(",")[2])
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return decode_png(data)
    if data.startswith(b"P6"):
        return decode_ppm(data)
    raise ValueError("only PNG and binary PPM pictures are read")


def decode_ppm(data):
    parts = data.split(maxsplit=4)
    if len(parts) < 4 or not all(part.isdigit() for part in parts[1:4]) or int(parts[3]) != 255:
        raise ValueError("the PPM header is damaged")
    width, height = int(parts[1]), int(parts[2])
    pixels = data[data.index(parts[3], data.index(parts[2], 3)) + len(parts[3]) + 1 :]
    if width * height < 1 or len(pixels) != width * height * 3:
        raise ValueError("the PPM picture is cut short")
    return width, height, pixels


def decode_png(data):
    at, header, packed = 8, None, []
    while at + 8 <= len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        if kind == b"IHDR" and length == 13:
            header = struct.unpack(">IIBBBBB", body)
        elif kind == b"IDAT":
            packed.append(body)
        at += 12 + length
    if header is None or header[2] != 8 or header[3] not in (0, 2, 6) or header[6] != 0:
        raise ValueError("only PNG of 8 bits, grey or RGB, without interlacing is read")
    width, height, channels = header[0], header[1], {0: 1, 2: 3, 6: 4}[header[3]]
    row_bytes = width * channels
    size = (row_bytes + 1) * height
    if size < 1 or size > DECODED_BYTES_MAX:
        raise ValueError("the picture is too large")
    try:
        lines = zlib.decompressobj().decompress(b"".join(packed), size)
    except zlib.error as error:
        raise ValueError("the PNG picture is damaged") from error
    if len(lines) != size:
        raise ValueError("the PNG picture is cut short")
    return width, height, rgb_of(unfilter(lines, row_bytes, height, channels), channels)


def unfilter(lines, row_bytes, height, channels):
    """Undoes PNG's prediction, line by line."""
    out, above = bytearray(), bytes(row_bytes)
    for row in range(height):
        start = row * (row_bytes + 1)
        kind, line = lines[start], bytearray(lines[start + 1 : start + 1 + row_bytes])
        for i in range(row_bytes) if kind else ():
            left = line[i - channels] if i >= channels else 0
            corner = above[i - channels] if i >= channels else 0
            if kind == 1:
                guess = left
            elif kind == 2:
                guess = above[i]
            elif kind == 3:
                guess = (left + above[i]) // 2
            else:
                p = left + above[i] - corner
                guess = min((left, above[i], corner), key=lambda value: abs(p - value))
            line[i] = (line[i] + guess) & 255
        out += line
        above = line
    return bytes(out)


def rgb_of(pixels, channels):
    if channels == 3:
        return pixels
    picks = (0, 0, 0) if channels == 1 else (0, 1, 2)
    out = bytearray(len(pixels) // channels * 3)
    for colour, pick in enumerate(picks):
        out[colour::3] = pixels[pick::channels]
    return bytes(out)


def cells_of(width, height):
    """Columns and rows of parts: Qwen3-VL's rule for the size of a picture."""
    if max(width, height) > 200 * min(width, height):
        raise ValueError("the picture is more than 200 times as long as wide")
    rows, columns = (max(1, round(side / CELL)) for side in (height, width))
    pixels = rows * columns * CELL * CELL
    if pixels > PIXELS_MAX:
        scale = math.sqrt(height * width / PIXELS_MAX)
        rows, columns = (max(1, math.floor(side / scale / CELL)) for side in (height, width))
    elif pixels < PIXELS_MIN:
        scale = math.sqrt(PIXELS_MIN / (height * width))
        rows, columns = (math.ceil(side * scale / CELL) for side in (height, width))
    return columns, rows


def width_of(model_id):
    """Columns that the engine's model takes: (1 + deepstack levels) x hidden size."""
    path = os.path.join(model_id, "config.json")
    if not os.path.isfile(path):
        return 64
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    hidden = config.get("text_config", config)["hidden_size"]
    return hidden * (1 + len(config.get("vision_config", {}).get("deepstack_visual_indexes", [])))


class PlainEncoder(VisionEncoderBackend):
    """Mean colours as embeddings."""

    preprocess_concurrency = 2
    max_batch_cost = 16384
    # Read by fovea-sidecar: equal pictures give equal bytes, whatever else is in the batch.
    deterministic = True
    dtype = "float32"

    def build(self, model_id):
        self.width = width_of(model_id)

    def preprocess(self, raw):
        width, height, pixels = decode(raw)
        columns, rows = cells_of(width, height)
        return Preprocessed((width, height, pixels, columns, rows), cost=columns * rows)

    def forward_batch(self, items, target_bucket=None):
        return [self.encode(*item) for item in items]

    def encode(self, width, height, pixels, columns, rows):
        values = array.array("f")
        for row in range(rows):
            for column in range(columns):
                colour = mean(pixels, width, (column, columns, width), (row, rows, height))
                values.extend(colour[i % 3] for i in range(self.width))
        table = memoryview(values).cast("B").cast("f", (rows * columns, self.width))
        return Qwen3VLImageEncoding(table, (1, rows * 2, columns * 2))

    def close(self):
        pass


def mean(pixels, width, across, down):
    """Mean red, green and blue from 0 to 1 of one part; at least one pixel of it."""

    def span(part, parts, size):
        start = part * size // parts
        return start, max(start + 1, (part + 1) * size // parts)

    left, right = span(*across)
    top, bottom = span(*down)
    sums = [0, 0, 0]
    for line in range(top, bottom):
        start, end = (line * width + left) * 3, (line * width + right) * 3
        for colour in range(3):
            sums[colour] += sum(pixels[start + colour : end : 3])
    return [total / ((right - left) * (bottom - top) * 255) for total in sums]
