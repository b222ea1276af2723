"""Dense architectures train on several ranks as on one: loss, gradient norm and weights after two steps."""

from dataclasses import replace

import pytest
from dense_cases import DENSE_CASES
from training_ranks import Trained, outcome

from llmb.config.model import Model
from llmb.config.parallel_layout import check_model
from llmb.config.spec import Parallel
from llmb.errors import ConfigError

LAYOUTS = {"tp2 cp2": Parallel(tp=2, cp=2), "pp2 fsdp2": Parallel(pp=2, dp=2, fsdp=True)}
LIGHT = ("llama biases", "qwen3 qk-norm-tied")  # a bias of the output projection, norms of each head, tied embeddings


def trained(model: Model, parallel: Parallel) -> Trained:
    """Train, and leave out biases of queries and keys: they begin at 0, and their gradients are mostly rounding.

    Adam scales that up to full steps. tests/serve/test_dense_models.py compares their gradients.
    """
    run = outcome(model, 0, parallel=parallel, dtype="fp32", steps=2, mbs=1, gbs=4, lr=3e-4, lr_warmup_steps=0)
    return replace(run, tensors={name: x for name, x in run.tensors.items() if not name.endswith(("q_bias", "k_bias"))})


def cases() -> list[object]:
    listed = []
    for model in DENSE_CASES:
        name = f"{model.architecture} {model.name}"
        for layout in LAYOUTS:
            is_light = name in LIGHT and layout == "tp2 cp2"
            marks = () if is_light else (pytest.mark.nightly,)
            listed.append(pytest.param(model, layout, id=f"{name} {layout}", marks=marks))
    return listed


@pytest.mark.parametrize(("model", "layout"), cases())
def test_ranks_train_as_one_process_does(model: Model, layout: str) -> None:
    try:
        check_model(LAYOUTS[layout], model)
    except ConfigError as error:
        assert "tp 2" in str(error)  # one KV head, or queries that are normed as a whole
        return
    assert trained(model, LAYOUTS[layout]).max_distance(trained(model, Parallel())) < 1e-5
