# SPDX-License-Identifier: Apache-2.0
"""Bundles that are as small as a grader can use, and grading in them."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest

import mega_factory
from mega_factory.grader.grading import grade
from mega_factory.grading import GRADER_FILES

# Some solutions fork. A child has the pool of OpenMP's threads without the threads, and waits for
# them when it ends, or computes: in a worker of one thread there is none.
os.environ["OMP_NUM_THREADS"] = "1"

FACTORY = Path(mega_factory.__file__).parent
SOLUTIONS = Path(__file__).with_name("solutions")
CFG = {
    "layers": 2, "d": 128, "ffn": 256, "n_q": 4, "n_kv": 2, "hd": 32, "vocab": 512, "eps": 1e-5,
    "theta": 10000.0, "wdtype": "bf16",
}  # fmt: skip


def write_bundle(folder, kind, **scale):
    tiny = {"cfg": CFG, "batch": 2, "max_seq": 40, "decode_steps": 5, "tol": 0.06, **scale}
    if kind == "paged":
        tiny["cfg"] = CFG | {"page_size": 8}
    spec = {
        "name": f"tiny-{kind}", "hash": "0123456789ab", "kind": kind, "tol": tiny["tol"],
        "scales": {"tiny": tiny}, "baselines": {"eager_us": 8.0, "graph_us": None},
        "floor_us": None, "measured_on": None, "note": None,
        "per_sequence_pos": len(set(tiny["prefill_lens"])) > 1,
    }  # fmt: skip
    for name, source in GRADER_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(FACTORY / source, folder / name)
    shutil.copy(FACTORY / "models" / f"{kind}.py", folder / "reference.py")
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder


@pytest.fixture(scope="session")
def paged(tmp_path_factory):
    """Two sequences of 21 tokens; the steps go from their third page into the fourth."""
    return write_bundle(tmp_path_factory.mktemp("paged"), "paged", prefill_lens=[21, 21])


@pytest.fixture(scope="session")
def contiguous(tmp_path_factory):
    """Sequences of different lengths."""
    return write_bundle(tmp_path_factory.mktemp("contiguous"), "contiguous", prefill_lens=[30, 11])


@pytest.fixture
def graded(paged):
    """Grades a file of `solutions` in the paged bundle, on a CPU.

    No step is too slow: the tests' machines are busy.
    """

    def graded(name, **changes):
        options = {"scale": "tiny", "device": "cpu", "time_limit": 120, "hidden_us": math.inf}
        return grade(paged, SOLUTIONS / f"{name}.py", **(options | changes))

    return graded
