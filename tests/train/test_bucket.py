"""Buckets: the shards of all ranks are every parameter exactly once, and views share their memory."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded_network import BF16, FP32
from torch import nn

from llmb.perfmodel.shards import BUCKET_ALIGNMENT
from llmb.train.parallel.bucket import Bucket, BucketFormats, merged_view
from llmb.train.parallel.mesh import Replicas
from llmb.train.parallel.parameter_shard import ParameterShard, box_of, boxes_of_range

CPU = torch.device("cpu")
SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def bucket_of(shapes: list[list[int]], rank: int = 0, ranks: int = 1, formats: BucketFormats = FP32) -> Bucket:
    parameters = {str(number): nn.Parameter(torch.empty(shape, device="meta")) for number, shape in enumerate(shapes)}
    return Bucket(parameters, Replicas(ranks, rank), formats, CPU, resident=True)


@given(SHAPES, st.data())
def test_boxes_of_range_are_its_elements_in_order(shape: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(0, math.prod(shape)))
    numbers = torch.arange(math.prod(shape)).view(shape)
    boxes = [*boxes_of_range(shape, start, stop)]
    elements = [x for offset, sizes in boxes for x in box_of(numbers, ParameterShard((), offset), sizes).flatten()]
    assert [int(x) for x in elements] == [*range(start, stop)]
    assert all(min(sizes) > 0 for _, sizes in boxes)
    assert len(boxes) <= 2 * len(shape) - 1


@given(st.lists(SHAPES, min_size=1, max_size=5), st.integers(1, 9), st.sampled_from([FP32, BF16]))
def test_shards_are_every_parameter_once(shapes: list[list[int]], ranks: int, formats: BucketFormats) -> None:
    weights = [torch.randn(shape) for shape in shapes]
    assembled = [torch.zeros(shape) for shape in shapes]
    times = [torch.zeros(shape) for shape in shapes]
    size = 0
    for rank in range(ranks):
        bucket = bucket_of(shapes, rank, ranks, formats)
        for number, weight in enumerate(weights):
            bucket.set_weight(number, weight)
        values = bucket.master_weights()
        size += values.numel()
        for number, weight in enumerate(weights):
            start, stop = bucket.own_range(number)
            assert torch.equal(bucket.own_part(values, number), weight.flatten()[start : max(start, stop)])
            for offset, box in bucket.own_boxes(values, number):
                shard = ParameterShard((), offset)
                box_of(assembled[number], shard, box.shape).copy_(box)
                box_of(times[number], shard, box.shape).add_(1)
    assert all(torch.equal(*pair) for pair in zip(assembled, weights, strict=True))
    assert all((count == 1).all() for count in times)
    assert size % (ranks * BUCKET_ALIGNMENT) == 0
    assert size < sum(w.numel() + BUCKET_ALIGNMENT for w in weights) + ranks * BUCKET_ALIGNMENT


def test_matrices_are_aligned_and_merged_without_a_copy() -> None:
    bucket = bucket_of([[3, 5], [1, 5], [3, 5], [4, 16], [2, 16], [6, 16]])
    for number, parameter in enumerate(bucket.parameters):
        assert parameter.storage_offset() % BUCKET_ALIGNMENT == 0 or parameter.shape[1] == 5
        bucket.set_weight(number, torch.randn(parameter.shape))
    for matrices in (bucket.parameters[:3], bucket.parameters[3:]):
        merged = merged_view([parameter.data for parameter in matrices])
        assert torch.equal(merged, torch.cat([*matrices]))
        assert merged.data_ptr() == matrices[0].data_ptr()
    for wrong in ([1, 0], [0, 2], [2, 3]):  # another order, a gap, padding
        with pytest.raises(AssertionError):
            merged_view([bucket.parameters[number].data for number in wrong])


def test_gradients_are_zero_in_padding_and_without_use() -> None:
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        bucket = bucket_of([[3], [2, 8], [7]])
        first, _unused, last = bucket.parameters
        first.main_grad.fill_(1.0)
        first.grad = first.main_grad  # as a fused backward pass does
        (last * torch.arange(7.0)).sum().backward()  # as autograd does: in memory of its own
        expected = torch.zeros(8 + 16 + 8)
        expected[:3], expected[24:31] = 1.0, torch.arange(7.0)
        bucket.reduce()
        assert torch.equal(bucket.reduced_grad, expected)
        assert first.grad is last.grad is bucket.grads is None
    finally:
        torch.use_deterministic_algorithms(False)
