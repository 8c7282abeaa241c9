"""Attention with sinks on Triton: the three kernels. Their launches and tile sizes are in attention_triton.py.

Positions count from the start of a sequence. Exponents are to base 2: scores and sinks are multiplied by log2(e), and
``lse`` is log2 of a row's sum of exponentials, its sink's among them. The forward pass starts each row's running
maximum and sum from the sink; the backward pass needs nothing but that lse, see the head of attention_cpu.py.

A program never touches a tile of scores that lies whole outside the causal band or the window; without a window, only
tiles on the diagonal are masked. Every sum has one order: what a program writes, no other program adds to.

Names in the code: ``blocks`` [B, 3] tells each program its block, see attention_triton.py; QUERIES and KEYS are a
tile's rows and columns; LANES holds CHANNELS, padded to a power of two; GROUP query heads share a key/value head.
"""

import triton
import triton.language as tl

# Stands for a sink of -inf ("no sink"), which would make a row that has seen nothing yet compute inf - inf.
LOWEST = tl.constexpr(-1.0e30)
# Triton's interpreter multiplies the bit patterns of bfloat16 matrices; there they are widened first, which is exact.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _block(blocks, index):
    """Its sequence's first token and length, and its first position in that sequence."""
    row = blocks + 3 * index
    return tl.cast(tl.load(row), tl.int64), tl.load(row + 1), tl.load(row + 2)


@triton.jit
def _row_pointers(base, first, stride, ROWS: tl.constexpr, LANES: tl.constexpr):
    rows = base + tl.cast(first, tl.int64) * stride
    return rows + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, LANES)[None, :]


@triton.jit
def _row_mask(first, limit, ROWS: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr):
    return (first + tl.arange(0, ROWS) < limit)[:, None] & (tl.arange(0, LANES) < CHANNELS)[None, :]


@triton.jit
def _load_rows(base, first, stride, limit, ROWS: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr):
    """[ROWS, LANES] from row ``first``; 0 for rows from ``limit`` and for lanes from CHANNELS."""
    pointers = _row_pointers(base, first, stride, ROWS, LANES)
    return tl.load(pointers, mask=_row_mask(first, limit, ROWS, LANES, CHANNELS), other=0.0)


@triton.jit
def _store_rows(base, first, stride, limit, x, ROWS: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr):
    pointers = _row_pointers(base, first, stride, ROWS, LANES)
    tl.store(pointers, x.to(base.dtype.element_ty), mask=_row_mask(first, limit, ROWS, LANES, CHANNELS))


@triton.jit
def _add_dot(a, b, acc):
    """acc + a @ b, accumulated in float32; float32 operands are multiplied as such, not as TF32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _dot(a, b):
    return _add_dot(a, b, tl.zeros([a.shape[0], b.shape[1]], tl.float32))


@triton.jit
def _sink(sinks, head):
    sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
    return tl.where(sink == float("-inf"), LOWEST, sink)


@triton.jit
def _is_seen(query, key, window, SLIDES: tl.constexpr):
    is_seen = key <= query
    if SLIDES:
        is_seen = is_seen & (query - key < window)
    return is_seen


# --- forward ---


@triton.jit
def _attend(
    acc, row_sum, row_max, q, k_base, v_base, stride_k, stride_v, first_query, low, high, length, window, scale,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SLIDES: tl.constexpr, IN_PART: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys from ``low`` to ``high``."""
    for first_key in range(low, high, KEYS):
        k = _load_rows(k_base, first_key, stride_k, length, KEYS, LANES, CHANNELS)
        scores = _dot(q, tl.trans(k)) * scale
        if IN_PART:
            query = first_query + tl.arange(0, QUERIES)[:, None]
            key = first_key + tl.arange(0, KEYS)[None, :]
            scores = tl.where(_is_seen(query, key, window, SLIDES), scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        probs = tl.exp2(scores - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(probs, 1)
        v = _load_rows(v_base, first_key, stride_v, length, KEYS, LANES, CHANNELS)
        acc = _add_dot(probs.to(v.dtype), v, acc * shrink[:, None])
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["num_tokens", "window"])
def forward_kernel(
    q, k, v, sinks, blocks, out, lse, stride_q, stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head,
    num_tokens, window, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SLIDES: tl.constexpr,
):  # fmt: skip
    """out [T, H, C] and lse [H, T]; one program a block of queries and head, the late (long) rows first."""
    head = tl.program_id(0) % HEADS
    token, length, first_query = _block(blocks, tl.program_id(0) // HEADS)
    k += token * stride_k + head // GROUP * stride_k_head
    v += token * stride_v + head // GROUP * stride_v_head
    q_rows = _load_rows(
        q + token * stride_q + head * stride_q_head, first_query, stride_q, length, QUERIES, LANES, CHANNELS
    )
    row_max = tl.zeros([QUERIES], tl.float32) + _sink(sinks, head)
    row_sum = tl.full([QUERIES], 1.0, tl.float32)
    acc = tl.zeros([QUERIES, LANES], tl.float32)

    if SLIDES:
        low = tl.maximum(first_query - window + 1, 0) // KEYS * KEYS
    else:
        low = (first_query + 1) // KEYS * KEYS
        acc, row_sum, row_max = _attend(
            acc, row_sum, row_max, q_rows, k, v, stride_k, stride_v, first_query, 0, low, length, window, scale,
            CHANNELS, LANES, QUERIES, KEYS, SLIDES, False,
        )  # fmt: skip
    acc, row_sum, row_max = _attend(
        acc, row_sum, row_max, q_rows, k, v, stride_k, stride_v, first_query, low,
        tl.minimum(first_query + QUERIES, length), length, window, scale,
        CHANNELS, LANES, QUERIES, KEYS, SLIDES, True,
    )  # fmt: skip

    out += token * HEADS * CHANNELS + head * CHANNELS
    _store_rows(out, first_query, HEADS * CHANNELS, length, acc / row_sum[:, None], QUERIES, LANES, CHANNELS)
    query = first_query + tl.arange(0, QUERIES)
    lse += tl.cast(head, tl.int64) * num_tokens + token
    tl.store(lse + query, row_max + tl.log2(row_sum), mask=query < length)


# --- backward ---


@triton.jit
def _add_query_grad(
    acc, q, grad_out, lse, delta, k_base, v_base, stride_k, stride_v, first_query, low, high, length, window, scale,
    CHANNELS: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SLIDES: tl.constexpr, IN_PART: tl.constexpr,
):  # fmt: skip
    for first_key in range(low, high, KEYS):
        k = _load_rows(k_base, first_key, stride_k, length, KEYS, LANES, CHANNELS)
        v = _load_rows(v_base, first_key, stride_v, length, KEYS, LANES, CHANNELS)
        scores = _dot(q, tl.trans(k)) * scale
        if IN_PART:
            query = first_query + tl.arange(0, QUERIES)[:, None]
            key = first_key + tl.arange(0, KEYS)[None, :]
            scores = tl.where(_is_seen(query, key, window, SLIDES), scores, float("-inf"))
        probs = tl.exp2(scores - lse[:, None])
        grad_probs = _dot(grad_out, tl.trans(v))
        grad_scores = probs * (grad_probs - delta[:, None])
        acc = _add_dot(grad_scores.to(k.dtype), k, acc)
    return acc


@triton.jit(do_not_specialize=["num_tokens", "window"])
def query_grad_kernel(
    q, k, v, sinks, blocks, out, lse, grad_out, grad_q, delta, sink_parts,
    stride_q, stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head,
    num_tokens, window, scale, grad_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SLIDES: tl.constexpr,
):  # fmt: skip
    """grad_q [T, H, C], delta [H, T] = rowsum(grad_out * out), and [B, H] of which the sinks' gradient is the sum."""
    head = tl.program_id(0) % HEADS
    token, length, first_query = _block(blocks, tl.program_id(0) // HEADS)
    k += token * stride_k + head // GROUP * stride_k_head
    v += token * stride_v + head // GROUP * stride_v_head
    q_rows = _load_rows(
        q + token * stride_q + head * stride_q_head, first_query, stride_q, length, QUERIES, LANES, CHANNELS
    )
    own = token * HEADS * CHANNELS + head * CHANNELS
    out_rows = _load_rows(out + own, first_query, HEADS * CHANNELS, length, QUERIES, LANES, CHANNELS)
    grad_rows = _load_rows(grad_out + own, first_query, HEADS * CHANNELS, length, QUERIES, LANES, CHANNELS)

    query = first_query + tl.arange(0, QUERIES)
    row = tl.cast(head, tl.int64) * num_tokens + token
    lse_rows = tl.load(lse + row + query, mask=query < length, other=float("inf"))
    delta_rows = tl.sum(grad_rows.to(tl.float32) * out_rows.to(tl.float32), 1)
    tl.store(delta + row + query, delta_rows, mask=query < length)
    part = -tl.sum(tl.exp2(_sink(sinks, head) - lse_rows) * delta_rows, 0)
    tl.store(sink_parts + tl.program_id(0), part)

    acc = tl.zeros([QUERIES, LANES], tl.float32)
    if SLIDES:
        low = tl.maximum(first_query - window + 1, 0) // KEYS * KEYS
    else:
        low = (first_query + 1) // KEYS * KEYS
        acc = _add_query_grad(
            acc, q_rows, grad_rows, lse_rows, delta_rows, k, v, stride_k, stride_v, first_query, 0, low, length, window,
            scale, CHANNELS, LANES, QUERIES, KEYS, SLIDES, False,
        )  # fmt: skip
    acc = _add_query_grad(
        acc, q_rows, grad_rows, lse_rows, delta_rows, k, v, stride_k, stride_v, first_query, low,
        tl.minimum(first_query + QUERIES, length), length, window, scale,
        CHANNELS, LANES, QUERIES, KEYS, SLIDES, True,
    )  # fmt: skip
    _store_rows(grad_q + own, first_query, HEADS * CHANNELS, length, acc * grad_scale, QUERIES, LANES, CHANNELS)


@triton.jit
def _add_key_grads(
    acc_k, acc_v, k, v, q_base, grad_base, lse_base, delta_base, stride_q, stride_grad, first_key, low, high, length,
    window, scale, CHANNELS: tl.constexpr, LANES: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    SLIDES: tl.constexpr, IN_PART: tl.constexpr,
):  # fmt: skip
    """All matrices stand transposed, [KEYS, QUERIES], so that the accumulators need no transpose."""
    for first_query in range(low, high, QUERIES):
        q = _load_rows(q_base, first_query, stride_q, length, QUERIES, LANES, CHANNELS)
        query = first_query + tl.arange(0, QUERIES)
        lse = tl.load(lse_base + query, mask=query < length, other=float("inf"))
        scores = _dot(k, tl.trans(q)) * scale
        if IN_PART:
            key = first_key + tl.arange(0, KEYS)
            scores = tl.where(_is_seen(query[None, :], key[:, None], window, SLIDES), scores, float("-inf"))
        probs = tl.exp2(scores - lse[None, :])
        grad_out = _load_rows(grad_base, first_query, stride_grad, length, QUERIES, LANES, CHANNELS)
        acc_v = _add_dot(probs.to(grad_out.dtype), grad_out, acc_v)
        delta = tl.load(delta_base + query, mask=query < length, other=0.0)
        grad_probs = _dot(v, tl.trans(grad_out))
        grad_scores = probs * (grad_probs - delta[None, :])
        acc_k = _add_dot(grad_scores.to(q.dtype), q, acc_k)
    return acc_k, acc_v


@triton.jit(do_not_specialize=["num_tokens", "window"])
def key_grad_kernel(
    q, k, v, blocks, lse, grad_out, delta, grad_k, grad_v,
    stride_q, stride_k, stride_v, stride_q_head, stride_k_head, stride_v_head,
    num_tokens, window, scale, grad_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SLIDES: tl.constexpr,
):  # fmt: skip
    """grad_k and grad_v [T, K, C]; one program a block of keys and key head, in turn over the group's query heads."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    token, length, first_key = _block(blocks, tl.program_id(0) // KV_HEADS)
    k_rows = _load_rows(
        k + token * stride_k + kv_head * stride_k_head, first_key, stride_k, length, KEYS, LANES, CHANNELS
    )
    v_rows = _load_rows(
        v + token * stride_v + kv_head * stride_v_head, first_key, stride_v, length, KEYS, LANES, CHANNELS
    )
    acc_k = tl.zeros([KEYS, LANES], tl.float32)
    acc_v = tl.zeros([KEYS, LANES], tl.float32)
    low = first_key // QUERIES * QUERIES
    if SLIDES:
        high = tl.minimum(first_key + KEYS - 1 + window, length)
    else:
        high = tl.minimum(tl.cdiv(first_key + KEYS - 1, QUERIES) * QUERIES, length)
    for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
        q_base = q + token * stride_q + head * stride_q_head
        grad_base = grad_out + token * HEADS * CHANNELS + head * CHANNELS
        row = tl.cast(head, tl.int64) * num_tokens + token
        acc_k, acc_v = _add_key_grads(
            acc_k, acc_v, k_rows, v_rows, q_base, grad_base, lse + row, delta + row, stride_q, HEADS * CHANNELS,
            first_key, low, high, length, window, scale, CHANNELS, LANES, QUERIES, KEYS, SLIDES, True,
        )  # fmt: skip
        if not SLIDES:
            acc_k, acc_v = _add_key_grads(
                acc_k, acc_v, k_rows, v_rows, q_base, grad_base, lse + row, delta + row, stride_q, HEADS * CHANNELS,
                first_key, high, length, length, window, scale, CHANNELS, LANES, QUERIES, KEYS, SLIDES, False,
            )  # fmt: skip
    own = token * KV_HEADS * CHANNELS + kv_head * CHANNELS
    stride = KV_HEADS * CHANNELS
    _store_rows(grad_k + own, first_key, stride, length, acc_k * grad_scale, KEYS, LANES, CHANNELS)
    _store_rows(grad_v + own, first_key, stride, length, acc_v, KEYS, LANES, CHANNELS)
