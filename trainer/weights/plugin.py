"""What vLLM loads of us in each of its processes: it makes our weight transfer known by name.

--weight-transfer-config '{"backend": "gloo"}'           on CPUs
--weight-transfer-config '{"backend": "steplog_nccl"}'   on GPUs; vLLM's own "nccl" works as well,
                                                         but hangs when another engine dies
"""

from contextlib import suppress

ENGINES = {"gloo": "GlooEngine", "steplog_nccl": "NcclEngine"}


def register() -> None:
    """Called by vLLM before it has a model; what we import here it has to wait for."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, kind in ENGINES.items():
        with suppress(ValueError):  # it is known already: vLLM may load plugins more than once
            WeightTransferEngineFactory.register_engine(name, "trainer.weights.worker", kind)
