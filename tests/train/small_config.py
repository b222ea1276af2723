"""Small training configuration."""

from small_models import llama_model

from llmb.config.spec import Machine, Parallel, Precision, RunConfig, Training

CONFIG = RunConfig(
    name="small",
    target="pretrain_small",
    size="tiny",
    machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1),
    model=llama_model(name="tiny", ffn=64, vocab=128),
    parallel=Parallel(),
    precision=Precision(dtype="fp32"),
    workload=Training(seqlen=32, mbs=4, gbs=4, ga=1, steps=4, window=(3, 4), lr=1e-2),
)
