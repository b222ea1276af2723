"""FLOPs of training and inference, summed over the blocks of `block_costs.py`.

Conventions, the same everywhere:
- one multiply-add (MAC) is 2 FLOPs; backward costs twice the forward, so training is 6 FLOPs per forward MAC;
- every weight that a token is multiplied with counts, the LM head included; the embedding lookup, norms, softmax, RoPE,
  activation functions, biases, convolutions, routers and the optimizer do not;
- frozen weights (LoRA) have no weight gradients, so they are 4 FLOPs per forward MAC; adapters and attention are 6;
- `full` counts every (query, key) pair of attention, `causal` half of them; with a sliding window those inside it.

    train_flops_per_sequence(model, seqlen=8192, convention="causal")
    run_flops_per_sequence(config)                                          # of a training run, with LoRA or without
"""

from typing import Literal

from llmb.config.model import Model
from llmb.config.native.lora_shapes import adapter_params
from llmb.config.offload_plan import Lora
from llmb.config.spec import Inference, OutOfCore, RunConfig
from llmb.errors import ConfigError, UnknownName
from llmb.perfmodel.block_costs import BlockCost, block_stack
from llmb.perfmodel.params import check_tokens

Convention = Literal["causal", "full"]


def forward_macs(model: Model, seqlen: int, convention: Convention) -> dict[str, float]:
    """Return the MACs of the forward pass of one sequence, by component."""
    macs: dict[str, float] = {
        kind: count * seqlen * (block.token_macs + block.scan_macs)
        + _block_pairs(model, kind, count, seqlen, convention, block) * block.pair_macs
        + count * attention_pairs(seqlen, convention) * block.index_macs
        for kind, count, block in block_stack(model)
    }
    return macs | {"lm_head": seqlen * model.hidden * model.vocab}


def flops_breakdown(model: Model, seqlen: int, convention: Convention) -> dict[str, float]:
    """Return the training FLOPs of one sequence by component: 6 per MAC. They sum to `train_flops_per_sequence`."""
    return {component: 6.0 * macs for component, macs in forward_macs(model, seqlen, convention).items()}


def train_flops_per_sequence(model: Model, seqlen: int, convention: Convention) -> float:
    """Return the model FLOPs of forward and backward of one sequence, without recomputation.

    Published constants in GFLOP/token at 8,192 tokens, `causal`, and ours: Llama 3.1 405b 2524 (2523.96), 70b 449
    (449.22), 8b 51.5 (51.47). They differ by the rounding of the printed figure only. DeepSeek-V3 at 4,096 tokens
    without its prediction layer: 249.7 (249.81), the remaining 0.04 % unexplained; with the router it would be 250.45.
    """
    return sum(flops_breakdown(model, seqlen, convention).values())


def run_flops_per_sequence(config: RunConfig) -> float:
    """Return the model FLOPs of forward and backward of one sequence of a training run."""
    work = config.workload
    assert not isinstance(work, Inference)
    lora = work.plan.lora if isinstance(work, OutOfCore) and work.plan is not None else None
    trained = train_flops_per_sequence(config.model, work.seqlen, config.flops_convention)
    return trained if lora is None else trained - frozen_flops_per_sequence(config.model, lora, work.seqlen)


def frozen_flops_per_sequence(model: Model, lora: Lora, seqlen: int) -> float:
    """Return the FLOPs by which LoRA needs less than training all weights: no weight gradients, but adapters."""
    macs = sum(count * block.token_macs for _, count, block in block_stack(model)) + model.hidden * model.vocab
    return seqlen * (2.0 * macs - 6.0 * adapter_params(model, lora))


def hardware_flops_per_sequence(model: Model, seqlen: int, convention: Convention, recompute_layers: int) -> float:
    """Return the FLOPs that the device executes for one sequence, for HFU: model FLOPs and recomputation.

    Recomputed: the forward of `recompute_layers` layers (of the whole model, each taken as the average layer), and
    q x k of every attention block, which a fused attention backward recomputes instead of storing the scores.
    """
    if not 0 <= recompute_layers <= model.layers:
        raise ConfigError(f"recompute_layers must be 0 to {model.layers} for {model.name}, got {recompute_layers}")
    macs = forward_macs(model, seqlen, convention)
    layers = sum(macs.values()) - macs["lm_head"]
    scores = sum(
        _block_pairs(model, kind, count, seqlen, convention, block) * block.recomputed_pair_macs
        for kind, count, block in block_stack(model)
    )
    return 6.0 * sum(macs.values()) + 2.0 * (layers * recompute_layers / model.layers + scores)


def _block_pairs(model: Model, kind: str, count: int, seqlen: int, convention: Convention, block: BlockCost) -> float:
    """Return the (query, key) pairs of all blocks of a kind in one sequence."""
    if block.selected_keys:
        return count * attention_pairs(seqlen, convention, block.selected_keys)
    windowed = model.window_layers if kind == "attention" else 0
    pairs = (count - windowed) * attention_pairs(seqlen, convention)
    return pairs + windowed * attention_pairs(seqlen, convention, model.window)


def attention_pairs(seqlen: int, convention: Convention, window: int | None = None) -> float:
    """Return the number of (query, key) pairs counted in one sequence."""
    check_tokens("seqlen", seqlen)
    if convention not in ("causal", "full"):
        raise UnknownName("FLOPs convention", convention, ("causal", "full"))
    keys = seqlen if window is None else min(window, seqlen)
    return seqlen * keys if convention == "full" else seqlen * keys - keys * keys / 2


def prefill_flops(model: Model, isl: int, convention: Convention) -> float:
    """Return the FLOPs of the prefill of `isl` tokens; the LM head runs on the last token only."""
    macs = forward_macs(model, isl, convention)
    return 2.0 * (sum(macs.values()) - macs["lm_head"] + model.hidden * model.vocab)


def decode_flops(model: Model, context: int) -> float:
    """Return the FLOPs of one generated token that attends to `context` tokens, itself included."""
    check_tokens("context", context)
    macs = model.hidden * model.vocab
    for kind, count, block in block_stack(model):
        windowed = model.window_layers if kind == "attention" else 0
        keys = (count - windowed) * context + windowed * min(context, model.window or context)
        if block.selected_keys:
            keys = count * min(context, block.selected_keys)
        macs += (
            count * (block.token_macs + block.step_macs + context * block.index_macs) + keys * block.decode_pair_macs
        )
    return 2.0 * macs
