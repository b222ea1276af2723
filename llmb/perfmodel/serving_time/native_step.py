"""Seconds of one step of the native engine, whose kernels, CUDA graphs and tiles are known.

    NativeStep.of(setup, work, rates, on, c).terms(decodes=64, context=1500.0)

Steps of one or two tokens run skinny GEMMs on CUDA cores, with norms, activations and residual adds fused into them.
Others run GEMMs on tensor cores over rows padded to a captured size and then to whole tiles; the ramp of a GEMM (its
first loads, its last tile) counts where reading weights bounds it.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from llmb.perfmodel.serving_time.graph_sizes import MAX_MIXED_TOKENS, decode_graph_sizes, mixed_graph_tokens
from llmb.perfmodel.serving_time.serving_setup import ServingSetup
from llmb.perfmodel.serving_time.serving_step import ServingRates, longer, step_seconds
from llmb.perfmodel.serving_time.serving_work import ServingWork
from llmb.perfmodel.step_time.cluster_fabric import Device
from llmb.perfmodel.step_time.fitted_constants import Constants

SKINNY_TOKENS = 2  # the most that skinny GEMMs take
CONVERSION = 0.5  # of an fp8 weight to fp32, in multiply-adds
TILE = 128  # rows of a GEMM tile
SMALL_TILES = (16, 32, 64)  # rows of tiles of experts, where that many hold the mean; others have 128
BLOCK_SCALED_TILES = (16, 32, 64)  # rows of tiles of dense GEMMs with block scales, of as few tokens
PREFETCHED_TOKENS = 16  # the most of a step whose block-scaled GEMMs load weights before their input is written (PDL)
DRAFT_LAYERS = 2  # a multi-token-prediction layer and the LM head, in layers


@dataclass(frozen=True, kw_only=True)
class NativeStep:
    """Steps of one setup, on one replica."""

    setup: ServingSetup
    work: ServingWork
    rates: ServingRates
    skinny_flops: float
    skinny_read: float  # bytes/s
    small_tiles: float  # rate of tiles of SMALL_TILES against larger ones
    decode_sizes: list[int]
    mixed_sizes: list[int]  # none: steps with prefill chunks have no graph

    @classmethod
    def of(cls, setup: ServingSetup, work: ServingWork, rates: ServingRates, on: Device, c: Constants) -> "NativeStep":
        """Return the steps of a setup; prefill of MLA and Mamba layers takes sizes from the host."""
        model = setup.shape.model
        has_graphs = model.mla is None and not model.blocks.get("mamba")
        return cls(
            setup=setup,
            work=work,
            rates=rates,
            skinny_flops=on.fabric.sms * c["skinny_native"],
            skinny_read=on.memory_bandwidth * c["read_native"],
            small_tiles=c["small_tiles_native"],
            decode_sizes=decode_graph_sizes(setup.max_batch_size),
            mixed_sizes=mixed_graph_tokens(setup.max_num_tokens) if has_graphs else [],
        )

    @property
    def has_skinny(self) -> bool:
        """Whether skinny GEMMs take the weights: not those of 4 bits, nor those scaled by blocks (DeepSeek)."""
        model = self.setup.shape.model
        return self.setup.dtype == "bf16" or (self.setup.dtype == "fp8" and model.mla is None)

    def terms(
        self, *, decodes: float, context: float, prefill: float = 0.0, prompts: float = 0.0, pairs: float = 0.0,
        window_pairs: float = 0.0,
    ) -> dict[str, float]:  # fmt: skip
        """Return the seconds of a step by kind.

        `context`: cached tokens of a decode, on average; `prefill`: prompt tokens, of which `prompts` sample.
        """
        setup, r = self.setup, self.rates
        tokens = decodes * (1 + setup.draft_tokens) + prefill
        if not prefill and tokens <= SKINNY_TOKENS and self.has_skinny:
            return self._skinny(decodes, context, tokens)
        sampled = decodes * (1 + setup.draft_tokens) + prompts
        computed = self._padded(decodes, tokens, prefill)
        replicas = setup.attention_dp
        if setup.has_block_scales and tokens <= PREFETCHED_TOKENS:
            r = replace(r, ramp=0.0)
        terms: dict[str, float] = step_seconds(
            self.work, r, tokens=computed, all_tokens=computed * replicas, sampled=sampled, decodes=decodes,
            context=context, pairs=pairs, window_pairs=window_pairs, rows=self._rows(computed),
            expert_rows=self._expert_rows(computed * replicas),
        )  # fmt: skip
        if prefill and not (self.mixed_sizes and tokens <= MAX_MIXED_TOKENS):
            # The host launches every kernel, and the GPU waits where that takes longer than its work.
            launched = sum(terms.values()) - terms["host"]
            terms["launch"] += longer(launched, self.work.kernels * r.eager) - launched
        return self._pipelined(terms)

    def steady_state(self, slots: int) -> tuple[float, float]:
        """Return about the most output tokens/s and the least TPOT of an engine that always runs `slots` requests.

        Prompts lengthen the steps that they share with decodes, as many at once as the token budget holds. TPOT is
        least where that part of the time falls on requests that wait for their first token.
        """
        setup = self.setup
        running = max(1, slots // setup.attention_dp)
        batch, context = self.stage_decodes(running), setup.isl + setup.osl / 2
        free = max(setup.max_num_tokens - running, setup.max_num_tokens // 8)
        prompts = min(running, free // setup.isl) or free / setup.isl  # or a chunk of one
        decode = sum(self.terms(decodes=batch, context=context).values())
        mixed = self.terms(
            decodes=batch, context=context, prefill=prompts * setup.isl, prompts=prompts,
            pairs=prompts * setup.isl**2 / 2,
        )  # fmt: skip
        decoding = setup.osl / setup.emitted * decode
        prefilling = batch / prompts * max(0.0, sum(mixed.values()) - decode)
        seconds = decoding + prefilling
        return slots * setup.osl / seconds, decoding / seconds * decode / setup.emitted

    def stage_decodes(self, decodes: float) -> float:
        """Return the decodes of one step of a pipeline stage, which is none or has a whole one."""
        return max(1.0, decodes / self.setup.pp) if decodes else 0.0

    def decode_graph(self, decodes: float) -> int:
        """Return the decodes of the graph that a step without prefill replays."""
        sizes = self.decode_sizes
        return sizes[min(bisect_left(sizes, decodes), len(sizes) - 1)]

    def _rows(self, tokens: float) -> float:
        """Return the rows of dense GEMMs in whole tiles."""
        tiles = BLOCK_SCALED_TILES if self.setup.has_block_scales else ()
        return next((tile for tile in tiles if tokens <= tile), -(-tokens // TILE) * TILE)

    def _expert_rows(self, tokens: float) -> float:
        """Return the rows of an active expert in whole tiles, as rows of large tiles that take as long.

        Tokens of an expert follow a Poisson distribution, as those of random weights are routed evenly.
        """
        mean = self.work.routed * tokens
        if not mean:
            return 0.0
        tile = next((tile for tile in SMALL_TILES if mean <= tile), TILE)
        active = 1 - math.exp(-mean)  # of the experts
        filled = sum(_poisson_above(tile * count, mean) for count in range(1, int(2 * mean / tile) + 2))
        return tile * (1 + filled / active) / (self.small_tiles if tile < TILE else 1.0)

    def _padded(self, decodes: float, tokens: float, prefill: float) -> float:
        """Return the tokens of the captured step that is replayed."""
        if not prefill:
            return max(tokens, self.decode_graph(decodes) * (1 + self.setup.draft_tokens))
        sizes = self.mixed_sizes if tokens <= MAX_MIXED_TOKENS else []
        return sizes[min(bisect_left(sizes, tokens), len(sizes) - 1)] if sizes else tokens

    def _skinny(self, decodes: float, context: float, tokens: float) -> dict[str, float]:
        """Return a step of one or two tokens: weights are read, then multiplied on CUDA cores, hardly overlapping."""
        work, r, fp8 = self.work, self.rates, self.setup.dtype == "fp8"
        terms: dict[str, float] = step_seconds(
            work, r, tokens=tokens, all_tokens=tokens * self.setup.attention_dp, sampled=tokens, decodes=decodes,
            context=context,
        )  # fmt: skip
        weights = work.low_bytes + work.high_bytes + work.head_bytes
        macs = work.low_macs * (tokens + CONVERSION * fp8) + (work.high_macs + work.head_macs) * tokens
        terms["gemm"] = weights / self.skinny_read + 2 * macs / self.skinny_flops
        terms["memory_bound"] = 0.0
        terms["launch"] -= work.fused_kernels * r.kernel  # each starts before the one before it ends
        return self._pipelined(terms)

    def _pipelined(self, terms: dict[str, float]) -> dict[str, float]:
        """Return the terms with sends between pipeline stages and with draft tokens."""
        setup = self.setup
        terms["communication"] += (setup.pp - 1) * self.rates.ring
        drafts = 1 + setup.draft_tokens * DRAFT_LAYERS / setup.shape.model.layers
        return {name: seconds * drafts for name, seconds in terms.items()} if setup.draft_tokens else terms


def _poisson_above(count: float, mean: float) -> float:
    """Return the probability of more than `count`, by the normal distribution of the same mean and variance."""
    return 0.5 * math.erfc((count + 0.5 - mean) / math.sqrt(2 * mean))
