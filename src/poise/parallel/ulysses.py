"""Sequence parallelism: ranks share the tokens of a micro-batch, and split the heads for attention alone.

"DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence Transformer Models" (Jacobs et
al. 2023, arXiv 2309.14509), section 3: before attention an all-to-all gathers the sequence and splits the heads, after
it another does the reverse. Rank s of P has rows s T/P to (s + 1) T/P of the packed tokens, whatever sequences they
belong to, and heads s H/P to (s + 1) H/P. Rows that fill up T to a multiple of P form a sequence of their own behind
the others: no real token sees them, and nobody reads what comes out of them.
"""

from math import gcd

import torch
from jaxtyping import Int
from torch import Tensor

from poise.model.gpt_oss import Attend
from poise.parallel.exchange import exchange, gather_rows
from poise.parallel.mesh import Mesh


def ulysses(attend: Attend, mesh: Mesh) -> Attend:
    """``attend``, which sees all rows but this rank's heads, for operands that are this rank's rows of all heads.

    q [T/P, H, C], k and v [T/P, K, C], sinks [H] -> [T/P, H, C]. Sinks are sliced to the rank's heads: their gradient
    is zero elsewhere, so that the sum over the ranks is whole. Key/value heads that P does not divide are repeated
    until it does, each beside the query heads that read it, and their gradient is the sum over the copies. A rank sends
    (2 H + 2 K') T C (P - 1) / P^2 numbers a forward, K' = lcm(K, P). Raises ValueError where P does not divide H.
    """
    degree, rank = mesh.sequence, mesh.sequence_rank
    if degree == 1:
        return attend

    def attend_to_all(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None) -> Tensor:
        num_heads, num_kv_heads = q.shape[1], k.shape[1]
        require_heads(num_heads, degree)
        copies = degree // gcd(num_kv_heads, degree)
        if copies > 1:
            k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
        mine, mine_kv = num_heads // degree, k.shape[1] // degree
        # One exchange for all three: [T/P, heads, C] -> [T, heads / P, C].
        stacked = torch.cat([x.unflatten(1, (degree, -1)) for x in (q, k, v)], dim=2)
        gathered = _swap(stacked.transpose(0, 1), mesh).flatten(0, 1)
        q, k, v = gathered.split((mine, mine_kv, mine_kv), dim=1)
        out = attend(layer, q, k, v, sinks[rank * mine : (rank + 1) * mine], window)
        return _swap(out.unflatten(0, (degree, -1)), mesh).transpose(0, 1).flatten(1, 2)

    return attend_to_all


def require_heads(num_heads: int, degree: int) -> None:
    """Raises ValueError for a sequence degree that does not divide the query heads."""
    if num_heads % degree:
        raise ValueError(f"the sequence degree ({degree}) must divide the {num_heads} query heads")


def rows_of_rank(x: Tensor, mesh: Mesh) -> Tensor:
    """This rank's rows of a [T, ...] tensor, filled up with zeros where T is no multiple of the degree."""
    if mesh.sequence == 1:
        return x
    num_rows = -(-len(x) // mesh.sequence)
    mine = x[mesh.sequence_rank * num_rows : (mesh.sequence_rank + 1) * num_rows]
    return torch.cat((mine, mine.new_zeros(num_rows - len(mine), *x.shape[1:]))) if len(mine) < num_rows else mine


def whole_rows(x: Tensor, num_rows: int, mesh: Mesh) -> Tensor:
    """The inverse: the [T, ...] tensor, on every rank, without what was filled up.

    Its gradient is the slice of this rank's rows, see ``gather_rows``: compute the same of it on each rank.
    """
    return x if mesh.sequence == 1 else gather_rows(x, mesh.sequence_group)[:num_rows]


def padded_borders(cu_seqlens: Int[Tensor, " N1"], num_rows: int, mesh: Mesh) -> Int[Tensor, " N2"]:
    """``cu_seqlens`` with the filled-up rows as one more sequence, where there are any."""
    padded = -(-num_rows // mesh.sequence) * mesh.sequence
    return cu_seqlens if padded == num_rows else torch.cat((cu_seqlens, cu_seqlens.new_tensor([padded])))


def _swap(x: Tensor, mesh: Mesh) -> Tensor:
    """[P, ...] with x[r] for rank r -> [P, ...] with out[r] from rank r."""
    ones = [1] * mesh.sequence
    return exchange(x, ones, ones, mesh.sequence_group)
