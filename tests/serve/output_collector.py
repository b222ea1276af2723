"""Outputs of requests as their callbacks receive them."""

from dataclasses import dataclass, field, replace

from llmb.serve.request import Request, RequestOutput


@dataclass
class OutputCollector:
    """Collects what the callbacks receive."""

    streamed: dict[int, list[int]] = field(default_factory=dict)
    outputs: dict[int, RequestOutput] = field(default_factory=dict)

    def listen(self, request: Request) -> Request:
        self.streamed[request.request_id] = []
        return replace(request, on_token=self.token, on_end=self.end)

    def token(self, number: int, token: int) -> None:
        assert number not in self.outputs, "a token after the end"
        self.streamed[number].append(token)

    def end(self, output: RequestOutput) -> None:
        assert output.request_id not in self.outputs, "ended twice"
        assert list(output.token_ids) == self.streamed[output.request_id]
        self.outputs[output.request_id] = output

    def tokens(self) -> list[tuple[int, ...]]:
        """Return the output tokens in order of request ids."""
        return [self.outputs[number].token_ids for number in sorted(self.outputs)]
