"""Loop of an engine process: take commands, step the engine, send one report of everything that the step changed."""

from llmb.errors import ConfigError
from llmb.serve.engine import Engine
from llmb.serve.http.command_broadcast import CommandSource
from llmb.serve.http.engine_messages import Command, EngineChannel, EngineState, StepReport, Submit
from llmb.serve.request import FinishReason, Request, RequestOutput, TokenLogprobs


class EngineLoop:
    """An engine that obeys commands. `reports`: this rank does so for all ranks that compute the same requests."""

    def __init__(self, engine: Engine, channel: EngineChannel, shard: int, eos: frozenset[int], reports: bool):
        self.engine, self.channel, self.shard, self.eos, self.reports = engine, channel, shard, eos, reports
        self._state = EngineState()
        self._token_logprobs: dict[int, TokenLogprobs] = {}  # by request id, of the token that comes next
        self._clear()

    def run(self, commands: CommandSource) -> None:
        """Step until the channel is closed."""
        idle = True
        while True:
            for command in commands.receive(self.engine, idle):
                if command.shard == self.shard:
                    self.apply(command)
            idle = not self.engine.step()
            self.send_report()

    def apply(self, command: Command) -> None:
        """Submit or cancel a request."""
        if not isinstance(command, Submit):
            self.engine.cancel(command.request_id)
            return
        request = Request(
            request_id=command.request_id,
            prompt=command.token_ids,
            max_tokens=command.max_tokens,
            sampling_params=command.sampling_params,
            eos=self.eos,
            ignore_eos=command.ignore_eos,
            on_start=self._on_start if self.reports else None,
            on_token=self._on_token if self.reports else None,
            on_logprobs=self._token_logprobs.__setitem__ if self.reports else None,
            on_end=self._on_end if self.reports else None,
        )
        try:
            self.engine.submit(request)
        except ConfigError as error:
            self._refusals.append((command.request_id, str(error)))

    def send_report(self) -> None:
        """Send what has happened since the last report, if anything has."""
        if not self.reports:
            return
        state = self._read_state()
        if not (self._tokens or self._starts or self._ends or self._refusals) and state == self._state:
            return
        self._state = state
        report = StepReport(
            starts=self._starts,
            request_ids=self._request_ids,
            tokens=self._tokens,
            logprobs=self._logprobs or None,
            ends=self._ends,
            refusals=self._refusals,
            state=state,
        )
        self._clear()
        self.channel.send(report)

    def _clear(self) -> None:
        self._starts: list[tuple[int, int]] = []
        self._request_ids: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._ends: list[tuple[int, FinishReason]] = []
        self._refusals: list[tuple[int, str]] = []

    def _read_state(self) -> EngineState:
        stats, scheduler = self.engine.stats, self.engine.scheduler
        return EngineState(
            waiting=stats.waiting,
            running=stats.running,
            blocks_used=stats.blocks_used,
            blocks=stats.blocks,
            free_slots=scheduler.num_free_slots,
            slots=scheduler.limits.max_batch_size,
            preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.num_prefix_queries,
            prefix_hits=scheduler.num_prefix_hits,
        )

    def _on_start(self, request_id: int, cached_tokens: int) -> None:
        self._starts.append((request_id, cached_tokens))

    def _on_token(self, request_id: int, token: int) -> None:
        if self._token_logprobs and (logprobs := self._token_logprobs.pop(request_id, None)) is not None:
            self._logprobs[len(self._tokens)] = logprobs
        self._request_ids.append(request_id)
        self._tokens.append(token)

    def _on_end(self, output: RequestOutput) -> None:
        if output.finish_reason != "cancelled":  # of those the HTTP process has forgotten the request already
            self._ends.append((output.request_id, output.finish_reason))
