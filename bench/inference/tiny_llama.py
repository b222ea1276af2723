"""A tiny Llama in Hugging Face's layout, which llmb, vLLM and every client's tokenizer load.

    folder = write_tiny_llama(Path("/tmp/tiny-llama"), SMALL)

Random weights; data/tokenizer.json with a chat template. Only tokens that are one printable character, and that no
merge joins, can be the most probable: so a greedy output has as many tokens as its text, by any count, and every token
is a chunk of its own.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from llmb.config.model import Model
from llmb.config.spec import Inference, Machine, Parallel, Precision, RunConfig

DATA = Path(__file__).parents[2] / "data"
EOS = "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
VOCAB = 4096
SEED = 5


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    context: int


SMALL = Shape(
    layers=2, hidden=64, ffn=96, heads=2, kv_heads=1, context=512
)  # of tests; vLLM on a CPU needs heads of 32
MEDIUM = Shape(layers=4, hidden=256, ffn=768, heads=8, kv_heads=4, context=512)  # of measurements on a CPU


def write_tiny_llama(folder: Path, shape: Shape) -> Path:
    """Write weights, configuration and tokenizer."""
    import torch

    from llmb.models.architectures import build_model
    from llmb.models.hf_weights import save_weights

    torch.manual_seed(SEED)
    network = build_model(model_of(folder.name, shape))
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.normal_(0.0, 1.2 / shape.hidden**0.5).add_("norm" in name)
        is_output = torch.zeros(VOCAB, dtype=torch.bool)
        is_output[single_characters()] = True
        network.head_weight()[~is_output] = 0.0
    save_weights(network, folder, torch.float32)
    write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": shape.context, "bos_token_id": None, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


def model_of(name: str, shape: Shape) -> Model:
    """Return the model's configuration."""
    return Model(
        name=name, architecture="llama", layers=shape.layers, hidden=shape.hidden, ffn=shape.ffn, heads=shape.heads,
        kv_heads=shape.kv_heads, head_dim=shape.hidden // shape.heads, vocab=VOCAB,
    )  # fmt: skip


def server_config(folder: Path, shape: Shape, max_batch_size: int = 16, prefix_cache: bool = False) -> RunConfig:
    """Return the configuration with which `python -m llmb.serve.http` serves the folder on a CPU, in fp32."""
    return RunConfig(
        name=f"serve_{folder.name}",
        target="bench",
        size="tiny",
        machine=Machine(gpu="cpu", gpus=1, gpus_per_node=1),
        model=model_of(folder.name, shape),
        parallel=Parallel(),
        precision=Precision(dtype="fp32"),
        workload=Inference(
            mode="max_throughput",
            use_case="bench",
            isl=shape.context // 2,
            osl=shape.context // 2,
            max_batch_size=max_batch_size,
            concurrency=max_batch_size,
            max_num_tokens=1024,
            kv_fraction=0.01,
            num_requests=1,
            prefix_cache=prefix_cache,
            weights=str(folder),
        ),
    )


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer of data/ as transformers reads it."""
    (folder / "tokenizer.json").write_bytes((DATA / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def single_characters() -> list[int]:
    """Return tokens of one printable ASCII character of which no two are ever joined to one token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DATA / "tokenizer.json"))
    chosen: list[str] = []
    for character in map(chr, range(33, 127)):
        others = [*chosen, character]
        texts = [a + b for other in others for a, b in ((other, character), (character, other))]
        if all(len(tokenizer.encode(text).ids) == 2 for text in texts):
            chosen.append(character)
    return [tokenizer.token_to_id(character) for character in chosen]
