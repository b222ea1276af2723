"""Buffers that move between host and device in out-of-core training: their kinds, keys and sizes.

    param grad state    of a parameter bucket: a layer, or a shard of the embedding or of the head
    inp                 a chunk's input of a layer, which is the output of the layer before
    kv                  keys and values of a group in a layer
    attn                a chunk's attention in a layer: output, and log-sum-exp of each row
    rest                the other saved activations: queries, residual after the attention, outputs of gate and up
    dstream             a chunk's gradient of the residual
    dkv                 gradients of a group's keys and values, while backward goes through its chunks
    adapters            with LoRA: all adapters, their gradients and their optimizer state; never moved

A buffer is one contiguous range of bytes; the tensors in it begin at multiples of 256, in the order given here. Frozen
weights in fp8 have their matrices first, then the vectors in the dtype of activations, then the scales of the matrices.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import aligned
from llmb.config.native.lora_shapes import adapter_numel
from llmb.config.offload_plan import Lora, Plan
from llmb.perfmodel.offload.layer_params import layer_shapes

KINDS = ("param", "grad", "state", "inp", "kv", "attn", "rest", "dstream", "dkv")
BUCKET_KINDS = ("param", "grad", "state")  # kinds that outlive a round
DISK_KINDS = ("state", "param")  # kinds that may live on disk, in the order in which they leave host memory
STAGING_BUFFERS = 2  # per kind and direction: one for the disk, one for the link
DISK_BLOCK = 4096  # bytes, of which O_DIRECT transfers multiples
STATE_BYTES = {"master": (2, 4, 4), "stochastic": (2, 2), "nearest": (2, 2)}  # low half of the master weight; m, v
GRAD_BYTES = {"master": 4, "stochastic": 2, "nearest": 2}


class BufferKey(NamedTuple):
    """Identity of a buffer's content, wherever it is. That of a bucket has its number as layer and nothing else."""

    kind: str
    layer: int
    group: int = -1
    chunk: int = -1


@dataclass(frozen=True)
class ParamBuckets:
    """Weights as numbered parameter buckets: layers, then shards of the embedding, then shards of the head.

    No shard is larger than a layer, so that all buckets pass through the same buffers. The final norm lies behind the
    last shard of the head, or of the embedding where the two are tied.
    """

    model: Model

    @cached_property
    def bucket_numel(self) -> int:
        """Elements of a bucket's buffer, padding included."""
        return padded_numel(layer_shapes(self.model))

    @cached_property
    def vocab_shards(self) -> int:
        """Shards of the embedding; the head has as many."""
        m = self.model
        return -(-m.vocab * m.hidden // (self.bucket_numel - aligned(m.hidden)))

    def shard_rows(self, shard: int) -> range:
        """Return the rows of the vocabulary in a shard."""
        rows = -(-self.model.vocab // self.vocab_shards)
        return range(shard * rows, min((shard + 1) * rows, self.model.vocab))

    @cached_property
    def embedding(self) -> range:
        """Bucket numbers of the embedding."""
        return range(self.model.layers, self.model.layers + self.vocab_shards)

    @cached_property
    def head(self) -> range:
        """Bucket numbers of the head; with tied embeddings those of the embedding."""
        if self.model.tied_embeddings:
            return self.embedding
        return range(self.embedding.stop, self.embedding.stop + self.vocab_shards)

    @cached_property
    def count(self) -> int:
        return self.head.stop

    def tensors(self, bucket: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes inside a bucket, in their order."""
        if bucket < self.model.layers:
            return layer_shapes(self.model)
        buckets = self.head if bucket in self.head else self.embedding
        rows = len(self.shard_rows(bucket - buckets.start))
        norm = ((self.model.hidden,),) if bucket == self.head[-1] else ()
        return ((rows, self.model.hidden), *norm)


def padded_numel(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return the elements of several consecutive tensors, each aligned to 256 elements.

    Elements and not bytes: so a weight, its gradient and its state have the same offset in their buffers.
    """
    return sum(aligned(prod(shape)) for shape in shapes)


def kinds_with_own_host_slots(plan: Plan) -> tuple[str, ...]:
    """Return the kinds of which every buffer has a host slot of its own; all others share a pool of slots."""
    if plan.lora is not None:
        return ("param",)
    return BUCKET_KINDS if plan.keeps_gradients else ("param", "state")


def bytes_on_disk(size: int) -> int:
    """Return the bytes of a buffer of this size on disk, and of its staging buffer."""
    return -(-size // DISK_BLOCK) * DISK_BLOCK


def activation_itemsize(plan: Plan) -> int:
    """Return the bytes per element of the residual, which stays bf16 with fp8 gemms."""
    return 4 if plan.dtype == "fp32" else 2


def buffer_bytes(model: Model, plan: Plan) -> dict[str, int]:
    """Return the size of a buffer of each kind."""
    itemsize = activation_itemsize(plan)
    numel = ParamBuckets(model).bucket_numel
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    rows, context = plan.chunk_tokens, plan.group_tokens
    grad, state = (0, 0) if plan.lora is not None else update_itemsizes(plan)
    all_heads = rows * width * itemsize
    residual = rows * model.hidden * itemsize
    keys = rows * kv_width * itemsize if model.qk_norm is not None else 0  # before their norms
    normed = aligned(keys) + (2 * aligned(residual) if model.post_norms else 0)
    adapters = {} if plan.lora is None else {"adapters": _adapter_bytes(model, plan, plan.lora)}
    return {
        "param": _fp8_bucket_bytes(model, itemsize) if plan.widens_weights else numel * itemsize,
        "grad": numel * grad,
        "state": numel * state,
        "inp": aligned(residual),
        "kv": 2 * aligned(context * kv_width * itemsize),
        "attn": aligned(all_heads) + aligned(4 * model.heads * rows),
        "rest": aligned(all_heads) + aligned(residual) + aligned(rows * 2 * model.ffn * itemsize) + normed,
        "dstream": aligned(residual),
        "dkv": 2 * aligned(4 * context * kv_width),
    } | adapters


def update_itemsizes(plan: Plan) -> tuple[int, int]:
    """Return the bytes of a trained parameter's gradient and of its optimizer state."""
    if plan.dtype == "fp32":
        return 4, 8
    return GRAD_BYTES[plan.update], sum(STATE_BYTES[plan.update])


def _adapter_bytes(model: Model, plan: Plan, lora: Lora) -> int:
    return adapter_numel(model, lora) * (activation_itemsize(plan) + sum(update_itemsizes(plan)))


def _fp8_bucket_bytes(model: Model, itemsize: int) -> int:
    """Return the bytes of the largest bucket with matrices in fp8."""
    buckets = ParamBuckets(model)
    return max(fp8_tensor_bytes(buckets.tensors(bucket), itemsize) for bucket in range(buckets.count))


def fp8_tensor_bytes(shapes: tuple[tuple[int, ...], ...], itemsize: int) -> int:
    """Return the bytes of tensors whose matrices are in fp8 with an fp32 scale per row."""
    matrices = [shape for shape in shapes if len(shape) == 2]
    vectors = [shape for shape in shapes if len(shape) != 2]
    scales = tuple((rows,) for rows, _ in matrices)
    return padded_numel(tuple(matrices)) + itemsize * padded_numel(tuple(vectors)) + 4 * padded_numel(scales)


def widened_numel(model: Model) -> int:
    """Return the elements that are widened at once: a layer, or all shards of the embedding or of the head."""
    buckets = ParamBuckets(model)
    ends = (sum(padded_numel(buckets.tensors(bucket)) for bucket in end) for end in (buckets.embedding, buckets.head))
    return max(padded_numel(layer_shapes(model)), *ends)
