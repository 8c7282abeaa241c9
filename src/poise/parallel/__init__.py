"""One model on many ranks: sharded parameters, sequences and experts over PyTorch's own collectives."""

from poise.parallel.experts import ShardedExperts
from poise.parallel.fsdp import (
    clip_gradient,
    empty_linear,
    empty_model,
    frozen_copy,
    full_tensor,
    full_tensors,
    gradient_norm,
    held_part,
    local_part,
    put_away,
    split_copy,
)
from poise.parallel.loading import draw_all, export_model, fill_part, init_parts, load_parts, peak_host_bytes
from poise.parallel.mesh import ALONE, Mesh, degrees_of, make_mesh
from poise.parallel.together import led, settled, together
from poise.parallel.ulysses import padded_borders, rows_of_rank, ulysses, whole_rows

__all__ = [
    "ALONE",
    "Mesh",
    "ShardedExperts",
    "clip_gradient",
    "degrees_of",
    "draw_all",
    "empty_linear",
    "empty_model",
    "export_model",
    "fill_part",
    "frozen_copy",
    "full_tensor",
    "full_tensors",
    "gradient_norm",
    "held_part",
    "init_parts",
    "led",
    "load_parts",
    "local_part",
    "make_mesh",
    "padded_borders",
    "peak_host_bytes",
    "put_away",
    "rows_of_rank",
    "settled",
    "split_copy",
    "together",
    "ulysses",
    "whole_rows",
]
