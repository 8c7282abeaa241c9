"""The policy network and its checkpoints."""

from poise.model.config import GptOssConfig
from poise.model.gpt_oss import GptOss, packed_attend, top_k_route

__all__ = ["GptOss", "GptOssConfig", "packed_attend", "top_k_route"]
