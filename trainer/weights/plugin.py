"""The plugin that vLLM loads in each of its processes: it registers our weight transfer engines, and
lets requests use the LoRA adapter that the trainer sends.

--weight-transfer-config '{"backend": "gloo"}'           on CPUs
--weight-transfer-config '{"backend": "steplog_nccl"}'   on GPUs; vLLM's own "nccl" works as well,
                                                         but hangs when another engine dies
"""

from contextlib import suppress

ENGINES = {"gloo": "GlooEngine", "steplog_nccl": "NcclEngine"}


def register() -> None:
    """Called by vLLM at startup, before it loads a model; imports nothing heavy."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, kind in ENGINES.items():
        with suppress(ValueError):  # registered before: vLLM may load plugins more than once
            WeightTransferEngineFactory.register_engine(name, "trainer.weights.worker", kind)
    from trainer.weights.lora import add_adapter_to_requests

    add_adapter_to_requests(ENGINES)
