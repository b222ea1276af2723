"""Figures of speculative decoding: what was accepted, and its speed-up beside the modelled one."""

from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.events import ServingFacts
from llmb.results.result import Speculation


def speculation_fields(facts: dict[int, ServingFacts], config: RunConfig | None) -> dict:
    """Return the speculation of a run; empty without one, or while nothing was verified."""
    work = config.workload if config is not None else None
    counted = next((fact for fact in facts.values() if fact.verifications), None)
    if config is None or not isinstance(work, Inference) or work.draft_model is None or counted is None:
        return {}
    assert counted.verifications
    trials, accepted = counted.draft_trials or (), counted.draft_accepted or ()
    rates = tuple(count / tried if tried else None for count, tried in zip(accepted, trials, strict=True))
    plain, drafted = counted.plain_tpot_ms, counted.drafted_tpot_ms
    modelled, note = _modelled_speedup(config, rates)
    return {
        "speculation": Speculation(
            draft=work.draft_model.name,
            tokens=work.speculative_tokens,
            acceptance_forced=work.draft_acceptance is not None,
            stated_acceptance=work.draft_acceptance,
            acceptance=rates,
            tokens_per_step=1 + sum(accepted) / counted.verifications,
            plain_tpot_ms=plain,
            drafted_tpot_ms=drafted,
            speedup=plain / drafted if plain and drafted else None,
            modelled_speedup=modelled,
            modelled_note=note,
        )
    }


def _modelled_speedup(config: RunConfig, acceptance: tuple[float | None, ...]) -> tuple[float | None, str | None]:
    """Return the speed-up that the model of a step gives for the measured acceptance, or why there is none."""
    from llmb.perfmodel.explain.run_prediction import unpredictable  # here: few runs need the predictor
    from llmb.perfmodel.serving_time.serving_fields import serving_setup_of
    from llmb.perfmodel.serving_time.serving_predictor import predict_speculation

    if (note := unpredictable(config)) is not None:
        return None, note
    try:
        rates = tuple(rate or 0.0 for rate in acceptance)  # after a draft that was never accepted none counts
        return predict_speculation(serving_setup_of(config), rates).speedup, None
    except ConfigError as error:
        return None, str(error)
