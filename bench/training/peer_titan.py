"""torchtitan's Llama 3 as a peer trains it on one GPU: its model, blocks compiled one by one, its loss, torchao's fp8.

Of the version that goes with torch 2.11 (0.2); a later one has other modules, and says so by an ImportError. torchtitan
imports its data loaders, its command line and its logs with the model. None of them is used here, so that whatever they
need in turn is replaced by empty modules: torchtitan and torchao alone must be on PYTHONPATH.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn

UNUSED = ("datasets", "einops", "PIL", "tokenizers", "tomli", "torch.utils.tensorboard", "torchdata", "tyro")
SHAPE = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256,
         "ffn_dim_multiplier": 1.3, "multiple_of": 1024, "rope_theta": 500_000}  # fmt: skip
TINY = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512, "multiple_of": 32}


class _Empty(ModuleType):
    """Has every name: an empty class where it is spelled like one, else another empty module."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Empty(name)


class _Unused(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        unused = any(name == package or name.startswith(f"{package}.") for package in UNUSED)
        return ModuleSpec(name, self, is_package=True) if unused else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Unused())
from torchtitan.components.loss import cross_entropy_loss  # noqa: E402
from torchtitan.config.job_config import Compile  # noqa: E402
from torchtitan.models.llama3.infra.parallelize import apply_compile  # noqa: E402
from torchtitan.models.llama3.model.args import TransformerModelArgs  # noqa: E402
from torchtitan.models.llama3.model.model import Transformer  # noqa: E402


class WithLoss(nn.Module):
    """A model whose result is its mean loss."""

    def __init__(self, network: nn.Module, loss: Any, vocab: int):
        super().__init__()
        self.network, self.loss, self.vocab = network, loss, vocab

    def forward(self, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        return self.loss(self.network(tokens_BT), labels_BT) / labels_BT.numel()


def titan_llama(tiny: bool, seqlen: int, fp8: bool, device: torch.device) -> WithLoss:
    """Llama 8B or a very small one, ready to train; weights in bf16, as its `training.dtype = "bfloat16"` has them."""
    arguments = TransformerModelArgs(**(TINY if tiny else SHAPE), max_seq_len=seqlen)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        network = Transformer(arguments)
    if fp8:
        _in_float8(network, emulate=device.type != "cuda")
    if not fp8 or device.type == "cuda":  # torchao's emulation is for eager code
        apply_compile(network, Compile(enable=True))
    network.to_empty(device=device)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        network.init_weights(buffer_device=device)
    return WithLoss(network.train(), torch.compile(cross_entropy_loss), arguments.vocab_size)


def titan_version() -> str:
    return f"torchtitan {version('torchtitan')}"


def _in_float8(network: nn.Module, emulate: bool) -> None:
    """Convert all linear layers of the blocks, with per-tensor scales as torchtitan does; the head stays in bf16."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulate)
    convert_to_float8_training(network, config=config, module_filter_fn=lambda _, name: "output" not in name)
