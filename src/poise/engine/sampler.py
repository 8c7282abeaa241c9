"""Draws tokens, and tells the log-probability under exactly the distribution drawn from."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor


def request_uniforms(seed: int, num_tokens: int) -> NDArray[np.float64]:
    """One uniform number in [0, 1) per token a request may sample: independent of what else is in the batch."""
    return np.random.Generator(np.random.Philox(key=seed)).random(num_tokens)


def sample(
    logits: Float[Tensor, "B V"],
    uniforms: Float[Tensor, " B"],
    *,
    temperature: float | Float[Tensor, "B 1"],
    given_ids: Sequence[int] = (),
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """(token ids, their log-probs) by inversion of the cumulative distribution of softmax(logits / temperature).

    The sum is in float64: in float32 the tail of a 200k vocabulary is lost to rounding. ``given_ids``: one a row, or
    none at all; where not negative, that token is taken instead of a drawn one.
    """
    log_probs = torch.log_softmax(logits.float() / temperature, dim=-1)
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    thresholds = uniforms.double()[:, None] * cumulative[:, -1:]
    # right=True: the first token whose cumulative probability exceeds the threshold; tokens of probability 0 never do.
    token_ids = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=logits.shape[-1] - 1)
    if any(token_id >= 0 for token_id in given_ids):
        given = torch.tensor(given_ids, device=logits.device)[:, None]
        token_ids = torch.where(given >= 0, given, token_ids)
    return token_ids.squeeze(1), log_probs.gather(1, token_ids).squeeze(1)
