"""Published layouts of which `one_rank_gpu.py` runs one rank on one GPU."""

import sys
from dataclasses import dataclass

LLAMA, NEMOTRON, GROK = "pretrain_llama3.1", "pretrain_nemotronh", "pretrain_grok1"
STEPS = ("--set", "steps=2", "--set", "window=2-2")  # a step has 24 to 128 micro-batches; the first warms up
NVIDIA = "NVIDIA dgxc-benchmarking"


@dataclass(frozen=True, kw_only=True)
class OneRankRow:
    """One rank of a published layout on H100s."""

    title: str
    workload: str
    size: str
    scale: int
    published_s: float
    source: str
    dtype: str = "fp8"
    settings: tuple[str, ...] = ()
    tiny_scale: int = 8

    def command(self, tiny: bool) -> list[str]:
        """Return the command line of the run."""
        select = ["-w", self.workload, "-s", self.size, "--dtype", self.dtype]
        settings = [option for setting in self.settings for option in ("--set", setting)]
        where = ["--scale", str(self.scale), "--gpu-type", "h100", *settings]
        if tiny:  # the layout scaled down; of a row with its own layout fsdp; graphs need a GPU
            fsdp = ["--set", "fsdp=true", "--set", "tp=1", "--set", "pp=1", "--set", "vp=none"]
            layout = fsdp if self.settings == FSDP else ()
            where = ["--scale", str(self.tiny_scale), "--gpu-type", "h100", "--proxy", *layout]
        return [sys.executable, "-m", "llmb.cli.llmb_run", "submit", *select, *where, *STEPS, "--one-rank"]


GRAPHS = ("cuda_graphs=true",)  # its many narrow kernels are launched one by one otherwise: 15 s instead of 13
FSDP = ("fsdp=true", "tp=1", "pp=1", "vp=none", "mbs=2", "gbs=256", "recompute_layers=60")  # 53 is the least that fits
ROWS = (
    OneRankRow(title="Nemotron-H 56b fp8 tp8", workload=NEMOTRON, size="56b", scale=32, settings=GRAPHS,
        published_s=15.119, source=f"{NVIDIA} nemotronh v25.05"),
    OneRankRow(title="Llama 70b fp8 tp4 pp8", workload=LLAMA, size="70b", scale=64, tiny_scale=16,
        published_s=9.86, source=f"{NVIDIA} llama3.1 v25.04"),
    OneRankRow(title="Llama 70b fp8 fsdp", workload=LLAMA, size="70b", scale=128, settings=FSDP,
        published_s=9.074, source=f"{NVIDIA} maxtext v25.02, another engine"),
    OneRankRow(title="Llama 405b fp8 tp8 pp8 cp2", workload=LLAMA, size="405b", scale=1024, tiny_scale=16,
        published_s=12.42, source=f"{NVIDIA} llama3.1 v25.04"),
    OneRankRow(title="Grok-1 fp8 tp4 pp8 cp2 ep8", workload=GROK, size="314b", scale=512, tiny_scale=16,
        published_s=13.433, source=f"{NVIDIA} grok1 v25.05.02"),
    OneRankRow(title="Grok-1 bf16 tp4 pp8 cp2 ep8", workload=GROK, size="314b", scale=512, dtype="bf16", tiny_scale=16,
        published_s=15.933, source=f"{NVIDIA} grok1 v25.05.02"),
)  # fmt: skip
