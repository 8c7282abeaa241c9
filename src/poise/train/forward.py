"""A micro-batch through a model, on one process or shared by the sequence ranks of a mesh."""

from collections.abc import Callable

from jaxtyping import Bool, Float
from torch import Tensor

from poise.model import GptOss, top_k_route
from poise.model.gpt_oss import Attend, Recompute, Route
from poise.ops.log_probs import token_log_probs
from poise.parallel import Mesh, padded_borders, rows_of_rank, ulysses, whole_rows
from poise.types import Batch


def hidden_states(
    model: GptOss,
    batch: Batch,
    mesh: Mesh,
    attend_of: Callable[[Tensor], Attend],
    route: Route | None = None,
    *,
    recompute: Recompute = "none",
) -> Float[Tensor, "R D"]:
    """Of this rank's rows. ``attend_of``: from ``cu_seqlens`` to the attention of all rows; ``route`` None: top-k."""
    route = route or top_k_route(model.config.experts_per_token)
    attend = ulysses(attend_of(padded_borders(batch.cu_seqlens, len(batch.input_ids), mesh)), mesh)
    input_ids, position_ids = (rows_of_rank(x, mesh) for x in (batch.input_ids, batch.position_ids))
    return model(input_ids, position_ids, attend, route, recompute=recompute)


def log_probs_of(
    hidden: Float[Tensor, "R D"], batch: Batch, lm_head: Float[Tensor, "V D"], mesh: Mesh, *, temperature: float
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Log-probs of the sampled tokens and entropies, of all rows, on each of the ranks that share them; 0 elsewhere."""
    target_ids, mask = (rows_of_rank(x, mesh) for x in (batch.target_ids, batch.response_mask))
    log_probs, entropy = token_log_probs(
        hidden[mask], lm_head, target_ids[mask], temperature=temperature, num_sharing=mesh.sequence
    )
    return at_sampled(log_probs, batch.response_mask, mesh), at_sampled(entropy, batch.response_mask, mesh)


def at_sampled(numbers: Float[Tensor, " n"], mask: Bool[Tensor, " T"], mesh: Mesh) -> Float[Tensor, " T"]:
    """Numbers of this rank's rows in ``mask``, in their order, become those of all rows, on each of the ranks that
    share them: 0 outside. The gradient of this rank's numbers counts once: compute the same of the result on each."""
    mine = rows_of_rank(mask, mesh)
    return whole_rows(numbers.new_zeros(len(mine)).masked_scatter(mine, numbers), len(mask), mesh)
