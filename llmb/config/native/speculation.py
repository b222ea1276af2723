"""Speculative decoding of a run: its draft model, the acceptance that is stated for it, and what is refused.

    --set speculative_tokens=4 --set draft=llama3.2-1b --set draft_acceptance=acceptance.json

The file has one number for each draft position, as a JSON or YAML list: [0.8, 0.7, 0.6, 0.5]. Each is the probability
that the draft is accepted if all drafts before it were. Without the file a draft is accepted where it equals what the
model itself says, which random weights hardly ever do.
"""

from dataclasses import replace
from pathlib import Path

from llmb.config.model import Model
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError, UnknownName
from llmb.formats.yaml_file import load_yaml

MOST_DRAFTS = 16
FIRST_LAYERS = "layers:"
CHOICES = "layers:N for its first N layers, a published model such as llama3.2-1b, or a folder of weights"


def read_acceptance(text: str) -> list[float] | None:
    """Return the probabilities of a file, or of none."""
    if text.strip().lower() in ("none", "null", "na"):
        return None
    path = Path(text).expanduser()
    expected = "one probability for each draft position, such as [0.8, 0.7, 0.6]"
    data = load_yaml(path, expected)
    numbers = data if isinstance(data, list) else []
    is_number = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in numbers]
    if not numbers or not all(is_number):
        raise ConfigError(f"draft_acceptance: {path} must hold {expected}, got {str(data)[:60]!r}")
    for position, value in enumerate(numbers, start=1):
        if not 0 <= value <= 1:
            raise ConfigError(f"draft_acceptance: {path}: position {position} has {value}; it must be 0 to 1")
    return [float(value) for value in numbers]


def with_draft(config: RunConfig) -> RunConfig:
    """Return the run with the shape of its draft model; refuse settings without effect or against one another."""
    work = config.workload
    if not isinstance(work, Inference):
        return config
    if work.speculative_tokens == 0:
        for name in ("draft", "draft_acceptance"):
            if getattr(work, name) is not None:
                raise ConfigError(f"{name} has no effect without drafts; set speculative_tokens=N, such as 4")
        return config
    if config.engine != "native":
        raise ConfigError(f"speculative_tokens has no effect with the engine {config.engine}; leave it out")
    if work.draft is None:
        raise ConfigError(f"speculative_tokens={work.speculative_tokens} needs a draft model; set draft: {CHOICES}")
    config = replace(config, workload=replace(work, draft_model=_draft_model(config.model, work.draft)))
    check_speculation(config)
    return config


def _draft_model(target: Model, draft: str) -> Model:
    """Return the shape of the draft model that a setting names."""
    if draft.startswith(FIRST_LAYERS):
        count = draft.removeprefix(FIRST_LAYERS)
        if not count.isdecimal() or not 0 < int(count) < target.layers:
            raise ConfigError(
                f"draft={draft}: {target.name} has {target.layers} layers; choose layers:N with N below that"
            )
        return replace(target, name=f"{target.name}, {count} of {target.layers} layers", layers=int(count))
    if Path(draft, "config.json").is_file():
        from llmb.config.huggingface.hf_config import load_hf_config

        return load_hf_config(Path(draft))
    from llmb.perfmodel.shapes.model_catalog import catalog_names, find_model

    try:
        shape = find_model(draft)
        if shape.model.experts is not None or shape.window_layers:
            raise ConfigError(
                f"draft={draft}: a published draft is a dense model without sliding windows; choose another"
            )
        return shape.model
    except UnknownName as error:
        if "/" in draft:
            raise ConfigError(f"draft={draft} is no weights folder: it holds no config.json") from error
        raise UnknownName("draft", draft, [f"{FIRST_LAYERS}N", *sorted(set(catalog_names().values()))]) from error


def check_speculation(config: RunConfig) -> None:
    """Refuse what the native engine does not decode speculatively, by name."""
    work, k = config.workload, getattr(config.workload, "speculative_tokens", 0)
    if not isinstance(work, Inference) or k == 0:
        return
    if work.draft_model is None:
        raise ConfigError(f"speculative_tokens={k}: the run has no draft_model; resolve it with draft: {CHOICES}")
    if k > MOST_DRAFTS:
        raise ConfigError(f"speculative_tokens={k}: at most {MOST_DRAFTS}")
    if work.draft_acceptance is not None and len(work.draft_acceptance) != k:
        raise ConfigError(
            f"draft_acceptance has {len(work.draft_acceptance)} positions and speculative_tokens is {k}; "
            "give one probability for each draft token"
        )
    if work.temperature > 0:
        raise ConfigError(
            f"speculative_tokens with temperature={work.temperature:g}: drafts are verified by greedy equality, not by "
            "rejection sampling; leave out temperature"
        )
    if config.machine.gpus > 1:
        raise ConfigError(f"speculative_tokens on {config.machine.gpus} GPUs: it runs on one; choose --scale 1")
    for model in (config.model, work.draft_model):
        _check_layers(model)
    if config.precision.dtype == "mxfp4":
        raise ConfigError("speculative_tokens with dtype mxfp4: the draft model has no experts; choose bf16 or fp8")
    if work.draft_model.vocab != config.model.vocab:
        raise ConfigError(
            f"draft={work.draft}: its vocabulary has {work.draft_model.vocab} tokens and that of {config.model.name} "
            f"{config.model.vocab}; drafts must be tokens of the model"
        )
    if work.max_batch_size * (1 + k) > work.max_num_tokens:
        raise ConfigError(
            f"MAX_BATCH_SIZE={work.max_batch_size} requests of {1 + k} tokens each (speculative_tokens={k}) exceed "
            f"MAX_NUM_TOKENS={work.max_num_tokens} per step; set MAX_NUM_TOKENS={work.max_batch_size * (1 + k)} or "
            f"MAX_BATCH_SIZE={max(1, work.max_num_tokens // (1 + k))}"
        )


def _check_layers(model: Model) -> None:
    """Refuse layers whose cache cannot be rolled back, or whose kernels take one token of a sequence only."""
    reasons = {
        "Mamba layers, whose state is not rolled back": bool(model.blocks.get("mamba")),
        "MLA, whose decode takes one token of a sequence": model.mla is not None,
        "a sliding window, whose freed blocks do not come back": bool(model.window_layers),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"speculative_tokens: {model.name} has {reason}; leave it out or choose another model")


def refuse_drafts(config: RunConfig) -> None:
    """Refuse speculative decoding in a server: each request chooses its own sampling, and drafts are greedy."""
    if getattr(config.workload, "speculative_tokens", 0):
        raise ConfigError("speculative_tokens: a server samples as each request asks, drafts are greedy; leave it out")


def drafts_by_first_layers(config: RunConfig) -> bool:
    """Return whether the draft model is the first layers of the model itself, with its weights."""
    work = config.workload
    return isinstance(work, Inference) and work.draft is not None and work.draft.startswith(FIRST_LAYERS)


def draft_config(config: RunConfig) -> RunConfig | None:
    """Return the run of the draft model alone, in the number formats of the model it drafts for; None: no draft."""
    work = config.workload
    if not isinstance(work, Inference) or work.draft_model is None:
        return None
    folder = work.draft if work.draft is not None and Path(work.draft, "config.json").is_file() else None
    alone = replace(
        work,
        weights=work.weights if drafts_by_first_layers(config) else folder,
        speculative_tokens=0,
        draft=None,
        draft_acceptance=None,
        draft_model=None,
    )
    return replace(config, model=work.draft_model, workload=alone)
