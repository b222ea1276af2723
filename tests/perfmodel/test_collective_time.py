"""Communication of one rank, by hand: gathers in fp8, buckets, rings that leave a domain, sends of pipeline stages."""

from dataclasses import replace

import pytest
from step_setups import step_setup
from test_step_time import LLAMA_70B

from llmb.config.spec import Parallel
from llmb.perfmodel.step_time.cluster_fabric import device
from llmb.perfmodel.step_time.collective_time import Transfer, rank_traffic, ring_transfer, sends_outside
from llmb.perfmodel.step_time.predictor import predict, step_memory
from llmb.perfmodel.step_time.published_rows import parse_row
from llmb.perfmodel.step_time.step_work import rank_work

H100 = device("h100")
NEMOTRON_15B = step_setup(
    "nemotron4-15b", "h100", 2048, "bf16", seqlen=4096, mbs=2, gbs=8192, engine="megatron", tp=2
)  # fmt: skip
MAXTEXT = {
    "source": "NVIDIA/dgxc-benchmarking maxtext/README_70b.md", "model": "llama3", "size": "70b", "gpu": "h100",
    "dtype": "fp8", "gpus": "2048", "seqlen": "8192", "gbs": "4096", "mbs": "2", "tp": "1", "fsdp": "128",
    "notes": "framework=maxtext",
}  # fmt: skip


def traffic_of(setup):
    return rank_traffic(setup, rank_work(setup, H100), H100)


def test_megatron_gathers_quantized_values_and_scatters_bf16():
    """40 blocks of 4,096 tokens: three gathers of one byte a value and two scatters of two; three quarters are sent."""
    values = 40 * 4096 * 8192 * 3 / 4
    assert traffic_of(LLAMA_70B).tp.link_bytes == pytest.approx((3 * 1 + 2 * 2) * values)
    assert traffic_of(LLAMA_70B).tp_forward.link_bytes == pytest.approx((1 + 2) * values)
    assert traffic_of(replace(LLAMA_70B, dtype="bf16")).tp.link_bytes == pytest.approx(5 * 2 * values)
    assert traffic_of(replace(LLAMA_70B, engine="torchtitan")).tp.link_bytes == pytest.approx(5 * 2 * values)


def test_a_rank_quantizes_its_shard_and_transposes_what_it_gathered():
    """Of 6 bytes a value 4 are of the shard, a quarter of the tokens, in the first GEMM of each block, forward."""
    tokens, hidden, layers = 4096, 8192, 20
    first = 2 * hidden * ((6 - 2) / 4 + 2)  # attention and MLP
    second = (hidden / 4 + 28672 / 4) * 6
    assert rank_work(LLAMA_70B, H100).forward.quantize_bytes == pytest.approx(layers * tokens * (first + second))
    whole = rank_work(replace(LLAMA_70B, engine="torchtitan"), H100).forward.quantize_bytes
    assert whole == pytest.approx(layers * tokens * (2 * hidden * 6 + second))


def test_ring_attention_merges_a_result_per_step():
    """0.75 of the queries a step; forward 5 values read and written for each of their outputs, in bf16."""
    alone = replace(LLAMA_70B, parallel=Parallel(tp=4, pp=4, vp=5), gpus=32)
    added = rank_work(LLAMA_70B, H100).forward.memory_bytes - rank_work(alone, H100).forward.memory_bytes / 2
    assert added == pytest.approx(20 * 4096 / 4 * 8192 * 0.75 * 2 * 5 * 2)


@pytest.mark.parametrize(("gpus", "pp", "fraction"), [(8, 4, 0.0), (16, 4, 0.5), (32, 4, 1.0), (2048, 8, 1.0)])
def test_sends_leave_the_domain_when_stages_are_far_apart(gpus, pp, fraction):
    """Of 16 GPUs two stages of four GPUs are in a node: every second send leaves it."""
    assert sends_outside(gpus, pp, H100) == fraction


def test_sends_of_neighbouring_stages_share_links_and_network():
    """Five stages forward and backward, 8,192 tokens of 8,192 values in bf16, a quarter on each rank of tp."""
    setup = replace(LLAMA_70B, gpus=16, parallel=Parallel(tp=4, pp=4, vp=5), gbs=16)
    size = 2 * 5 * 8192 / 4 * 8192 * 2
    assert traffic_of(setup).pp == Transfer(link_bytes=size / 2, network_bytes=size / 2, hops=10)


def test_a_ring_of_sends_between_domains_has_one_network_card():
    setup = replace(LLAMA_70B, parallel=Parallel(tp=4, cp=4, pp=4))
    keys_and_values = 3 * 2 * 1024 / 4 * 20 * 8192 * 2
    assert traffic_of(setup).cp.network_bytes == pytest.approx(keys_and_values * 3 / 4)
    assert traffic_of(LLAMA_70B).cp.network_bytes == 0  # tp 4 x cp 2 is a node


def test_a_ring_passes_every_rank_of_a_node():
    """16 nodes with 4 members each: a hop to the next node, and three at a fifth of its latency."""
    ring = ring_transfer(H100, 64, 2, 64e9)
    assert ring.network_bytes == pytest.approx(63e9 / 4)
    assert ring.hops == pytest.approx(16 * (1 + 3 * 0.2))
    assert ring_transfer(H100, 64, 2, 0.0) == Transfer()


def test_the_last_bucket_grows_with_the_replicas():
    """Megatron puts 40 million weights into a bucket, and a million for each replica where that is more."""
    weights = rank_work(NEMOTRON_15B, H100).dense_weights
    small = replace(NEMOTRON_15B, gpus=16, gbs=64)
    assert traffic_of(small).dp_bucket == pytest.approx(40e6 / weights)
    assert traffic_of(NEMOTRON_15B).dp_bucket == pytest.approx(1024e6 / weights)
    assert traffic_of(replace(NEMOTRON_15B, gpus=32768, gbs=131072)).dp_bucket == 1.0
    assert traffic_of(replace(NEMOTRON_15B, engine="torchtitan")).dp_bucket == 0.0


def test_a_larger_last_bucket_is_exposed():
    """2,048 GPUs took 0.12 s more than 16: published, Nemotron-4 15B in bf16, 2.66 and 2.78 s."""
    small = predict(replace(NEMOTRON_15B, gpus=16, gbs=64))
    assert 0.03 < predict(NEMOTRON_15B).terms["dp"] - small.terms["dp"] < 0.12


def test_groups_that_each_hold_all_weights_have_shorter_rings():
    setup = parse_row(MAXTEXT).setup
    assert setup.fsdp_ranks == 128
    everywhere = replace(setup, fsdp_ranks=None)
    rings = 3 * 80
    per_node = 1 + 7 * 0.2
    assert traffic_of(everywhere).fsdp.hops == pytest.approx(rings * 256 * per_node)
    assert traffic_of(setup).fsdp.hops == pytest.approx(rings * 16 * per_node + 16)
    assert predict(setup).step_time_s < predict(everywhere).step_time_s
    one_group = replace(setup, fsdp_ranks=None, gpus=128, gbs=256)
    assert step_memory(setup).total == step_memory(one_group).total > step_memory(everywhere).total


def test_a_number_of_fsdp_ranks_that_is_all_replicas_makes_no_groups():
    assert parse_row(MAXTEXT | {"fsdp": "2048"}).setup.fsdp_ranks is None
    assert parse_row(MAXTEXT | {"fsdp": "true"}).setup.fsdp_ranks is None


def test_fsdp_shards_over_cp_where_there_is_one_replica():
    """torchtitan's 405B on 512 GPUs with tp 8, pp 8 and cp 8: 8 ranks share the weights of a stage."""
    setup = step_setup("llama3.1-405b", "h100", 512, "fp8", gbs=8, tp=8, pp=8, cp=8, fsdp=True, engine="torchtitan")
    traffic = rank_traffic(setup, rank_work(setup, H100), H100)
    assert traffic.fsdp.network_bytes > 0
    assert traffic.dp == Transfer()
