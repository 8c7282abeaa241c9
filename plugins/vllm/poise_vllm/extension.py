"""Methods that vLLM adds to its workers; ``POST /collective_rpc`` calls them."""

from pathlib import Path
from typing import Any

import torch

from poise_vllm import __version__
from poise_vllm.folder import checkpoint_shapes, checkpoint_tensors
from poise_vllm.update import check_shapes, expected_shapes, update_model


class WorkerExtension:
    """Mixed into vLLM's worker class, whose attributes (``model_runner``, ``vllm_config``, ``device``) it uses."""

    def poise_describe(self) -> dict[str, Any]:
        """What the trainer must know of this worker: versions, device, type. In plain types: vLLM sends no others."""
        import vllm

        return {
            "plugin": __version__,
            "vllm": vllm.__version__,
            "torch": str(torch.__version__),
            "device": str(self.device),
            "quantization": self.vllm_config.model_config.quantization,
            "dtype": str(self.vllm_config.model_config.dtype).removeprefix("torch."),
        }

    def poise_prepare_update(self, shapes: dict[str, list[int]]) -> None:
        """Raises UpdateError where an update of these tensors would be refused: said before a group waits for it.

        Ends an update that a trainer began and left open, as one that was killed does: vLLM begins no other before.
        """
        announced = {name: tuple(shape) for name, shape in shapes.items()}
        check_shapes(announced, expected_shapes(self.vllm_config.model_config.hf_config))
        if self._weight_update_active:
            self.finish_weight_update()

    def poise_load_folder(self, folder: str) -> dict[str, Any]:
        """A whole update from a Hugging Face checkpoint folder that every worker can read."""
        from vllm.config import set_current_vllm_config

        path = Path(folder)
        shapes = checkpoint_shapes(path)
        tensors = ((name, tensor.to(self.device)) for name, tensor in checkpoint_tensors(path))
        with set_current_vllm_config(self.vllm_config):
            update_model(self.model_runner.get_model(), self.vllm_config.model_config, shapes, tensors)
        return {"tensors": len(shapes)}
