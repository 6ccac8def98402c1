"""Prepares `bench.weights` for a machine without vLLM: copies the few files of vLLM that send and
receive weights, and writes stubs for the modules that they import.

    python -m bench.vllm_files build/vllm_files [--python 3.12]
"""

import argparse
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

FILES = (
    "distributed/utils.py",
    "distributed/device_communicators/pynccl.py",
    "distributed/device_communicators/pynccl_wrapper.py",
    "distributed/weight_transfer/base.py",
    "distributed/weight_transfer/factory.py",
    "distributed/weight_transfer/nccl_common.py",
    "distributed/weight_transfer/nccl_engine.py",
    "distributed/weight_transfer/packed_tensor.py",
    "utils/nccl.py",
)
LOGGER = """
import logging
class Logger(logging.Logger):
    info_once = logging.Logger.info
    warning_once = logging.Logger.warning
    debug_once = logging.Logger.debug
def init_logger(name):
    return Logger(name)
"""
# vLLM requires NCCL 2.29.7 on CUDA because of two functions that are not used here, and otherwise
# silently sends nothing. It does without them only on ROCm.
PLATFORMS = """
import torch
class current_platform:
    is_rocm = staticmethod(lambda: True)
    is_xpu = is_cuda = staticmethod(lambda: False)
    is_cuda_alike = staticmethod(lambda: True)
    fp8_dtype = staticmethod(lambda: torch.float8_e4m3fn)
"""
RELOAD = """
def initialize_layerwise_reload(model): ...
def finalize_layerwise_reload(model, config): ...
"""
MTP = """
from contextlib import nullcontext as disable_mtp_completeness_check
"""
TORCH = """
import torch
def current_stream():
    return torch.cuda.current_stream()
"""
STUBS = {
    "__init__.py": "",
    "envs.py": "def __getattr__(name): return None\n",
    "logger.py": LOGGER,
    "platforms.py": PLATFORMS,
    "config/__init__.py": "",
    "config/parallel.py": "class ParallelConfig: ...\n",
    "config/weight_transfer.py": "class WeightTransferConfig: ...\n",
    "distributed/__init__.py": "",
    "distributed/device_communicators/__init__.py": "",
    "distributed/weight_transfer/__init__.py": "",
    "model_executor/__init__.py": "",
    "model_executor/layers/__init__.py": "",
    "model_executor/layers/vocab_parallel_embedding.py": "class ParallelLMHead: ...\n",
    "model_executor/model_loader/__init__.py": "",
    "model_executor/model_loader/mtp_validation.py": MTP,
    "model_executor/model_loader/reload.py": RELOAD,
    "utils/__init__.py": "",
    "utils/network_utils.py": "def get_tcp_uri(ip, port): return f'tcp://{ip}:{port}'\n",
    "utils/system_utils.py": "from contextlib import nullcontext as suppress_stdout\n",
    "utils/torch_utils.py": TORCH,
}
PACKAGES = ("pydantic", "msgspec", "pybase64")


def copy_files(folder: Path, python: str) -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None, "vLLM is not installed here"
    for name, text in STUBS.items():
        _with_folder(folder / "vllm" / name).write_text(text)
    for name in FILES:
        shutil.copyfile(Path(spec.origin).parent / name, _with_folder(folder / "vllm" / name))
    install = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", str(folder)]
    subprocess.run([*install, "--python-version", python, *PACKAGES], check=True)


def _with_folder(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="Python version of that machine")
    options = parser.parse_args()
    copy_files(options.folder, options.python)


if __name__ == "__main__":
    main()
