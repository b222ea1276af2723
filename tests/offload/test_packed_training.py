"""Packed documents train as if each were computed by itself: losses, gradient norms, and the weights they lead to."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from reference_training import CPU, LEAST, SMOOTH, UNTIED, assert_trains_as, train_by_autograd, trainer_of

from llmb.config.offload_plan import Plan
from llmb.formats.token_file import TokenWriter
from llmb.models.llama import Llama
from llmb.runtime.token_data import TokenFile

END, STEPS = 3, 3
PLANS = {
    "one chunk": replace(LEAST, gbs=3, seqlen=24, chunk_tokens=24, levels="FAI"),
    "documents over chunks": replace(LEAST, gbs=3, seqlen=24, chunk_tokens=5, levels="FAIFA" * 3),
    "sequences in a chunk": replace(LEAST, gbs=3, seqlen=24, seqs_per_group=2, chunk_tokens=48, levels="IAF"),
}


@pytest.fixture
def text(tmp_path: Path) -> TokenFile:
    """Texts of 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(2)
    with TokenWriter(tmp_path / "tokens", UNTIED.vocab, END) as file:
        for length in (5, 1, 12, 40, 2, 7, 30, 19, 1, 1, 25):
            file.add([*torch.randint(4, 300, (length - 1,), generator=generator).tolist(), END])
    return TokenFile(tmp_path / "tokens")


def documents(text: TokenFile, plan: Plan, step: int) -> list[tuple[list[int], list[int]]]:
    """Tokens of each document of a step, and their labels; one that a border cuts knows its next token."""
    actual = []
    for sequence in text.sequences((step - 1) * plan.gbs, (plan.gbs, plan.seqlen + 1), CPU).tolist():
        first = 0
        for place in range(plan.seqlen):
            if sequence[place] == END or place == plan.seqlen - 1:
                labels = sequence[first + 1 : place + 2]
                actual.append((sequence[first : place + 1], [*labels[:-1], -100] if sequence[place] == END else labels))
                first = place + 1
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_documents_do_not_attend_to_one_another(text: TokenFile, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmb.offload.task_compute.EPS", SMOOTH)  # as in the proof without packing

    def backward(network: Llama, step: int) -> float:
        apart = documents(text, PLANS[plan], step)
        num_labels = sum(label >= 0 for _, labels in apart for label in labels)
        total = 0.0
        for tokens, labels in apart:
            logits = network(torch.tensor([tokens]))[0]
            loss = F.cross_entropy(logits, torch.tensor(labels), reduction="sum") / num_labels
            loss.backward()
            total += loss.item()
        return total

    reference = train_by_autograd(UNTIED, backward, STEPS)
    assert_trains_as(trainer_of(UNTIED, PLANS[plan], text=text), STEPS, reference)
