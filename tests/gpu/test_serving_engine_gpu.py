"""Serving engine on a GPU: CUDA graphs against eager, fp32 against the CPU."""

from dataclasses import replace

import pytest
import torch
from cuda_checks import GPU, NEEDS_GPU
from small_models import gpt_oss_model, llama_model
from training_run import run_config

from llmb.config.spec import Inference, Precision, RunConfig
from llmb.models.architectures import Network, build_model
from llmb.models.hf_weights import save_weights
from llmb.ops.attention import paged_attention_triton
from llmb.ops.attention.fp8_prefill import fp8_prefill
from llmb.ops.device_capabilities import capabilities
from llmb.runtime.rank_info import RankInfo
from llmb.serve.engine_builder import build_engine
from llmb.serve.model_runner import TorchModelRunner
from llmb.serve.request import Request

pytestmark = NEEDS_GPU


MODEL = llama_model(name="small", layers=3, hidden=512, ffn=1024, heads=8, vocab=1000)
WORK = Inference(
    mode="max_throughput",
    use_case="chat",
    isl=100,
    osl=40,
    max_batch_size=12,
    concurrency=30,
    max_num_tokens=256,
    kv_fraction=0.01,
    num_requests=30,
)
CONFIG = run_config(MODEL, "bf16", WORK)


def generate(config: RunConfig, device: torch.device = GPU, **changes) -> dict[int, tuple[int, ...]]:
    config = replace(config, workload=replace(WORK, **changes))
    engine = build_engine(config, RankInfo(0, 1, device), max_seq_len=160)
    outputs: dict[int, tuple[int, ...]] = {}
    for number in range(30):
        prompt = prompt_of(number)
        ended = lambda response: outputs.update({response.request_id: response.token_ids})  # noqa: E731
        engine.submit(Request(request_id=number, prompt=prompt, max_tokens=40, on_end=ended))
    engine.drain()
    assert engine.stats.blocks_used == 0
    return outputs


def prompt_of(number: int) -> list[int]:
    return torch.randint(0, 1000, (3 + 3 * number,), generator=torch.Generator().manual_seed(number)).tolist()


def largest_tie(network: Network, a: dict[int, tuple[int, ...]], b: dict[int, tuple[int, ...]]) -> float:
    """Return by how much the logits of two tokens differ where outputs do so first, at most, in standard deviations.

    Rounding changes a token where two logits are nearly equal; what comes behind it is another text.
    """
    gaps = [0.0]
    for number, tokens in a.items():
        if tokens != b[number]:
            first = next(i for i, (x, y) in enumerate(zip(tokens, b[number], strict=True)) if x != y)
            logits_V = network(torch.tensor([[*prompt_of(number), *tokens[:first]]]))[0, -1]
            gaps.append(float((logits_V[tokens[first]] - logits_V[b[number][first]]).abs() / logits_V.std()))
    return max(gaps)


def fraction_equal(a: dict, b: dict) -> float:
    return sum(a[n] == b[n] for n in a) / len(a)


@pytest.mark.skipif(
    not (torch.cuda.is_available() and capabilities(GPU).supports("cudnn_fp8_attention")),
    reason="nvidia-cudnn-frontend is not installed, or no Hopper GPU",
)
def test_fp8_attention_of_long_prompts_keeps_most_tokens(monkeypatch):
    """Prompts of equal and of other lengths, some beside decodes; near ties of random weights may differ."""
    calls = []

    def counted(*args):
        calls.append(args[1])
        return fp8_prefill(*args)

    monkeypatch.setattr(paged_attention_triton, "fp8_prefill", counted)
    outputs = []
    for attention_dtype in (None, "fp8"):
        precision = Precision(dtype="fp8", kv_dtype="fp8", attention_dtype=attention_dtype)
        work = replace(WORK, max_num_tokens=8192, max_batch_size=4, kv_fraction=0.1)
        config = replace(CONFIG, precision=precision, workload=work)
        engine = build_engine(config, RankInfo(0, 1, GPU), max_seq_len=3200)
        tokens: dict[int, tuple[int, ...]] = {}
        for number, length in enumerate((2100, 2100, 2300, 3000, 700, 2048, 2500, 2500)):
            prompt = torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(number)).tolist()
            ended = lambda response, tokens=tokens: tokens.update({response.request_id: response.token_ids})  # noqa: E731
            engine.submit(Request(request_id=number, prompt=prompt, max_tokens=4, on_end=ended))
        engine.drain()
        outputs.append(tokens)
        assert bool(calls) == (attention_dtype == "fp8")
    assert 2 in calls  # two prompts of one length at once
    first_equal = sum(outputs[0][n][0] == outputs[1][n][0] for n in outputs[0])
    assert first_equal >= 6


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_graphs_and_eager_generate_the_same_tokens(dtype):
    """Padding changes which kernels cuBLAS selects, so near ties may differ; most outputs are equal."""
    config = replace(CONFIG, precision=Precision(dtype=dtype, kv_dtype="fp8" if dtype == "fp8" else None))
    with_graphs, without = generate(config), generate(config, cuda_graphs=False)
    assert all(len(tokens) == 40 for tokens in with_graphs.values())
    assert fraction_equal(with_graphs, without) > 0.6


def test_captured_mixed_steps_equal_eager_ones():
    """Decodes beside prefill chunks, some of a sequence that has begun, some longer than torch's attention takes."""
    config = replace(CONFIG, workload=replace(WORK, max_batch_size=8, max_num_tokens=1024))
    logits = []
    for graphs in (True, False):
        config = replace(config, workload=replace(config.workload, cuda_graphs=graphs))
        engine = build_engine(config, RankInfo(0, 1, GPU), max_seq_len=1200)
        runner, rows, mixed = engine.runner, [], 0
        assert isinstance(runner, TorchModelRunner)
        replay = runner.graphs.launch

        def record(output, chunks, rows=rows, runner=runner):
            """Record the logits; the next token is always 7, so that rounding cannot lead to other sequences."""
            rows.append(output.logits_SV[: len(chunks)].clone())
            tokens = torch.full_like(output.tokens_S[: len(chunks)], 7)
            runner.last_tokens[output.sample_slots_S[: len(chunks)]] = tokens
            return tokens

        def count(batch, replay=replay):
            nonlocal mixed
            output = replay(batch)
            mixed += output is not None and not batch.is_decode_only
            return output

        runner.sample, runner.graphs.launch = record, count
        for number, length in enumerate((5, 900, 40, 700, 3, 129)):
            prompt = torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(number)).tolist()
            engine.submit(Request(request_id=number, prompt=prompt, max_tokens=4))
            engine.step()
        engine.drain()
        assert bool(mixed) == graphs
        logits.append(torch.cat(rows))
    torch.testing.assert_close(*logits, rtol=0.05, atol=0.05)


def test_fp32_generates_the_tokens_of_the_cpu(tmp_path):
    network = build_model(MODEL)
    network.init_weights(1)
    save_weights(network, tmp_path / "weights", torch.float32)
    folder = str(tmp_path / "weights")
    config = replace(CONFIG, precision=Precision(dtype="fp32"))
    expected = generate(config, torch.device("cpu"), weights=folder)
    assert fraction_equal(generate(config, weights=folder), expected) == 1
    assert fraction_equal(generate(config, weights=folder, max_num_tokens=40, block_tokens=16), expected) == 1


@pytest.mark.parametrize(("dtype", "batch", "tie"), [("fp32", 12, 0.0), ("bf16", 1, 0.1), ("fp8", 12, 0.6)])
def test_drafts_change_no_token(tmp_path, dtype, batch, tie):
    """With graphs of both models; near ties of bf16 and fp8 may differ, as other rows are computed beside them.

    Between fp32 and bf16 they are up to 0.035 standard deviations of the logits apart, between fp32 and fp8 up to 0.37;
    another token than the two largest is more than one apart.
    """
    network = build_model(MODEL)
    network.init_weights(1)
    save_weights(network, tmp_path / "weights", torch.float32)
    config = replace(CONFIG, precision=Precision(dtype=dtype, kv_dtype="fp8" if dtype == "fp8" else None))
    common = {"max_batch_size": batch, "weights": str(tmp_path / "weights")}
    drafts = {"speculative_tokens": 3, "draft": "layers:2", "draft_model": replace(MODEL, layers=2)}
    with torch.no_grad():
        assert largest_tie(network, generate(config, **common), generate(config, **common, **drafts)) <= tie


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_blocks_freed_behind_windows_change_no_token(cuda_graphs):
    """With a prefix cache windowed layers keep whole sequences; no two prompts begin alike, so nothing is shared."""
    shape = {"layers": 4, "hidden": 512, "ffn": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "vocab": 1000}
    config = replace(CONFIG, model=gpt_oss_model(name="windows", window=16, **shape))
    settings = {"block_tokens": 16, "cuda_graphs": cuda_graphs}
    engine = build_engine(replace(config, workload=replace(WORK, **settings)), RankInfo(0, 1, GPU), max_seq_len=160)
    assert engine.scheduler.windows is not None
    del engine
    windows, whole = generate(config, **settings), generate(config, **settings, prefix_cache=True)
    assert all(len(tokens) == 40 for tokens in windows.values())
    assert fraction_equal(windows, whole) > 0.9  # experts add in any order
