"""What poise adds to vLLM: weight updates of GPT-OSS that arrive whole.

vLLM 0.30 and 0.32 answer 200 to ``reload_weights`` of a GPT-OSS model and keep its old experts and attention sinks,
because the loader of GPT-OSS copies both past the loaders that a layer-wise reload watches; on CPUs the expert matrices
are also not packed again. The server then samples from a mixture of two policies.

- ``poise_vllm.extension.WorkerExtension`` for ``--worker-extension-cls``: updates from a checkpoint folder.
- weight transfer engine ``poise`` for ``--weight-transfer-config '{"backend": "poise"}'``: updates over a process
  group, gloo between CPUs and NCCL between GPUs.
- answers of ``/inference/v1/generate`` name the weights that sampled each token.
- models with plain rotary embedding are served too.
- attention on CPUs takes sinks that are not bfloat16: without this a float32 model stops vLLM 0.30.
"""

__version__ = "0.1.0"

EXTENSION = "poise_vllm.extension.WorkerExtension"
TRANSFER_ENGINE = "poise"


def register() -> None:
    """Called by vLLM in each of its processes, before the model is made. May be called more than once."""
    from vllm.platforms import current_platform

    from poise_vllm.rope import serve_plain_rotation
    from poise_vllm.sinks import attend_with_exact_sinks
    from poise_vllm.versions import report_weight_versions

    if current_platform.is_cpu():
        attend_with_exact_sinks()
    report_weight_versions()
    serve_plain_rotation()
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a vLLM without weight transfer: the folder route is there all the same
        return
    if TRANSFER_ENGINE not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_ENGINE, "poise_vllm.transfer", "TransferEngine")
