"""Small models in Hugging Face folders, their outputs by `transformers`, and engines that serve them.

folder = written(LLAMA, tmp_path)
pool = answered(LLAMA, folder)
heard = serve(engine_for(served_model_for(config_of(LLAMA, folder)), blocks=9, max_num_tokens=7), requests)
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from config_changes import changed
from hypothesis import event
from hypothesis import strategies as st
from output_collector import OutputCollector
from small_models import (
    deepseek_model,
    gpt_oss_model,
    grok1_model,
    llama_model,
    mixtral_model,
    nemotron_h_model,
    qwen3_moe_model,
)
from small_serving import CONFIG
from step_inputs import step_inputs
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from llmb.config.huggingface.hf_config import HF_ARCHITECTURES, to_hf_config
from llmb.config.model import MambaConfig, Model, RopeConfig
from llmb.config.spec import Inference, RunConfig
from llmb.models.architectures import build_model
from llmb.models.hf_weights import load_weights, save_weights
from llmb.perfmodel.serving_time.cache_blocks import CacheBlocks
from llmb.runtime.rank_info import RankInfo
from llmb.serve.admission import AdmissionCheck
from llmb.serve.engine import Engine, EngineStats
from llmb.serve.engine_builder import engine_for_model, full_batch_windows, serving_dtypes, weight_source
from llmb.serve.input_staging import InputStaging, StepBuffer
from llmb.serve.layers.served_model import ServedModel, build_served_model
from llmb.serve.model_runner import TorchModelRunner
from llmb.serve.rank_groups import RankGroups
from llmb.serve.request import Request
from llmb.serve.step_batch import StepBatch
from llmb.serve.step_graphs import GraphSize, StepOutput, batch_size, padded_inputs, padded_sizes

CPU = torch.device("cpu")
SINGLE_RANK_INFO = RankInfo(rank=0, world_size=1, device=CPU)
MAX_SEQ_LEN = 64  # tokens of a sequence
PROMPTS = 12  # in a pool
MAX_OUTPUT = 12  # tokens
SEED = 8  # of the weights; chosen so that no two tokens are nearly equally likely

SIZES: dict[str, Any] = {"hidden": 48, "ffn": 80, "heads": 4, "head_dim": 16, "vocab": 97}
LLAMA = llama_model(
    name="llama",
    rope=RopeConfig(scaling="llama3", factor=8.0, original_tokens=64, low_freq_factor=1.0, high_freq_factor=4.0),
    **SIZES,
)
DEEPSEEK = deepseek_model(
    name="deepseek",
    layers=3,
    norm_eps=1e-6,
    rope=RopeConfig(theta=10_000.0, scaling="yarn", factor=40.0, original_tokens=256, mscale_all_dim=1.0),
    **SIZES,
)
NEMOTRON = nemotron_h_model(
    name="nemotron_h", pattern="M-M*-M", mamba=MambaConfig(heads=8, head_dim=16, groups=2, state=16, chunk=16), **SIZES
)
GROK = grok1_model(
    name="grok1", rope=RopeConfig(theta=10_000.0), embedding_scale=2.0, logit_scale=0.5773502691896257, **SIZES
)
MODELS = (LLAMA, DEEPSEEK, NEMOTRON, GROK)
MIXTURES = (
    mixtral_model(name="mixtral", **(SIZES | {"ffn": 24})),
    qwen3_moe_model(name="qwen3_moe", **SIZES),
    gpt_oss_model(name="gpt_oss", **(SIZES | {"hidden": 64, "ffn": 32})),  # widths of whole MXFP4 groups
)


# -- weights


def write_weights(model: Model, folder: Path, scale: float = 0.2) -> Path:
    """Write a folder of random weights, by `transformers` if it has the model; large enough that all of them matter."""
    torch.manual_seed(SEED)
    if model.architecture in HF_ARCHITECTURES:
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config(model)))
        fill(dict(network.named_parameters()) | _corrections(network), scale)
        network.save_pretrained(folder)
    else:
        actual = build_model(model)
        fill(dict(actual.named_parameters()), scale)
        save_weights(actual, folder, torch.float32)
    return folder


def fill(weights: Mapping[str, Tensor], scale: float) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith("A_log"):
                weight.uniform_(-1.0, 1.5)
            elif name.endswith("dt_bias"):
                weight.uniform_(-8.0, 0.0)  # some time steps are below dt_min, some are long
            else:
                weight.normal_(0.0, scale).add_("norm" in name)


def _corrections(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in network.named_buffers() if name.endswith("e_score_correction_bias")}


# -- expected outputs


@dataclass(frozen=True)
class Pool:
    """Prompts, their greedy outputs, and the smallest margin between the two most likely tokens."""

    prompts: list[list[int]]
    outputs: list[tuple[int, ...]]
    margin: float


def prompts_for(vocab: int) -> list[list[int]]:
    """Return prompts of many lengths; some share a prefix, one is a prefix of others, one occurs twice."""
    draw = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocab, (count,), generator=draw).tolist()

    begin = tokens(17)
    alike = [begin, [*begin, *tokens(1)], [*begin, *tokens(9)], [*begin, *tokens(9)], [*begin[:8], *tokens(8)], begin]
    return [*alike, *(tokens(count) for count in (1, 2, 5, 16, 31, 48))]


def reference_outputs(model: Model, folder: Path) -> Pool:
    """Return the outputs of `transformers`, each prompt alone; of our own network if it has no such model."""
    prompts, outputs, margins = prompts_for(model.vocab), [], []
    generate = (
        _transformers_logits(folder) if model.architecture in HF_ARCHITECTURES else _network_logits(model, folder)
    )
    for prompt in prompts:
        logits_TV = generate(torch.tensor([prompt]))
        best_T2 = logits_TV.topk(2, dim=-1).values
        margins.append((best_T2[:, 0] - best_T2[:, 1]).min().item())
        outputs.append(tuple(logits_TV.argmax(dim=-1).tolist()))
    return Pool(prompts, outputs, min(margins))


def _transformers_logits(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return a function from a prompt to the logits of each output token."""
    network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    settings = {"max_new_tokens": MAX_OUTPUT, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def generate(prompt_ids: Tensor) -> Tensor:
        mask = torch.ones_like(prompt_ids)  # without it, token 0 of a prompt would count as padding
        outputs = network.generate(
            prompt_ids, attention_mask=mask, **settings, output_logits=True, return_dict_in_generate=True
        )
        logits_TV = torch.cat(outputs.logits)
        assert outputs.sequences[0, prompt_ids.shape[1] :].tolist() == logits_TV.argmax(dim=-1).tolist()
        return logits_TV

    return generate


def _network_logits(model: Model, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the same for a network without a cache, which recomputes the whole sequence for each token."""
    network = build_model(model)
    load_weights(network, folder)

    @torch.no_grad()
    def generate(prompt_ids: Tensor) -> Tensor:
        rows = []
        for _ in range(MAX_OUTPUT):
            rows.append(network(prompt_ids)[0, -1])
            prompt_ids = torch.cat((prompt_ids, rows[-1].argmax()[None, None]), dim=1)
        return torch.stack(rows)

    return generate


# -- engines


def config_of(model: Model, folder: Path | None, **changes: Any) -> RunConfig:
    """Return a run that serves the folder (None: random weights), with any field of any section changed."""
    weights = None if folder is None else str(folder)
    return changed(CONFIG, model=model, weights=weights, **changes)


def served_model_for(config: RunConfig, context_tokens: int = 0) -> ServedModel:
    groups = RankGroups(device=CPU)
    return build_served_model(config.model, weight_source(config, CPU), serving_dtypes(config), groups, context_tokens)


def engine_for(served_model: ServedModel, blocks: int = 256, longest: int = MAX_SEQ_LEN, **settings: Any) -> Engine:
    """Build an engine with a cache of so many blocks; engines of one model cannot be used at the same time."""
    work = CONFIG.workload
    assert isinstance(work, Inference)
    work = replace(work, **settings)
    windows = min(blocks, full_batch_windows(served_model, work, longest))
    return engine_for_model(served_model, work, longest, CacheBlocks(blocks, windows))


class EagerReplays:
    """Eager replacement of CUDA graphs: padded steps of fixed sizes, with the host information of a capture."""

    def __init__(self, runner: TorchModelRunner, sizes: tuple[GraphSize, ...]):
        self.runner, self.sizes = runner, sorted(sizes)
        self.counts: Counter[GraphSize] = Counter()

    @classmethod
    def of(cls, engine: Engine, *sizes: GraphSize) -> "EagerReplays":
        """Replace the engine's graphs, of which there are none on a CPU."""
        runner = engine.runner
        assert isinstance(runner, TorchModelRunner)
        old = runner.staging
        runner.staging = InputStaging(
            old.slots, old.num_blocks, old.block_tokens, 1000, old.device, max_padding=100, num_tables=old.num_tables
        )
        replays = cls(runner, sizes)
        runner.graphs = replays  # type: ignore[assignment]
        return replays

    def launch(self, batch: StepBatch) -> StepOutput | None:
        needed = batch_size(batch)
        size = next((size for size in self.sizes if batch.chunks and size.fits(needed)), None)
        if size is None or not (needed.num_prefills or batch.is_decode_only or batch.samples_drafts):
            return None
        staging = self.runner.staging
        buffer = StepBuffer.on(staging.device, padded_sizes(size, staging))
        staging.upload(batch, buffer)
        self.counts[size] += 1
        return self.runner.compute(buffer, padded_inputs(buffer, size, MAX_SEQ_LEN))


@torch.inference_mode()
def logits_of(served_model: ServedModel, tokens: list[int], starts: Sequence[int] = ()) -> Tensor:
    """Return the logits of every token, [N, V], computed in one step or in steps bounded by `starts` (end included)."""
    blocks, length = range(-(-len(tokens) // 16)), 16
    for mixer in served_model.mixers():
        mixer.allocate(len(blocks), length, 1, CPU)
    outputs = []
    for start, end in pairwise(starts or (0, len(tokens))):
        inputs = step_inputs([(0, blocks, start, end - start)], length)
        x_NC = served_model.forward(served_model.embed(torch.tensor(tokens[start:end])), inputs)
        outputs.append(served_model.logits(x_NC, torch.arange(end - start)))
    return torch.cat(outputs)


# -- driving the engine


def serve(
    engine: Engine,
    requests: Iterable[Request],
    arrivals: Mapping[int, int] | None = None,
    cancels: Mapping[int, int] | None = None,
) -> OutputCollector:
    """Submit each request before its step in `arrivals` (default: the first), cancel before the steps in `cancels`, and
    step until all have ended; then the engine must be idle."""
    arrivals, cancels, collector = arrivals or {}, cancels or {}, OutputCollector()
    left, step = sorted(requests, key=lambda request: arrivals.get(request.request_id, 0)), 0
    while True:
        while left and arrivals.get(left[0].request_id, 0) <= step:
            engine.submit(collector.listen(left.pop(0)))
        for number in [number for number, at in cancels.items() if at == step and number in collector.streamed]:
            assert engine.cancel(number) == (collector.outputs[number].finish_reason == "cancelled")
        if not engine.step() and not left:
            break
        step += 1
        assert step < 5_000, "no end"
    assert set(collector.outputs) == set(collector.streamed), "a request was lost"
    check_idle(engine)
    return collector


def check_idle(engine: Engine) -> None:
    pool, limits = engine.scheduler.pool, engine.scheduler.limits
    pool.check_consistency()
    if engine.scheduler.windows is not None:
        engine.scheduler.windows.pool.check_consistency()
        assert engine.scheduler.windows.pool.num_used == 0
    assert engine.stats == EngineStats(waiting=0, running=0, blocks_used=0, blocks=pool.num_blocks)
    assert sorted(engine.scheduler._free_slots) == list(range(limits.max_batch_size))


@dataclass(frozen=True)
class Scenario:
    """Requests with arrival and cancel steps, and the engine settings."""

    prompts: list[int]  # indices into the pool
    max_tokens: list[int]
    arrivals: dict[int, int]
    cancels: dict[int, int]
    spare_blocks: int  # beyond what the longest request needs for itself
    depth: int  # launched steps that stay unread
    settings: dict[str, Any]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    count = draw(st.integers(1, 10))
    numbers = st.integers(0, count - 1)
    chunked = draw(st.booleans())
    return Scenario(
        prompts=draw(st.lists(st.integers(0, PROMPTS - 1), min_size=count, max_size=count)),
        max_tokens=draw(st.lists(st.integers(1, MAX_OUTPUT), min_size=count, max_size=count)),
        arrivals=draw(st.dictionaries(numbers, st.integers(0, 25))),
        cancels=draw(st.dictionaries(numbers, st.integers(0, 40), max_size=3)),
        spare_blocks=draw(st.integers(0, 4)),
        depth=draw(st.integers(0, 2)),
        settings={
            "chunked_prefill": chunked,
            "max_num_tokens": draw(st.integers(1 if chunked else MAX_SEQ_LEN, MAX_SEQ_LEN + 20)),
            "max_batch_size": draw(st.integers(1, 6)),
            "block_tokens": draw(st.sampled_from([1, 2, 4, 7, 16])),
            "prefix_cache": draw(st.booleans()),
        },
    )


def run_scenario(served_model: ServedModel, scenario: Scenario, requests: list[Request]) -> OutputCollector:
    """Run the requests with the scenario's max_tokens; without admission check, so that many are preempted."""
    requests = [
        replace(request, max_tokens=limit) for request, limit in zip(requests, scenario.max_tokens, strict=True)
    ]
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    blocks = -(-longest // scenario.settings["block_tokens"]) + scenario.spare_blocks
    engine = engine_for(served_model, blocks, **scenario.settings)
    engine.depth = scenario.depth
    with (
        mock.patch.object(engine.scheduler, "_preempt", wraps=engine.scheduler._preempt) as preempted,
        mock.patch.object(AdmissionCheck, "try_admit", return_value=True),
    ):
        collector = serve(engine, requests, scenario.arrivals, scenario.cancels)
    event(f"preempted: {preempted.call_count > 0}")
    return collector
