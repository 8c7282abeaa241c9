"""GPT-OSS models with plain rotary embedding, as small ones for tests are; vLLM's GPT-OSS knows YaRN alone."""

from typing import Any


def serve_plain_rotation() -> None:
    """Gives such a model's attention the YaRN that changes nothing: with a factor of 1 each frequency is interpolated
    between itself and itself, and cos and sin are scaled by 0.1 ln(1) + 1 = 1."""
    from vllm.model_executor.models.gpt_oss import OAIAttention

    make = OAIAttention.__init__
    if make.__module__ == __name__:
        return

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.rope_parameters.get("rope_type") == "default":
            config.rope_parameters = {
                **config.rope_parameters,
                "factor": 1.0,
                "original_max_position_embeddings": config.max_position_embeddings,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            }
        make(self, config, *args, **kwargs)

    OAIAttention.__init__ = __init__
