"""Small models in folders as `transformers` writes them, what it answers from them, and engines that serve them.

folder = written(LLAMA, tmp_path)
pool = answered(LLAMA, folder)
heard = serve(engine_for(stack_of(config_of(LLAMA, folder)), blocks=9, max_num_tokens=7), requests)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import event
from hypothesis import strategies as st
from small_serving import CONFIG, changed
from steps import step_inputs
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from llmb.config.spec import Experts, Inference, Latent, Mamba, Model, Rope, RunConfig
from llmb.models.architectures import build_model
from llmb.models.hf_config import CONFIGURED, to_config
from llmb.models.hf_weights import load_weights, save_weights
from llmb.runtime.rank_info import Place
from llmb.serve.admission import Outlook
from llmb.serve.decode_graphs import Outcome
from llmb.serve.engine import Engine, Load
from llmb.serve.engine_builder import engine_on, weights_of
from llmb.serve.input_staging import Sizes, StepBuffer
from llmb.serve.layers.served_model import Stack, build_stack
from llmb.serve.model_runner import TorchRunner
from llmb.serve.rank_groups import Ranks
from llmb.serve.request import Answer, Request
from llmb.serve.served_dtypes import how_of
from llmb.serve.step_batch import Plan

CPU = torch.device("cpu")
ALONE = Place(rank=0, world_size=1, device=CPU)
LONGEST = 64  # tokens of a sequence
PROMPTS = 12  # in a pool
ANSWER = 12  # tokens of an answer, at most
SEED = 8  # of the weights; one with which no two tokens are nearly as likely

SIZES: dict[str, Any] = {"hidden": 48, "ffn": 80, "heads": 4, "head_dim": 16, "vocab": 97}
LLAMA = Model(
    name="llama",
    architecture="llama",
    layers=2,
    kv_heads=2,
    # So short an original context that frequencies are kept, slowed and in between.
    rope=Rope(scaling="llama3", factor=8.0, original_tokens=64, low_freq_factor=1.0, high_freq_factor=4.0),
    **SIZES,
)
DEEPSEEK = Model(
    name="deepseek",
    architecture="deepseek",
    layers=3,
    kv_heads=4,
    norm_eps=1e-6,
    rope=Rope(theta=10_000.0, scaling="yarn", factor=40.0, original_tokens=256, mscale_all_dim=1.0),
    experts=Experts(
        count=8, top_k=3, ffn=24, shared=1, dense_layers=1, groups=4, top_groups=2, score="sigmoid", scale=2.5
    ),
    latent=Latent(q_rank=24, kv_rank=20, nope_dim=16, rope_dim=8, value_dim=12),
    **SIZES,
)
NEMOTRON = Model(
    name="nemotron_h",
    architecture="nemotron_h",
    layers=6,
    kv_heads=2,
    gated=False,
    activation="squared_relu",
    rope=None,
    pattern="M-M*-M",
    mamba=Mamba(heads=8, head_dim=16, groups=2, state=16, chunk=16),
    **SIZES,
)
GROK = Model(
    name="grok1",
    architecture="grok1",
    layers=2,
    kv_heads=2,
    activation="gelu",
    tied_embeddings=True,
    post_norms=True,
    rope=Rope(theta=10_000.0),
    attention_cap=30.0,
    embedding_scale=2.0,
    logit_scale=0.5773502691896257,
    experts=Experts(count=8, top_k=2, ffn=40, renormalise=False),
    **SIZES,
)
MODELS = (LLAMA, DEEPSEEK, NEMOTRON, GROK)


# -- weights


def written(model: Model, folder: Path, scale: float = 0.2) -> Path:
    """A folder of random weights, by `transformers` where it has the model; large enough that every part matters."""
    torch.manual_seed(SEED)
    if model.architecture in CONFIGURED:
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_config(model)))
        fill(dict(network.named_parameters()) | _corrections(network), scale)
        network.save_pretrained(folder)
    else:
        ours = build_model(model)
        fill(dict(ours.named_parameters()), scale)
        save_weights(ours, folder, torch.float32)
    return folder


def fill(weights: Mapping[str, Tensor], scale: float) -> None:
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith("A_log"):
                weight.uniform_(-1.0, 1.5)
            elif name.endswith("dt_bias"):
                weight.uniform_(-8.0, 0.0)  # some time steps come below the least, some are long
            else:
                weight.normal_(0.0, scale).add_("norm" in name)


def _corrections(network: torch.nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in network.named_buffers() if name.endswith("e_score_correction_bias")}


# -- what has to come out


@dataclass(frozen=True)
class Pool:
    """Prompts, the greedy answer to each, and how far the likeliest token was ahead where it was nearest."""

    prompts: list[list[int]]
    answers: list[tuple[int, ...]]
    margin: float


def prompts_for(vocab: int) -> list[list[int]]:
    """Of many lengths; some begin alike, one is the beginning of others, one comes twice."""
    draw = torch.Generator().manual_seed(3)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocab, (count,), generator=draw).tolist()

    begin = tokens(17)
    alike = [begin, [*begin, *tokens(1)], [*begin, *tokens(9)], [*begin, *tokens(9)], [*begin[:8], *tokens(8)], begin]
    return [*alike, *(tokens(count) for count in (1, 2, 5, 16, 31, 48))]


def answered(model: Model, folder: Path) -> Pool:
    """By `generate` of `transformers`, each prompt alone; by our own network where it has no such model."""
    prompts, answers, margins = prompts_for(model.vocab), [], []
    generate = _theirs(folder) if model.architecture in CONFIGURED else _ours(model, folder)
    for prompt in prompts:
        logits_TV = generate(torch.tensor([prompt]))
        best_T2 = logits_TV.topk(2, dim=-1).values
        margins.append((best_T2[:, 0] - best_T2[:, 1]).min().item())
        answers.append(tuple(logits_TV.argmax(dim=-1).tolist()))
    return Pool(prompts, answers, min(margins))


def _theirs(folder: Path) -> Callable[[Tensor], Tensor]:
    """From a prompt to the logits of each token of the answer."""
    network = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    settings = {"max_new_tokens": ANSWER, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def generate(given: Tensor) -> Tensor:
        made = network.generate(given, **settings, output_logits=True, return_dict_in_generate=True)
        logits_TV = torch.cat(made.logits)
        assert made.sequences[0, given.shape[1] :].tolist() == logits_TV.argmax(dim=-1).tolist()
        return logits_TV

    return generate


def _ours(model: Model, folder: Path) -> Callable[[Tensor], Tensor]:
    """The same by a network without a cache, which computes the whole text anew for each token."""
    network = build_model(model)
    load_weights(network, folder)

    @torch.no_grad()
    def generate(given: Tensor) -> Tensor:
        rows = []
        for _ in range(ANSWER):
            rows.append(network(given)[0, -1])
            given = torch.cat((given, rows[-1].argmax()[None, None]), dim=1)
        return torch.stack(rows)

    return generate


# -- engines


def config_of(model: Model, folder: Path | None, **changes: Any) -> RunConfig:
    """A run that serves the folder (none: random weights), with any field of any section changed."""
    weights = None if folder is None else str(folder)
    return changed(CONFIG, model=model, weights=weights, **changes)


def stack_of(config: RunConfig) -> Stack:
    return build_stack(config.model, weights_of(config, CPU), how_of(config), Ranks(device=CPU))


def engine_for(stack: Stack, blocks: int = 256, longest: int = LONGEST, **settings: Any) -> Engine:
    """An engine on the stack, of whose cache a test says how large it is; no two may be used at the same time."""
    work = CONFIG.workload
    assert isinstance(work, Inference)
    return engine_on(stack, replace(work, **settings), longest, blocks)


class EagerReplays:
    """What a graph's replay does, without one: steps of a fixed size, of which the host knows what a capture does."""

    def __init__(self, runner: TorchRunner, size: int):
        self.runner, self.size, self.count = runner, size, 0

    @classmethod
    def of(cls, engine: Engine, size: int) -> "EagerReplays":
        """In place of the engine's graphs, of which there are none on a CPU."""
        assert isinstance(engine.runner, TorchRunner)
        replays = cls(engine.runner, size)
        engine.runner.graphs = replays  # type: ignore[assignment]
        return replays

    def launch(self, plan: Plan) -> Outcome | None:
        if not plan.parts or not plan.generates:
            return None
        staging, size = self.runner.staging, self.size
        sizes = Sizes(tokens=size, parts=size, samples=size, blocks=staging.blocks)
        buffer = StepBuffer.on(staging.device, sizes)
        staging.load(plan, buffer)
        self.count += 1
        return self.runner.compute(buffer, buffer.inputs(Plan(), LONGEST, decodes=size))


@torch.inference_mode()
def logits_of(stack: Stack, tokens: list[int], starts: Sequence[int] = ()) -> Tensor:
    """Of every token of a text, [N, V], computed in one step or in those that `starts`, the end included, bounds."""
    blocks, length = range(-(-len(tokens) // 16)), 16
    for mixer in stack.mixers():
        mixer.allocate(len(blocks), length, 1, CPU)
    made = []
    for start, end in pairwise(starts or (0, len(tokens))):
        inputs = step_inputs([(0, blocks, start, end - start)], length)
        x_NC = stack.through(stack.embed(torch.tensor(tokens[start:end])), inputs)
        made.append(stack.logits(x_NC, torch.arange(end - start)))
    return torch.cat(made)


# -- driving them, in every way


@dataclass
class Heard:
    """What the callbacks were told."""

    streamed: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)

    def listen(self, request: Request) -> Request:
        self.streamed[request.number] = []
        return replace(request, on_token=self.token, on_end=self.end)

    def token(self, number: int, token: int) -> None:
        assert number not in self.answers, "a token after the end"
        self.streamed[number].append(token)

    def end(self, answer: Answer) -> None:
        assert answer.number not in self.answers, "ended twice"
        assert list(answer.tokens) == self.streamed[answer.number]
        self.answers[answer.number] = answer

    def tokens(self) -> list[tuple[int, ...]]:
        """The answers in the order of their numbers."""
        return [self.answers[number].tokens for number in sorted(self.answers)]


def serve(
    engine: Engine,
    requests: Iterable[Request],
    arrivals: Mapping[int, int] | None = None,
    cancels: Mapping[int, int] | None = None,
) -> Heard:
    """Submit each request before the step that `arrivals` names (the first), cancel the numbers of `cancels` before
    theirs, and go on until all have ended; then nothing may be left in the engine."""
    arrivals, cancels, heard = arrivals or {}, cancels or {}, Heard()
    left, step = sorted(requests, key=lambda request: arrivals.get(request.number, 0)), 0
    while True:
        while left and arrivals.get(left[0].number, 0) <= step:
            engine.submit(heard.listen(left.pop(0)))
        for number in [number for number, at in cancels.items() if at == step and number in heard.streamed]:
            assert engine.cancel(number) == (heard.answers[number].finish == "cancelled")
        if not engine.step() and not left:
            break
        step += 1
        assert step < 5_000, "no end"
    assert set(heard.answers) == set(heard.streamed), "a request was lost"
    check_idle(engine)
    return heard


def check_idle(engine: Engine) -> None:
    pool, limits = engine.scheduler.pool, engine.scheduler.limits
    pool.check()
    assert engine.load == Load(waiting=0, running=0, blocks_used=0, blocks=pool.blocks)
    assert sorted(engine.scheduler._slots) == list(range(limits.max_batch_size))


@dataclass(frozen=True)
class Scene:
    """Who asks for what and when, and the engine that has to cope."""

    prompts: list[int]  # places in a pool
    max_tokens: list[int]
    arrivals: dict[int, int]
    cancels: dict[int, int]
    spare_blocks: int  # beyond what the longest request needs for itself
    depth: int  # steps that stay unread
    settings: dict[str, Any]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    count = draw(st.integers(1, 10))
    numbers = st.integers(0, count - 1)
    chunked = draw(st.booleans())
    return Scene(
        prompts=draw(st.lists(st.integers(0, PROMPTS - 1), min_size=count, max_size=count)),
        max_tokens=draw(st.lists(st.integers(1, ANSWER), min_size=count, max_size=count)),
        arrivals=draw(st.dictionaries(numbers, st.integers(0, 25))),
        cancels=draw(st.dictionaries(numbers, st.integers(0, 40), max_size=3)),
        spare_blocks=draw(st.integers(0, 4)),
        depth=draw(st.integers(0, 2)),
        settings={
            "chunked_prefill": chunked,
            "max_num_tokens": draw(st.integers(1 if chunked else LONGEST, LONGEST + 20)),
            "max_batch_size": draw(st.integers(1, 6)),
            "block_tokens": draw(st.sampled_from([1, 2, 4, 7, 16])),
            "prefix_cache": draw(st.booleans()),
        },
    )


def play(stack: Stack, scene: Scene, requests: list[Request]) -> Heard:
    """The requests, each for as many tokens as the scene says; without foresight, so that many are preempted."""
    requests = [replace(one, max_tokens=most) for one, most in zip(requests, scene.max_tokens, strict=True)]
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    blocks = -(-longest // scene.settings["block_tokens"]) + scene.spare_blocks
    engine = engine_for(stack, blocks, **scene.settings)
    engine.depth = scene.depth
    with (
        mock.patch.object(engine.scheduler, "_preempt", wraps=engine.scheduler._preempt) as preempted,
        mock.patch.object(Outlook, "admits", return_value=True),
    ):
        heard = serve(engine, requests, scene.arrivals, scene.cancels)
    event(f"preempted: {preempted.call_count > 0}")
    return heard
