"""Qwen3-VL's own vision tower as an encoder, through transformers, deepstack included.

Rows are `[main | deepstack 0 | deepstack 1 | ...]`, as vLLM and SGLang take them: (1 + levels) x hidden size columns. A pattern for
encoders of one's own: replace the tower and keep the shape of the rows. Needs torch, torchvision, transformers (5.x), safetensors, Pillow.
"""

import base64
import io
import json
import os

import torch
from PIL import Image, ImageOps
from safetensors import safe_open
from transformers import AutoImageProcessor
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from dynamo.vllm.multimodal_utils.custom_encoder import Preprocessed, Qwen3VLImageEncoding, VisionEncoderBackend

IMAGE_BYTES_MAX = 32 * 1024 * 1024
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def picture(raw):
    """A decoded RGB picture of a `data:` URL. A ValueError is told to the client."""
    try:
        data = base64.b64decode(raw.partition(",")[2], validate=True)
        if len(data) > IMAGE_BYTES_MAX:
            raise ValueError(f"the image has more than {IMAGE_BYTES_MAX} bytes")
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        return on_white(image) if image.mode != "RGB" else image
    except (OSError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ValueError("the image cannot be decoded") from error


def on_white(image):
    """RGB as vLLM's loader makes it: transparent pixels over white."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def tower_weights(folder):
    """Tensors of the vision tower alone, read file by file, by their names in the tower."""
    weights = {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        with safe_open(os.path.join(folder, name), framework="pt", device="cpu") as file:
            for key in file.keys():
                if "visual." in key:
                    weights[key.split("visual.", 1)[1]] = file.get_tensor(key)
    if not weights:
        raise RuntimeError(f"no tensor named visual.* in the safetensors files of {folder}")
    return weights


class Qwen3VLEncoder(VisionEncoderBackend):
    """The tower of a checkpoint in a local folder."""

    preprocess_concurrency = 4
    #: In rows: 16384 patches in one forward pass.
    max_batch_cost = 4096

    def build(self, model_id):
        with open(os.path.join(model_id, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        vision = Qwen3VLVisionConfig(**config["vision_config"])
        vision._attn_implementation = "sdpa"
        text = config.get("text_config", config)
        name = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or "bfloat16"
        self.torch_dtype = DTYPES[name]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.processor = AutoImageProcessor.from_pretrained(model_id)
        tower = Qwen3VLVisionModel(vision)
        tower.load_state_dict(tower_weights(model_id), strict=True)
        # Parameters alone: the frequencies of the rotary embedding stay in float32, as in the engine.
        for parameter in tower.parameters():
            parameter.data = parameter.data.to(self.torch_dtype)
        self.tower = tower.to(self.device).eval()
        self.merge = vision.spatial_merge_size
        self.dtype = name
        self.width = vision.out_hidden_size * (1 + len(vision.deepstack_visual_indexes))
        self.warm_up()

    def warm_up(self):
        """The largest batch once, so that memory for it is known to be there."""
        if self.device.type != "cuda":
            return
        side = 2 * int(self.max_batch_cost**0.5)
        columns = self.tower.patch_embed.proj.weight[0].numel()
        patches = torch.zeros(side * side, columns, dtype=torch.float32)
        self.forward_batch([(patches, torch.tensor([[1, side, side]]))])

    def preprocess(self, raw):
        inputs = self.processor(images=[picture(raw)], return_tensors="pt")
        grid = inputs["image_grid_thw"].to(torch.int64)
        rows = int(grid.prod()) // self.merge**2
        return Preprocessed((inputs["pixel_values"].contiguous(), grid), cost=rows)

    def forward_batch(self, items, target_bucket=None):
        patches = torch.cat([item[0] for item in items]).to(self.device, self.torch_dtype)
        grids = torch.cat([item[1] for item in items])
        with torch.inference_mode():
            output = self.tower(patches, grid_thw=grids.to(self.device))
            columns = [output.pooler_output, *output.deepstack_features]
            rows = torch.cat(columns, dim=1).to("cpu")
        counts = (grids.prod(dim=1) // self.merge**2).tolist()
        pieces = zip(torch.split(rows, counts), grids.tolist(), strict=True)
        return [Qwen3VLImageEncoding(piece, tuple(grid)) for piece, grid in pieces]

    def close(self):
        self.tower = self.processor = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
