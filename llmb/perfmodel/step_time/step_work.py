"""Work of one rank in a training step: FLOPs, bytes and messages, before any efficiency.

    rank_work(setup, device("h100")).gemms      -> flops and bytes of every GEMM of a micro-batch

Amounts are those of one micro-batch on the average pipeline rank, unless a name says step.
"""

from dataclasses import dataclass

from llmb.config.model import BLOCKS_BY_LETTER, Model
from llmb.perfmodel.block_costs import BLOCK_COSTS, DELTA_CHUNK
from llmb.perfmodel.params import BYTES
from llmb.perfmodel.shapes.model_catalog import ModelShape
from llmb.perfmodel.step_time.cluster_fabric import Device
from llmb.perfmodel.step_time.gemm_shapes import (
    FILL_K,
    FILL_K_OF,
    Gemm,
    block_gemms,
    head_gemms,
    padded_flops,
)
from llmb.perfmodel.step_time.step_setup import StepSetup

BF16 = 2.0
BACKWARD_ATTENTION = 2.5  # of the forward FLOPs: five products instead of two
# Launched forward and backward, bf16.
KERNELS = {"attention": 25, "mla": 45, "mlp": 15, "experts": 60, "mamba": 40, "delta_net": 50}
SCANS = ("mamba", "delta_net")  # blocks with a recurrence, in Triton kernels
BACKWARD_SCAN = 3.0  # of the forward traffic: states computed again, gradients of states and of all inputs
STATE_PASSES = 4  # chunk states: written, read and written when passed on, read
CAPTURED = {
    "attn": ("attention", "mla", "delta_net"),
    "mamba": ("mamba",),
}  # parts of CUDA graphs that are whole blocks
CAPTURED_ROUTING = 0.2  # of an expert block's launches: those of router and of preprocessing, each
QUANTIZED_KERNELS = 1.5  # times as many in fp8 and fp4
# Bytes per value to quantize a GEMM operand in both layouts: read in bf16, amax, write; nvfp4: Hadamard transform too.
QUANTIZE_BYTES = {"bf16": 0.0, "fp8": 6.0, "fp8-row": 6.0, "fp8-block": 4.1, "fp8-mx": 4.2, "nvfp4": 7.0}
TRANSPOSE_BYTES = 2.0  # of these, to transpose what was gathered
OPERAND_BYTES = {
    "bf16": BYTES["bf16"], "fp8": BYTES["fp8"], "fp8-row": BYTES["fp8"], "fp8-block": 1.01, "fp8-mx": 1.03,
    "nvfp4": BYTES["nvfp4"],
}  # fmt: skip
# Values read and written per output value of experts to add their bias, expert by expert: bias times probability, sum,
# concatenation; in backward gradients of output, bias and probability.
BIAS_FORWARD, BIAS_BACKWARD = 6.0, 9.0
FUSED_ACTIVATION = 0.2  # of the traffic of an activation that a fused epilogue leaves: quantized values written
# Ring attention of cp merges one result per step: of every query where the keys are earlier, of half of them otherwise.
RING_QUERIES = 0.75
# Forward: result read, fp32 sum read and written. Backward: gradient of the queries written, read and added in bf16.
RING_MERGE = {False: 5.0, True: 4.0}
# The softmax of a pair takes as long as this many MACs of its head; of cuDNN on an H200, which the native engine calls:
# the library times of Llama 1B, with heads of 64, against those of 8B, with heads of 128 (bench/RESULTS.md).
SOFTMAX_DIM, SOFTMAX_DIM_OF = 64.0, {"native": 34.0}
SELECTIVE = 0.35  # of a layer's forward that selective recompute repeats: attention, norms and every second GEMM
UPDATE_BYTES = (
    34.0  # of Adam per parameter: fp32 weight and moments read and written, gradient read twice, bf16 written
)


@dataclass(frozen=True)
class GemmPass:
    """All executions of one pass of a GEMM in a micro-batch."""

    flops: float  # with wave quantization and pipeline fill
    bytes: float
    low: bool
    grouped: bool = False  # GEMMs of several experts in one kernel


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """Forward or backward of all blocks of a rank for one micro-batch."""

    gemms: tuple[GemmPass, ...] = ()
    attention_flops: float = 0.0
    scan_bytes: float = 0.0
    scan_s: float = 0.0  # seconds of kernels that walk through a sequence, however few channels it has
    memory_bytes: float = 0.0
    quantize_bytes: float = 0.0
    group_quantize_bytes: float = 0.0  # of these, of rows of routed experts


@dataclass(frozen=True, kw_only=True)
class RankWork:
    """Work of the average pipeline rank."""

    forward: BlockWork
    backward: BlockWork
    head: BlockWork  # LM head and loss, forward and backward, of the last rank
    kernels: float  # of a micro-batch, with an idle GPU from one to the next
    launches: float  # of these, by the host
    scan_layers: float  # blocks with a recurrence outside CUDA graphs
    captured_blocks: float  # blocks that are a CUDA graph of their own
    sharded_blocks: float  # blocks whose weights FSDP gathers, outside CUDA graphs
    module_gemms: dict[str, float]  # forward, of modules if some are recomputed by name, as fractions of all GEMMs
    expert_layers: float
    local_experts: float
    step_bytes: float  # memory traffic of the optimizer in a step
    dense_weights: float  # of the rank, whole
    routed_weights: float
    end_weights: float  # of the dense ones: embedding and LM head
    sharded_weights: float  # that the rank's optimizer updates


def rank_work(setup: StepSetup, device: Device) -> RankWork:
    """Return the work of the average pipeline rank."""
    model, split = setup.shape.model, setup.parallel
    counts = block_counts(setup)
    dense = routed = 0.0
    for kind, count in block_counts(setup, min(1, setup.shape.mtp_depth)).items():
        block = BLOCK_COSTS[kind](model)
        dense += count * block.dense_weights / split.tp
        routed += count * block.routed_weights / (split.ep * split.etp)
    ends = model.vocab * model.hidden / split.tp * (1 if model.tied_embeddings else 2) / split.pp
    sharded = (dense + ends) / (setup.dp * split.cp) + routed / max(1, _expert_replicas(setup))
    trained = 0.0 if setup.task == "lora" else 1.0
    factor = 1.0 if setup.dtype == "bf16" else QUANTIZED_KERNELS
    kernels = factor * sum(count * KERNELS[kind] * launched(setup, kind) for kind, count in counts.items())
    return RankWork(
        forward=_blocks(setup, device, counts, backward=False),
        backward=_blocks(setup, device, counts, backward=True),
        head=_head(setup, device),
        kernels=kernels,
        launches=kernels,
        scan_layers=sum(counts.get(kind, 0.0) * launched(setup, kind) for kind in SCANS),
        captured_blocks=sum(count for kind, count in counts.items() if is_captured(setup, kind)),
        sharded_blocks=sum(counts.values()) * (1.0 - setup.graphs) if split.fsdp else 0.0,
        module_gemms=_module_gemms(setup, counts) if setup.recompute_modules else {},
        expert_layers=counts.get("experts", 0.0),
        local_experts=model.experts.count / split.ep if model.experts else 0.0,
        step_bytes=trained * (UPDATE_BYTES * sharded + gradient_bytes(setup) * (dense + routed + ends)),
        dense_weights=dense + ends,
        routed_weights=routed,
        end_weights=ends,
        sharded_weights=trained * sharded,
    )


def block_counts(setup: StepSetup, mtp_depth: int | None = None) -> dict[str, float]:
    """Return the blocks of each kind of the average rank, with `mtp_depth` passes of multi-token prediction."""
    shape, pp = setup.shape, setup.parallel.pp
    scale = setup.layer_count / shape.model.layers / pp
    counts = {kind: count * scale for kind, count in shape.model.blocks.items() if count}
    for kind in shape.mtp_blocks:
        counts[kind] = counts.get(kind, 0.0) + (shape.mtp_depth if mtp_depth is None else mtp_depth) / pp
    return counts


def stage_layers(setup: StepSetup) -> tuple[float, float]:
    """Return the layers of the fullest and of the last pipeline rank, in average layers of the model.

    Ranks hold equally many layers, the last one what is left. Layers of hybrids differ: they count by their MACs.
    """
    model, pp = setup.shape.model, setup.parallel.pp
    layers = setup.layer_count + setup.shape.mtp_layers
    most = -(-layers // pp)
    if not model.pattern:
        return most, max(0, layers - most * (pp - 1))
    kinds = [BLOCKS_BY_LETTER[letter] for letter in model.pattern[: setup.layer_count]]
    kinds += setup.shape.mtp_blocks * setup.shape.mtp_depth
    macs = {kind: BLOCK_COSTS[kind](model).token_macs for kind in set(kinds)}
    average = sum(macs[kind] for kind in kinds) / layers
    loads = [sum(macs[kind] for kind in kinds[rank * most : (rank + 1) * most]) / average for rank in range(pp)]
    return max(loads), loads[-1]


def launched(setup: StepSetup, kind: str) -> float:
    """Return the fraction of a block's kernels that the host launches one by one."""
    if not setup.graph_parts:
        return 1.0 - setup.graphs
    if kind == "experts":
        return 1.0 - CAPTURED_ROUTING * sum(part.startswith("moe_") for part in setup.graph_parts)
    return 0.0 if is_captured(setup, kind) else 1.0


def is_captured(setup: StepSetup, kind: str) -> bool:
    """Return whether every block of a kind is a CUDA graph of its own, which the host replays."""
    return any(kind in CAPTURED.get(part, ()) for part in setup.graph_parts)


def _module_gemms(setup: StepSetup, counts: dict[str, float]) -> dict[str, float]:
    """Return the GEMMs of modules: `mlp` is the dense MLP only, `moe` routed and shared experts."""
    macs = {kind: count * sum(gemm.macs for gemm in block_gemms(setup, kind)) for kind, count in counts.items()}
    blocks = {"mlp": "mlp", "moe": "experts"}
    return {name: macs.get(kind, 0.0) / sum(macs.values()) for name, kind in blocks.items()}


def _expert_replicas(setup: StepSetup) -> float:
    split = setup.parallel
    return setup.dp * split.cp * split.tp / (split.ep * split.etp)


def _blocks(setup: StepSetup, device: Device, counts: dict[str, float], backward: bool) -> BlockWork:
    gemms: list[GemmPass] = []
    memory = quantize = group_quantize = 0.0
    for kind, count in counts.items():
        for gemm in block_gemms(setup, kind):
            gemms += _passes(setup, device, gemm, count, backward)
            quantize += count * _quantized(setup, gemm, backward)
            group_quantize += count * _quantized(setup, gemm, backward) * gemm.routed
        memory += count * _memory_bytes(setup, kind, backward)
    return BlockWork(
        gemms=tuple(gemms),
        attention_flops=_attention_flops(setup, device, counts) * (BACKWARD_ATTENTION if backward else 1.0),
        scan_bytes=_scan_bytes(setup, counts) * (BACKWARD_SCAN if backward else 1.0),
        memory_bytes=memory,
        quantize_bytes=quantize,
        group_quantize_bytes=group_quantize,
    )


def _passes(setup: StepSetup, device: Device, gemm: Gemm, layers: float, backward: bool) -> list[GemmPass]:
    operand = OPERAND_BYTES[setup.dtype if gemm.low else "bf16"]
    x, w, y = gemm.m * gemm.k * gemm.count, gemm.weights, gemm.m * gemm.n * gemm.count
    sms, fill_k = device.fabric.sms, FILL_K_OF.get(setup.engine, FILL_K)
    # Other engines multiply a single expert as a dense layer.
    grouped = gemm.routed if setup.engine == "native" else gemm.count > 1

    def gemm_pass(m: float, n: float, k: float, traffic: float, chunks: int = 1) -> GemmPass:
        ragged = gemm.count > 1 and m == gemm.m
        flops = layers * padded_flops(m, n, k, gemm.count, sms, ragged, fill_k, chunks)
        return GemmPass(flops, layers * traffic, gemm.low, grouped)

    chunks = _tp_chunks(setup, gemm, backward)
    if not backward:
        return [gemm_pass(gemm.m, gemm.n, gemm.k, operand * (x + w) + BF16 * y, chunks)]
    passes = [gemm_pass(gemm.m, gemm.k, gemm.n, operand * (y + w) + BF16 * x, chunks)]
    if setup.task != "lora":
        passes.append(gemm_pass(gemm.n, gemm.k, gemm.m, operand * (x + y) + 2 * gradient_bytes(setup) * w))
    return passes


def _tp_chunks(setup: StepSetup, gemm: Gemm, backward: bool) -> int:
    """Return the chunks in which Megatron computes a GEMM or its input gradient, to overlap a TP collective with it.

    The collectives of an input gradient split by columns overlap whole with that GEMM and the one of the weight.
    """
    whole = not gemm.tp_split or (backward and gemm.tp_split == "columns")
    is_chunked = setup.overlap_tp and setup.engine.startswith("megatron") and not whole
    return setup.parallel.tp if is_chunked else 1


def _quantized(setup: StepSetup, gemm: Gemm, backward: bool) -> float:
    """Bytes to quantize the input of a GEMM, or in backward the gradient of its output."""
    values = gemm.m * (gemm.n if backward else gemm.k) * gemm.count
    fused = setup.fused_experts and gemm.count > 1  # by the epilogue of the GEMM before
    if not gemm.low or fused or setup.dtype == "bf16":
        return 0.0
    if gemm.tp_split == ("rows" if backward else "columns") and gathers_quantized(setup):
        shard = (QUANTIZE_BYTES[setup.dtype] - TRANSPOSE_BYTES) / setup.parallel.tp
        return (shard + TRANSPOSE_BYTES) * values
    return QUANTIZE_BYTES[setup.dtype] * values


def gradient_bytes(setup: StepSetup) -> float:
    """Return the bytes of a gradient in its buffer, where it is zeroed and accumulated, and in its reduction.

    NVIDIA's performance recipes have bf16 in every generation of Megatron: grad_sync_dtype=bf16 in NeMo 24.09 (Grok-1,
    GPT-3), grad_reduce_in_fp32=False in NeMo 24.12 to 25.07 and in Megatron Bridge. Nemotron-4 15b had fp32 in 24.09.
    """
    return BF16 if setup.engine.startswith("megatron") else BYTES["fp32"]


def gathers_quantized(setup: StepSetup) -> bool:
    """Return whether ranks of tp quantize their shard before they gather it (Transformer Engine), not all of it."""
    return setup.engine.startswith("megatron")


def _attention_flops(setup: StepSetup, on: Device, counts: dict[str, float]) -> float:
    """Forward FLOPs over the causal half of all pairs; windowed layers attend to their window."""
    shape, total = setup.shape, 0.0
    for kind in ("attention", "mla"):
        if count := counts.get(kind, 0.0):
            windowed = shape.window_layers / shape.model.layers
            document = min(setup.seqlen, setup.document_tokens or setup.seqlen)
            mean = document / 2 * (1 - windowed) + _window_keys(shape, document) * windowed
            softmax = softmax_cost(shape.model, on.fabric.family, SOFTMAX_DIM_OF.get(setup.engine, SOFTMAX_DIM))
            macs = BLOCK_COSTS[kind](shape.model).pair_macs * softmax
            total += count * 2.0 * setup.tokens * mean * macs / setup.parallel.tp
    return total


def _window_keys(shape: ModelShape, tokens: int) -> float:
    """Return the keys that a query of a windowed layer attends to, on average; those of the catalog state that mean."""
    if shape.model.window is None:
        return min(shape.window or tokens / 2, tokens / 2)
    window = min(shape.model.window, tokens)  # the first queries have fewer keys before them
    return window * (1 - window / (2 * tokens))


def softmax_cost(model: Model, family: str, softmax_dim: float = SOFTMAX_DIM) -> float:
    """Return the time of attention per MAC against heads of 128: the softmax of a pair costs as much for any head."""
    softmax = softmax_dim / 2 if family == "blackwell-ultra" else softmax_dim  # which exponentiates twice as fast
    mla = model.mla
    head_dim = (mla.nope_dim + mla.rope_dim + mla.value_dim) / 2 if mla else model.head_dim
    return (1 + softmax / head_dim) / (1 + softmax_dim / 128)


def _scan_bytes(setup: StepSetup, counts: dict[str, float]) -> float:
    """Traffic of the chunked recurrences.

    Mamba-2: x, z, B, C and y; chunk states in fp32, written, passed on and read. DeltaNet: its kernels in turn make the
    triangle of a chunk (k read, triangle written, inverted), the corrected keys and values, the states (written once in
    bf16) and the output.
    """
    model, values = setup.shape.model, 0.0
    if (m := model.mamba) is not None:
        inner, b_and_c = m.heads * m.head_dim, 2 * m.groups * m.state
        scanned = BF16 * (4 * inner + b_and_c) + STATE_PASSES * BYTES["fp32"] * inner * m.state / m.chunk
        values += counts.get("mamba", 0.0) * scanned
    if (d := model.delta_net) is not None:
        triangle = DELTA_CHUNK * (2 * BYTES["fp32"] + 2 * BF16)
        keys_and_values = BF16 * (7 * d.key_dim + 7 * d.value_dim)
        states = 2 * BF16 * d.key_dim * d.value_dim / DELTA_CHUNK
        values += counts.get("delta_net", 0.0) * d.value_heads * (triangle + keys_and_values + states)
    return setup.tokens / setup.parallel.tp * values


def _memory_bytes(setup: StepSetup, kind: str, backward: bool) -> float:
    """Traffic of the memory-bound kernels of one block: norm, residual add, RoPE, activation, permutation."""
    model, tp = setup.shape.model, setup.parallel.tp
    values = (6.0 if backward else 5.0) * model.hidden  # norm and residual add
    if kind == "attention":
        values += 2.0 * (model.heads + model.kv_heads) * model.head_dim
        values += _activation(True, backward) * model.output_gate * model.heads * model.head_dim
        values += _ring_merges(setup, backward) * model.heads * model.head_dim
    elif kind == "mla":
        assert model.mla is not None
        values += 4.0 * model.heads * (model.mla.nope_dim + model.mla.rope_dim)
        values += 4.0 * (model.mla.q_rank + model.mla.kv_rank) * tp
    elif kind == "mlp":
        values += _activation(model.gated, backward) * model.ffn
    elif kind == "experts":
        assert model.experts is not None
        experts = model.experts
        # Fused experts activate the routed tokens in the epilogue of their GEMMs.
        activated = experts.shared + (FUSED_ACTIVATION if setup.fused_experts else 1.0) * experts.top_k
        values += _activation(model.gated, backward) * experts.ffn * activated
        if setup.shape.expert_bias and not setup.fused_experts:
            values += (BIAS_BACKWARD if backward else BIAS_FORWARD) * model.hidden * experts.top_k
        permutations = 4.0 if setup.dispatcher == "alltoall" else 2.0  # NCCL's needs tokens sorted before and after
        values += 2.0 * permutations * (experts.latent or model.hidden) * experts.top_k
    elif kind == "delta_net":
        assert model.delta_net is not None
        d = model.delta_net
        keys, outputs = d.key_heads * d.key_dim, d.value_heads * d.value_dim
        # Convolution with its activation, norms of queries and keys, gated norm of the output.
        values += (10.0 if backward else 5.0) * 2 * keys + (14.0 if backward else 7.0) * outputs
    else:
        assert model.mamba is not None
        m = model.mamba
        values += (14.0 if backward else 7.0) * (m.heads * m.head_dim + m.groups * m.state)
    return BF16 * setup.tokens / tp * values


def _ring_merges(setup: StepSetup, backward: bool) -> float:
    """Values read and written per value of the attention output, to merge the results of the steps of a ring."""
    return RING_QUERIES * setup.parallel.cp * RING_MERGE[backward] if setup.parallel.cp > 1 else 0.0


def _activation(gated: bool, backward: bool) -> float:
    """Values read and written per value of the intermediate width."""
    if gated:
        return 5.0 if backward else 3.0
    return 3.0 if backward else 2.0


def _head(setup: StepSetup, device: Device) -> BlockWork:
    """LM head and cross-entropy: logits written and read in bf16 and fp32, forward and backward."""
    passes: list[GemmPass] = []
    for gemm in head_gemms(setup):
        passes += _passes(setup, device, gemm, 1.0, False) + _passes(setup, device, gemm, 1.0, True)
    logits = setup.tokens * setup.shape.model.vocab / setup.parallel.tp * (1 + setup.shape.mtp_depth)
    return BlockWork(gemms=tuple(passes), memory_bytes=16.0 * logits)
