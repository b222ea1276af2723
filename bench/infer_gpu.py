"""The serving engine's speed on one H200: every figure beside a ceiling that was measured in the same process.

    python bench/infer_gpu.py [--json FILE] [--only throughput,latency,profile,deepseek,peer] [--row 1000/1000]
    python bench/infer_gpu.py --tiny        # very small models, with or without a GPU: shows only that it runs

Random weights, all requests at once, EOS ignored. How a ceiling follows from bytes, FLOPs and measured rates:
`infer_ceilings.py` and docs/inference.md. Takes less than eight minutes; a table is printed when it is complete.
"""

import argparse
import gc
import time
from dataclasses import replace

import torch
from infer_peer import alone
from inference.infer_bench import Bench
from inference.infer_deepseek import PROMPT, deepseek
from inference.infer_llama import llama
from inference.infer_rates import bandwidths
from inference.infer_serving import Row
from measure.device import describe_machine
from measure.options import build_parser, parse_options, select_rows

from llmb.config.model import Model
from llmb.config.recipe import load_all, shipped
from llmb.config.serialization import convert

PARTS = ("ceilings", "throughput", "latency", "profile", "deepseek", "peer")

# Requests are as many as eight minutes allow. The row that is profiled comes last: a traced process may stay slower.
ROWS = (
    Row(dtype="fp8", isl=128, osl=128, batch=2048, budget=8192, requests=6144,
        published=27_911, aim=29_000, floor=22_000),
    Row(dtype="fp8", isl=128, osl=2048, batch=1536, budget=4096, requests=704,
        published=26_221, aim=27_000, floor=20_000),
    Row(dtype="fp8", isl=20000, osl=2000, batch=88, budget=20480, requests=82,
        published=1_804, aim=1_850, floor=1_450),
    Row(dtype="fp8", isl=20000, osl=2000, batch=88, budget=20480, requests=82,
        published=1_804, aim=1_850, floor=1_800, attention_dtype="fp8"),
    Row(dtype="fp8", isl=5000, osl=500, batch=352, budget=20480, requests=704,
        published=3_902, aim=4_000, floor=3_900, attention_dtype="fp8"),
    Row(dtype="fp8", isl=32768, osl=1024, batch=56, budget=33280, requests=56, attention_dtype="fp8"),
    Row(dtype="bf16", isl=1000, osl=1000, batch=448, budget=4096, requests=384,
        aim=8_800, floor=7_500, parts=("throughput", "latency", "peer")),
    Row(dtype="fp8", isl=1000, osl=1000, batch=960, budget=4096, requests=1344,
        published=17_744, aim=18_500, floor=14_500, parts=("throughput", "latency", "profile")),
)  # fmt: skip

DEEPSEEK_LAYERS = (1, 4)  # with a dense MLP, with experts: 11 GB each
READ_BYTES = 8 << 30


def ceilings(bench: Bench) -> None:
    """Part 1: bandwidth and rates. The other parts ask for what is measured here."""
    size, tokens = (1 << 24, 256) if bench.tiny else (READ_BYTES, PROMPT)
    bench.bandwidth |= bandwidths(bench.device, size, bench.seconds)
    bench.rate("bf16", bench.llama, tokens)
    for row in bench.rows:
        bench.rates_of(row)
    bench.rate("fp8", bench.deepseek, tokens)
    gc.collect()
    how = {"copy": "copy, bytes read and bytes written", "sum": "sum", "dot": "dot product"}
    bench.print_table(
        "1. Ceilings of this device, measured",
        ("what", "rate"),
        [
            *(
                (f"{how[way]}, {size / 2**30:g} GiB", f"{rate / 1e12:.3f} TB/s")
                for way, rate in bench.bandwidth.items()
            ),
            *((name, f"{rate / 1e12:.1f} TFLOP/s") for name, rate in bench.rates.items()),
        ],
        "read bandwidth below: the best of the three",
        "a layer's products: its matrices one after the other, random data; fp8 by torch._scaled_mm, a scale a row",
    )
    bench.record("ceilings", {"bandwidth": bench.bandwidth, "rates": bench.rates})


def models() -> tuple[Model, Model]:
    """Llama 3.1 8b, and DeepSeek-R1 with few of its layers."""
    recipes = load_all([shipped()])
    small = convert(Model, recipes["inference_llama3.1"].models["8b"], "8b")
    whole = convert(Model, recipes["inference_deepseek-r1"].models["671b"], "671b")
    assert whole.experts is not None
    dense, moe = DEEPSEEK_LAYERS
    return small, replace(whole, layers=dense + moe, experts=replace(whole.experts, dense_layers=dense))


def tiny_models() -> tuple[Model, Model]:
    """Return models of the same structure, very small."""
    dense, moe = models()
    assert moe.experts is not None
    assert moe.mla is not None
    experts = replace(moe.experts, count=8, top_k=2, ffn=128, groups=2, top_groups=1)
    latent = replace(moe.mla, q_rank=128, kv_rank=128, nope_dim=32, rope_dim=16, value_dim=32)
    dense = replace(dense, layers=2, hidden=128, ffn=256, heads=4, kv_heads=2, head_dim=32, vocab=512)
    moe = replace(moe, layers=2, hidden=128, ffn=256, heads=4, kv_heads=4, head_dim=32, vocab=512)
    return dense, replace(moe, experts=experts, mla=latent)


def tiny_row(row: Row) -> Row:
    return replace(row, isl=32, osl=12, batch=4, budget=48, requests=12)


def run(options: argparse.Namespace) -> None:
    """Run the requested parts; ceilings always, as all others need them."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    parts, tiny = options.parts, options.tiny
    rows = tuple(tiny_row(row) if tiny else row for row in select_rows(ROWS, options.row))
    bench = Bench(device, *(tiny_models() if tiny else models()), rows, parts, tiny, json=options.json)
    # The peer comes first: this process holds nothing of the GPU yet.
    peer = alone(tiny) if "peer" in parts and any("peer" in row.parts for row in rows) else None
    print(describe_machine(device), flush=True)
    ceilings(bench)
    llama(bench, peer)
    if "deepseek" in parts:
        deepseek(bench)


def main() -> None:
    options = parse_options(build_parser(__doc__, PARTS), PARTS, ROWS)
    began = time.perf_counter()
    run(options)
    print(f"\n{time.perf_counter() - began:.0f} seconds in all")


if __name__ == "__main__":
    main()
