# SPDX-License-Identifier: Apache-2.0
"""Reads a model of transformers from files, with its progress."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["read_model"]

# The bars that transformers draws, and what they are called here.
_BARS = {
    "Converting and de-quantizing GGUF tensors...": "dequantizing tensors",
    "Loading weights": "placing weights",
}


def read_model(path: Path, progress: Callable[[str, float], None]) -> tuple[Any, Any]:
    """Reads a causal language model in bfloat16, and its tokenizer, from files alone.

    Args:
        path: a folder written by transformers, or a GGUF file, which is dequantized.
        progress: called with the name of a stage and how much of it is done, from 0 to 1:
            `reading the configuration` (GGUF), `reading the tokenizer`, `preparing weights`,
            `dequantizing tensors` (GGUF), `placing weights`.

    Returns:
        Model and tokenizer.

    Raises:
        Exception: what transformers raises where the files are not a model; there is no list.
    """
    transformers = importlib.import_module("transformers")
    folder = path.absolute()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    extra: dict[str, Any] = {"dtype": torch.bfloat16}
    if path.is_file():
        folder, local["gguf_file"] = folder.parent, path.name
        progress("reading the configuration", 0.0)
        extra["config"] = transformers.AutoConfig.from_pretrained(folder, **local)
        # Otherwise some architectures stay packed, for kernels that transformers would download.
        if hasattr(transformers, "GgufConfig"):
            extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    progress("reading the tokenizer", 0.0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **local)
    progress("preparing weights", 0.0)
    with _bars_to(progress):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **local, **extra)
    return model, tokenizer


@contextlib.contextmanager
def _bars_to(progress: Callable[[str, float], None]) -> Iterator[None]:
    """Reports what transformers would draw; a bar that is not known is drawn as ever."""

    def bar(draw: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        stage = _BARS.get(options.get("desc", ""))
        if stage is None or not args or not hasattr(args[0], "__len__"):
            return draw(*args, **options)
        return _reported(stage, args[0], progress)

    logging = importlib.import_module("transformers.utils.logging")
    # Dequantizing draws its bar past the hook, in a module that may go once nothing needs it.
    gguf: Any = None
    with contextlib.suppress(ImportError):
        gguf = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    draw = getattr(gguf, "tqdm", None)
    previous = logging.set_tqdm_hook(bar)
    try:
        if draw is not None:
            gguf.tqdm = lambda *args, **options: bar(draw, args, options)
        yield
    finally:
        logging.set_tqdm_hook(previous)
        if draw is not None:
            gguf.tqdm = draw


def _reported(stage: str, items: Any, progress: Callable[[str, float], None]) -> Iterator[Any]:
    progress(stage, 0.0)
    for number, item in enumerate(items, 1):
        yield item
        progress(stage, number / len(items))
