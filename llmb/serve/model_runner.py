"""Model runner of one device: uploads a batch, runs the model, samples tokens and copies them to the host.

The sampled tokens stay on the device too, one per slot, so that the next step can be launched before the host has read
this one. Most steps are replays of CUDA graphs where those are enabled (`step_graphs.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from llmb.serve.input_staging import NUM_HOST_BUFFERS, InputStaging, StepBuffer, StepSizes, max_rows
from llmb.serve.layers.served_model import ServedModel
from llmb.serve.rank_groups import PendingTransfer
from llmb.serve.request import TokenLogprobs
from llmb.serve.sampler import LogprobRows, compute_logprobs, greedy, sample, uniform
from llmb.serve.step_batch import ScheduledChunk, StepBatch, StepInputs
from llmb.serve.step_graphs import GraphSize, StepGraphs, StepOutput


@dataclass
class LaunchedStep:
    """Tokens of a step on their way to the host, and its unfinished transfers to other ranks."""

    tokens_S: Tensor
    ready: torch.cuda.Event | None = None
    transfers: Sequence[PendingTransfer] = ()
    logprob_rows: LogprobRows | None = None
    graph_size: GraphSize | None = None

    def is_done(self) -> bool:
        return self.ready is None or self.ready.query()

    def tokens(self) -> list[int]:
        if self.ready is not None:
            self.ready.synchronize()
        for transfer in self.transfers:
            transfer.wait()
        tokens: list[int] = self.tokens_S.tolist()
        return tokens

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        return {} if self.logprob_rows is None else self.logprob_rows.read()


EMPTY_STEP = LaunchedStep(torch.empty(0, dtype=torch.int64))


class TorchModelRunner:
    """A model with its KV cache, and the last token of each slot.

    `num_drafts`: draft tokens that follow it. A draft model has those, and the block tables, of its `target`.
    """

    def __init__(
        self,
        model: ServedModel,
        slots: int,
        max_seq_len: int,
        block_tokens: int,
        max_num_tokens: int,
        graph_sizes: tuple[GraphSize, ...] = (),
        num_tables: int = 1,
        num_drafts: int = 0,
        target: "TorchModelRunner | None" = None,
    ):
        self.model, self.device = model, model.groups.device
        if target is None:
            num_blocks = -(-max_seq_len // block_tokens)
            # One launched step per pipeline stage, or the steps of a draft model before one.
            num_buffers = max(NUM_HOST_BUFFERS, model.groups.stage.size + 1, num_drafts + 3)
            rows = max_rows(slots, num_drafts)
            max_padding = max((size.num_decodes + size.num_prefills - rows for size in graph_sizes), default=0)
            self.staging = InputStaging(
                slots, num_blocks, block_tokens, max_num_tokens, self.device, num_buffers, max_padding, num_tables,
                num_drafts,
            )  # fmt: skip
            tokens = (1 + num_drafts) * (slots + 1)  # the last slot is padding
            self.last_tokens = torch.zeros(tokens, dtype=torch.int64, device=self.device)
        else:
            self.staging, self.last_tokens = target.staging, target.last_tokens
        self.graphs = StepGraphs(self.staging, self.compute, max_seq_len, self.last_tokens, graph_sizes)
        # It determines the number of KV splits: those of the graphs are compiled, others would be while users wait.
        self._graph_seq_len = max_seq_len if self.graphs.decode_sizes else None

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> LaunchedStep:
        """Launch the step, unless no rank of the expert group has tokens to compute."""
        if not self.model.groups.experts.begin_step(batch.num_tokens):
            return EMPTY_STEP
        output = self.run(batch)
        chunks = batch.sampling_chunks
        tokens_S = self.sample(output, chunks)
        step = self.copy_to_host(tokens_S, self.logprobs(output, tokens_S, chunks))
        return replace(step, graph_size=output.graph_size)

    def run(self, batch: StepBatch) -> StepOutput:
        """Replay the graph of a step, or compute it kernel by kernel; its greedy tokens stay on the device."""
        return self.graphs.launch(batch) or self.compute(*self.upload(batch))

    def compute(self, buffer: StepBuffer, inputs: StepInputs) -> StepOutput:
        """Run the whole step, from input tokens to greedy tokens."""
        return self.sample_greedy(self.model.forward(self.embed(buffer), inputs), buffer)

    def embed(self, buffer: StepBuffer) -> Tensor:
        """Embed the tokens; those the host does not have are read from `last_tokens`."""
        slot_N = (-1 - buffer.tokens_N).clamp(min=0)
        return self.model.embed(torch.where(buffer.tokens_N < 0, self.last_tokens[slot_N], buffer.tokens_N))

    def sample_greedy(self, x_NC: Tensor, buffer: StepBuffer) -> StepOutput:
        """Compute the logits of the sampling rows and store their greedy tokens as the last of their slots."""
        logits_SV = self.model.logits(x_NC, buffer.logits_indices_S)
        tokens_S = greedy(logits_SV)
        self.last_tokens[buffer.sample_slots_S] = tokens_S
        return StepOutput(logits_SV, tokens_S, buffer.sample_slots_S)

    def sample(self, output: StepOutput, chunks: list[ScheduledChunk]) -> Tensor:
        """Return the greedy tokens, or sample by the requests' parameters if any has a temperature."""
        count = len(chunks)
        if all(chunk.sequence.request.sampling_params.temperature == 0 for chunk in chunks):
            return output.tokens_S[:count]
        tokens_S = self.model.groups.tp.broadcast(sample_with_params(output.logits_SV[:count], chunks))
        self.last_tokens[output.sample_slots_S[:count]] = tokens_S
        return tokens_S

    def logprobs(self, output: StepOutput, tokens_S: Tensor, chunks: list[ScheduledChunk]) -> LogprobRows | None:
        """Return the log probabilities of tokens whose requests ask for them; None: no request does."""
        params = [chunk.sequence.request.sampling_params for chunk in chunks]
        return compute_logprobs(output.logits_SV, tokens_S, params)

    def upload(self, batch: StepBatch) -> tuple[StepBuffer, StepInputs]:
        """Upload a batch without padding; an empty one gets one row of padding, as kernels need a row."""
        max_seq_len = max((chunk.end for chunk in batch.chunks), default=1)
        num_decodes = batch.num_decodes if batch.chunks else 1
        sizes = StepSizes(
            num_tokens=max(1, batch.num_tokens),
            num_decodes=num_decodes,
            num_prefills=len(batch.chunks[num_decodes:]),
            num_samples=len(batch.sampling_chunks),
            num_blocks=-(-max_seq_len // self.staging.block_tokens),
            num_tables=self.staging.num_tables,
        )
        buffer = StepBuffer.on(self.device, sizes)
        self.staging.upload(batch, buffer)
        return buffer, buffer.inputs(batch, self._graph_seq_len or max_seq_len, num_decodes)

    def copy_to_host(self, tokens_S: Tensor, logprob_rows: LogprobRows | None = None) -> LaunchedStep:
        """Start the D2H copy of the sampled tokens and their log probabilities."""
        if self.device.type != "cuda":
            return LaunchedStep(tokens_S, logprob_rows=logprob_rows)
        host_rows = None if logprob_rows is None else logprob_rows.to_host()
        host_S = torch.empty(tokens_S.shape, dtype=tokens_S.dtype, pin_memory=True)
        host_S.copy_(tokens_S, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return LaunchedStep(host_S, ready, logprob_rows=host_rows)


def sample_with_params(logits_SV: Tensor, chunks: list[ScheduledChunk]) -> Tensor:
    """Sample a token for each chunk by its request's parameters.

    The random number follows from the seed and the output position of the token, which comes right after the chunk.
    """
    requests = [chunk.sequence.request for chunk in chunks]
    positions = [chunk.end - len(request.prompt) for chunk, request in zip(chunks, requests, strict=True)]
    params = [request.sampling_params for request in requests]
    draws = [uniform(param.seed, position) for param, position in zip(params, positions, strict=True)]
    return sample(logits_SV, params, draws)
