"""The names that encoders written for NVIDIA Dynamo import, for machines without Dynamo.

Serves `dynamo.vllm.multimodal_utils.custom_encoder` and its parents to the import system, after every real package was asked:
an installed Dynamo always wins. Mirrors the interface of Dynamo 1.6 (learnt from its documentation); written anew.
"""

import abc
import dataclasses
import importlib.abc
import importlib.machinery
import sys
import types
import typing

RawT = typing.TypeVar("RawT")
ItemT = typing.TypeVar("ItemT")
ArtifactT = typing.TypeVar("ArtifactT")

_PACKAGE = "dynamo.vllm.multimodal_utils.custom_encoder"


@dataclasses.dataclass(frozen=True)
class Preprocessed(typing.Generic[ItemT]):
    """What `preprocess` makes of one image: the item for `forward_batch`, and its cost (an int from 1)."""

    item: ItemT
    cost: int = 1
    #: Images of different keys never share a batch.
    bucket_key: typing.Optional[typing.Hashable] = None


class VisionEncoderBackend(abc.ABC, typing.Generic[RawT, ItemT, ArtifactT]):
    """Base class of encoders. `build`, `forward_batch` and `close` run on one thread, `preprocess` on several others."""

    #: Sum of the costs that one `forward_batch` takes; None: no limit.
    max_batch_cost: typing.Optional[int] = None
    #: Images that one `forward_batch` takes; None: no limit.
    max_batch_items: typing.Optional[int] = None
    #: Costs that the encoder is prepared for, ascending.
    buckets: typing.Optional[typing.Sequence[int]] = None
    #: Images preprocessed at once; 0: `preprocess` is never called and `forward_batch` gets the raw images.
    preprocess_concurrency: int = 0

    @abc.abstractmethod
    def build(self, model_id: str) -> None:
        """Loads the model. Called once."""

    def preprocess(self, raw: RawT) -> "Preprocessed[ItemT]":
        """Turns a raw image (a `data:` URL) into an item. A ValueError or TypeError tells the client what is wrong with it."""
        return Preprocessed(item=raw)  # type: ignore[arg-type]

    @abc.abstractmethod
    def forward_batch(self, items: typing.List[ItemT], target_bucket: typing.Optional[int] = None) -> typing.List[ArtifactT]:
        """One result per item, in order, in CPU memory."""

    def close(self) -> None:
        """Frees what `build` took. Called once, when `build` succeeded."""


@dataclasses.dataclass(frozen=True)
class Qwen3VLImageEncoding:
    """Rows of one image, `t*h*w / merge^2` of them, and its grid of patches."""

    embeddings: typing.Any
    grid_thw: typing.Tuple[int, int, int]


_BASE = {
    "RawT": RawT,
    "ItemT": ItemT,
    "ArtifactT": ArtifactT,
    "Preprocessed": Preprocessed,
    "VisionEncoderBackend": VisionEncoderBackend,
}
_QWEN = {"Qwen3VLImageEncoding": Qwen3VLImageEncoding}

#: Module: its names. Each is a package, so that the ones below it are found.
_MODULES = {
    "dynamo": {},
    "dynamo.vllm": {},
    "dynamo.vllm.multimodal_utils": {},
    # Where the class stood before it was moved.
    "dynamo.vllm.multimodal_utils.vision_encoder_backend": _BASE,
    _PACKAGE: {**_BASE, **_QWEN},
    _PACKAGE + ".backend": _BASE,
    _PACKAGE + ".backend.base": _BASE,
    _PACKAGE + ".adapter": _QWEN,
    _PACKAGE + ".adapter.qwen3_vl": _QWEN,
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name in _MODULES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        module.__dict__.update(_MODULES[module.__name__])


def install():
    """Puts the names behind all real packages."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
