# SPDX-License-Identifier: Apache-2.0
"""The small model that the tests of greedy text decode, and what they ask it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from astrai_core.generate import packaged_model
from astrai_core.integrations.transformers import read_model

PROMPTS = [
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "List five prime numbers and explain why they are prime.",
    "Explain what a hash table is to a child.",
    "Give me a recipe for bread.",
    "What happened in the year 1969?",
    "Translate 'good morning' into French, German and Spanish.",
    "Write a Python function that reverses a list.",
]


@functools.cache
def on_gpu() -> tuple[Any, Any]:
    """The packaged model, or that of ASTRAI_TEST_MODEL, read once; the tokenizer."""
    named = os.environ.get("ASTRAI_TEST_MODEL")
    network, tokenizer = read_model(Path(named) if named else packaged_model(), lambda *_: None)
    return network.to("cuda").eval(), tokenizer


def ids_of(tokenizer: Any, prompt: str) -> Tensor:
    """A prompt as the model's chat has it: ``[1, tokens]``."""
    chat = [{"role": "user", "content": prompt}]
    found = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids: Tensor = found["input_ids"].to("cuda")
    return ids
