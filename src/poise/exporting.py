"""``poise export``: a checkpoint of any mesh as a Hugging Face folder."""

from pathlib import Path
from typing import cast, get_args

import torch

from poise.assembly import stored_policy
from poise.config import ConfigError, ParallelConfig
from poise.console import Console
from poise.model import read_config
from poise.model.checkpoint import Format
from poise.parallel import export_model
from poise.parallel.launch import joined


def export_job(checkpoint: Path, folder: Path, format: str, console: Console) -> None:
    """Under torchrun the weights are spread over the processes while they are read; the first one writes.

    Raises ConfigError for a checkpoint that cannot be read, a folder that exists, or sizes that the format cannot hold.
    """
    if format not in get_args(Format):
        raise ConfigError(f"--format must be {', '.join(get_args(Format))}, got {format}")
    cpu = torch.device("cpu")
    with joined(ParallelConfig(), cpu, torch.float32) as mesh:
        try:
            model = stored_policy(checkpoint, read_config(checkpoint), cpu, torch.float32, mesh)
            export_model(model, folder, mesh, cast(Format, format), tokenizer=checkpoint)
        except (ValueError, FileExistsError) as error:
            raise ConfigError(str(error)) from error
        if mesh.is_first:
            console.line(f"{checkpoint} as {format}: {folder}")
