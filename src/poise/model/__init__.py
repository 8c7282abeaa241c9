"""The policy network and its checkpoints."""

from poise.model.checkpoint import CheckpointError, load_model, read_config, read_parts, save_model
from poise.model.config import GptOssConfig
from poise.model.gpt_oss import GptOss, initial_weights, packed_attend, top_k_route
from poise.model.packed import packed_copy, require_packable
from poise.model.rope import RopeConfig

__all__ = [
    "CheckpointError",
    "GptOss",
    "GptOssConfig",
    "RopeConfig",
    "initial_weights",
    "load_model",
    "packed_attend",
    "packed_copy",
    "read_config",
    "read_parts",
    "require_packable",
    "save_model",
    "top_k_route",
]
