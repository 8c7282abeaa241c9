"""verl loads this module, and with it the attention implementation "poise" in each of its workers:

    actor_rollout_ref.model.external_lib=poise.integrations.verl
    +actor_rollout_ref.model.override_config.attn_implementation=poise

verl's Ulysses exchanges heads inside FlashAttention's integration only; under another implementation each rank would
attend to its slice of the sequence alone. More than one rank is therefore refused.
"""

from typing import Any

from torch import Tensor
from torch.nn import Module
from transformers import AttentionInterface
from verl.utils.ulysses import get_ulysses_sequence_parallel_world_size

from poise.integrations.transformers import NAME, attend, register


def attention(module: Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """``poise.integrations.transformers.attend``; raises ValueError where verl has split the sequence over ranks."""
    num_ranks = get_ulysses_sequence_parallel_world_size()
    if num_ranks > 1:
        raise ValueError(
            f"ulysses_sequence_parallel_size must be 1 with attn_implementation 'poise', got {num_ranks}: "
            "verl exchanges heads for FlashAttention only"
        )
    return attend(module, *args, **kwargs)


register()
AttentionInterface.register(NAME, attention)
