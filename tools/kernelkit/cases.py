# SPDX-License-Identifier: Apache-2.0
"""Problems that tests and benchmarks share, as frozen values with a stable label."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = (1, 2, 4, 8)

# (N, K) of projections as models have them, from a key/value projection to an output head; then
# rows at every alignment, and a single row.
LINEAR_SHAPES = (
    (1024, 4096),
    (2048, 2048),
    (4096, 4096),
    (8192, 2048),
    (2048, 8192),
    (11008, 4096),
    (4096, 11008),
    (28672, 8192),
    (128256, 2048),
    (4096, 4095),
    (1, 4096),
)
SWIGLU_SHAPES = ((8192, 2048), (11008, 4096), (14336, 4096), (28672, 8192))
HIDDEN_SIZES = (576, 2048, 4096, 8192)

# (batch, seq): decode steps, then prompts whose queries of 32 heads are 64 and 128 MiB.
ROTARY_TOKENS = ((1, 1), (16, 1), (1, 8192), (2, 8192))

# (batch, kv_len, q_heads, kv_heads, head_dim) of decode steps.
DECODE_SHAPES = (
    (1, 512, 32, 8, 128),
    (1, 1024, 32, 8, 128),
    (1, 4096, 32, 8, 128),
    (1, 16384, 32, 8, 64),
    (1, 16384, 32, 8, 128),
    (4, 8192, 32, 8, 128),
    (8, 1024, 32, 8, 128),
    (16, 4096, 32, 8, 128),
    (64, 2048, 32, 8, 128),
    (1, 131072, 32, 8, 128),
)
DECODE_PAGES = (1, 16, 128)


@dataclass(frozen=True)
class GemvCase:
    """``[m, k] @ [n, k].T``, in bf16."""

    m: int
    n: int
    k: int
    bias: bool = False

    @property
    def label(self) -> str:
        """The `case` of a benchmark row."""
        return f"M={self.m},N={self.n},K={self.k}" + (",bias" if self.bias else "")

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be read and written once."""
        return 2 * (self.n * self.k + self.m * (self.n + self.k) + self.n * self.bias)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True)
class SwigluCase:
    """Up and gate projections of `m` tokens, ``[n, k]`` each, and their SwiGLU."""

    m: int
    n: int
    k: int

    @property
    def label(self) -> str:
        """The `case` of a benchmark row."""
        return f"M={self.m},N={self.n},K={self.k}"

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be read and written once."""
        return 2 * (2 * self.n * self.k + self.m * (self.n + self.k))

    @property
    def flops(self) -> int:
        """Multiplications and additions of the projections."""
        return 4 * self.m * self.n * self.k


@dataclass(frozen=True)
class NormCase:
    """Residual add and RMSNorm of `m` tokens."""

    m: int
    k: int

    @property
    def label(self) -> str:
        """The `case` of a benchmark row."""
        return f"M={self.m},K={self.k}"

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be read and written once: x, residual, weight; h and y."""
        return 2 * self.k * (4 * self.m + 1)


@dataclass(frozen=True)
class RotaryCase:
    """Rotary embedding of ``[batch, seq, heads, head_dim]`` by angles that the batch shares."""

    batch: int
    seq: int
    heads: int
    head_dim: int
    interleaved: bool

    @property
    def label(self) -> str:
        """The `case` of a benchmark row."""
        pairing = "interleaved" if self.interleaved else "halves"
        return f"B={self.batch},S={self.seq},H={self.heads},d={self.head_dim},{pairing}"

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be read and written once: x, cos, sin; the result."""
        return 4 * self.seq * self.head_dim * (self.batch * self.heads + 1)


@dataclass(frozen=True)
class DecodeCase:
    """Attention of one query token of each of `batch` sequences, of `kv_len` tokens each.

    `page` is the number of tokens of a page, 0 for contiguous K and V.
    """

    batch: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page: int = 0

    @property
    def label(self) -> str:
        """The `case` of a benchmark row."""
        return (
            f"B={self.batch},kv={self.kv_len},hq={self.q_heads},hk={self.kv_heads},"
            f"d={self.head_dim},page={self.page}"
        )

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be read and written once: K and V; q and the result."""
        heads = self.kv_len * self.kv_heads + self.q_heads
        return 4 * self.batch * heads * self.head_dim

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products."""
        return 4 * self.batch * self.kv_len * self.q_heads * self.head_dim


@dataclass(frozen=True)
class PrefillCase:
    """Attention of ``[batch, seq, q_heads, head_dim]`` over as many keys of `kv_heads` heads."""

    batch: int
    seq: int
    q_heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def label(self) -> str:
        """The `case` of a benchmark row."""
        heads = f"hq={self.q_heads},hk={self.kv_heads},d={self.head_dim}"
        return f"B={self.batch},S={self.seq},{heads},{'causal' if self.causal else 'full'}"

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be read and written once: q, k, v; the result."""
        return 4 * self.batch * self.seq * self.head_dim * (self.q_heads + self.kv_heads)

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products; a causal mask leaves half of them."""
        full = 4 * self.batch * self.q_heads * self.seq**2 * self.head_dim
        return full // 2 if self.causal else full


PREFILL_CASES = (
    PrefillCase(1, 2048, 32, 8, 128, causal=True),
    PrefillCase(1, 8192, 32, 8, 128, causal=True),
    PrefillCase(4, 4096, 32, 8, 64, causal=True),
    PrefillCase(2, 4096, 16, 16, 256, causal=True),
    PrefillCase(1, 8192, 32, 8, 128, causal=False),
)


@dataclass(frozen=True)
class Projection:
    """One linear layer of a model, ``[n, k]``, fed by the first k outputs of `source`.

    `source` is an earlier projection of the layer, or None for the layer's own input. Attention and
    activations lie between the two in the model; a chain of projections leaves them out.
    """

    name: str
    n: int
    k: int
    source: str | None = None
    bias: bool = False


@dataclass(frozen=True)
class Chain:
    """The projections of one decoder layer in order; the last one's output feeds the next layer."""

    model: str
    layers: int
    projections: tuple[Projection, ...]

    @property
    def hidden(self) -> int:
        """Width of the layer's input and output."""
        return self.projections[-1].n

    @property
    def weight_bytes(self) -> int:
        """Bytes of one layer's bf16 weights."""
        return sum(2 * p.n * p.k for p in self.projections)


def _llama(
    model: str, layers: int, hidden: int, kv: int, inner: int, *, qkv_bias: bool = False
) -> Chain:
    return Chain(
        model,
        layers,
        (
            Projection("q_proj", hidden, hidden, bias=qkv_bias),
            Projection("k_proj", kv, hidden, bias=qkv_bias),
            Projection("v_proj", kv, hidden, bias=qkv_bias),
            Projection("o_proj", hidden, hidden, "q_proj"),
            Projection("gate_proj", inner, hidden, "o_proj"),
            Projection("up_proj", inner, hidden, "o_proj"),
            Projection("down_proj", hidden, inner, "up_proj"),
        ),
    )


CHAINS = (
    _llama("LLaMA 2 7B", 32, 4096, 4096, 11008),
    _llama("LLaMA 3 8B", 32, 4096, 1024, 14336),
    _llama("LLaMA 2 13B", 40, 5120, 5120, 13824),
    Chain(
        "GPT-NeoX 20B",
        44,
        (
            Projection("query_key_value", 18432, 6144, bias=True),
            Projection("dense", 6144, 6144, "query_key_value", bias=True),
            # The MLP runs in parallel to attention in the model; in a chain it follows.
            Projection("dense_h_to_4h", 24576, 6144, "dense", bias=True),
            Projection("dense_4h_to_h", 6144, 24576, "dense_h_to_4h", bias=True),
        ),
    ),
    _llama("Qwen2 7B", 28, 3584, 512, 18944, qkv_bias=True),
    _llama("LLaMA 3 70B", 80, 8192, 1024, 28672),
    Chain(
        "OPT 1.3B",
        24,
        (
            Projection("q_proj", 2048, 2048, bias=True),
            Projection("k_proj", 2048, 2048, bias=True),
            Projection("v_proj", 2048, 2048, bias=True),
            Projection("out_proj", 2048, 2048, "q_proj", bias=True),
            Projection("fc1", 8192, 2048, "out_proj", bias=True),
            Projection("fc2", 2048, 8192, "fc1", bias=True),
        ),
    ),
)
