"""The AdamW of replicated parameters changes the same bits as torch.optim.AdamW."""

import pytest
import torch
from torch import Tensor, nn

from llmb.runtime.adamw_settings import BETAS, EPS, WEIGHT_DECAY
from llmb.train.fused_adamw import FusedAdamW


def random_weights() -> list[nn.Parameter]:
    """Return two matrices, of which the second never has a gradient, and two vectors."""
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((5, 7), (2, 3), (9,), (1,))]


def set_gradients(weights: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in (weights[0], *weights[2:]):
        weight.grad = torch.randn(weight.shape, generator=generator)


def bits(values: list[Tensor]) -> list[list[int]]:
    return [value.detach().view(torch.int32).flatten().tolist() for value in values]


@pytest.mark.parametrize("discarded", [None, 2], ids=str)
def test_bits_are_those_of_torch(discarded: int | None) -> None:
    weights, reference_weights = random_weights(), random_weights()
    optimizer = FusedAdamW(weights)
    groups = [
        {"params": reference_weights[:2], "weight_decay": WEIGHT_DECAY},
        {"params": reference_weights[2:], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS, fused=True)
    for step in range(1, 5):
        lr, grad_scale, found_inf = 1e-2 / step, torch.tensor(1.0 + step / 7), torch.tensor(float(step == discarded))
        set_gradients(weights, step)
        optimizer.step(lr, grad_scale, found_inf)
        set_gradients(reference_weights, step)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.grad_scale, reference.found_inf = grad_scale, found_inf
        reference.step()
        assert bits(weights) == bits(reference_weights)
    states = [optimizer.state.get(weight, {}) for weight in weights]
    reference_states = [reference.state.get(weight, {}) for weight in reference_weights]
    assert [state.keys() for state in states] == [state.keys() for state in reference_states]
    assert states[1] == {}
    for state, reference_state in zip(states, reference_states, strict=True):
        assert bits([*state.values()]) == bits([*reference_state.values()])
        assert all(step == (4 if discarded is None else 3) for name, step in state.items() if name == "step")
