"""Explanation of a stored run: a job, a run folder or a result.json."""

from dataclasses import replace
from pathlib import Path

from llmb.cli.run_options import load_recipes
from llmb.config.load_settings import LoadConfig, config_from_json
from llmb.config.serialization import build, read_json
from llmb.config.spec import Inference, OutOfCore, RunConfig, Training
from llmb.errors import ConfigError
from llmb.perfmodel.chip_limits import Limit, StepAmount, flops_ceiling, training_limits
from llmb.perfmodel.explain.explanation import (
    Explanation,
    TermPair,
    explain_serving,
    explain_training,
    verdict_of,
)
from llmb.perfmodel.explain.impossible_causes import training_causes
from llmb.perfmodel.explain.published_matches import PublishedMatch, serving_matches, training_matches
from llmb.perfmodel.explain.run_prediction import SERVING_ENGINES, unpredictable
from llmb.perfmodel.hardware import TERA
from llmb.perfmodel.serving_time.serving_bounds import ServedFigures
from llmb.perfmodel.serving_time.serving_fields import serving_setup_of
from llmb.perfmodel.step_time.step_setup import setup_of
from llmb.report.summary import warning_lines
from llmb.results.result import Result


def explain_run(name: str) -> Explanation:
    """Explain a job id, a run folder or a result.json."""
    return explain_result(*_load(name))


def explain_result(config: RunConfig | None, result: Result) -> Explanation:
    """Explain the result of a run; without its configuration, by its TFLOP/s alone."""
    if config is None:
        return _without_config(result)
    if result.status != "ok":
        raise ConfigError(f"{result.name}: status {result.status}, so there is no figure to explain")
    if isinstance(config, LoadConfig):
        return Explanation(subject=result.name, verdict="unknown", notes=(_typed_command(config, result),))
    match config.workload:
        case Training():
            explanation = _training(config, result)
        case OutOfCore() as work:
            explanation = _out_of_core(config, work, result)
        case Inference():
            explanation = _serving(config, result)
    notes = tuple(warning_lines(result))
    if result.predicted is not None and result.predicted.likely_reason is not None:
        notes = (f"likely reason: {result.predicted.likely_reason}", *notes)
    return replace(explanation, published=_published(config, result), notes=(*explanation.notes, *notes))


def _load(name: str) -> tuple[RunConfig | None, Result]:
    path = Path(name)
    if not path.is_file():
        from llmb.cli.jobs.jobs import open_run
        from llmb.cli.stored_runs import load_run

        return load_run(open_run(name))
    result = build(Result, read_json(path), path.name)
    config = path.with_name("config.json")
    return (config_from_json(read_json(config), config.name) if config.is_file() else None), result


def _measured_terms(result: Result) -> dict[str, float]:
    return {share.kind: share.seconds_per_step for share in result.time_spent}


def _training(config: RunConfig, result: Result) -> Explanation:
    if result.step_time_s is None:
        raise ConfigError(f"{result.name} has no measured steps to explain")
    note = unpredictable(config)
    if note is not None:
        terms = tuple(
            TermPair(kind=kind, measured_s=seconds, predicted_s=None)
            for kind, seconds in _measured_terms(result).items()
        )
        return Explanation(subject=result.name, verdict="unknown", terms=terms, notes=(note,))
    return explain_training(
        result.name, setup_of(config), result.step_time_s.median, _measured_terms(result), config.predicted,
        config.launch_machine.gpu,
    )  # fmt: skip


def _out_of_core(config: RunConfig, work: OutOfCore, result: Result) -> Explanation:
    """Explain by the limits, and by the times of the plan: copies run beside the computation."""
    if result.step_time_s is None or work.gbs is None:
        raise ConfigError(f"{result.name} has no measured steps to explain")
    seconds, plan = result.step_time_s.median, work.prediction
    amount = StepAmount(
        model=config.model, seqlen=work.seqlen, sequences=work.gbs, gpus=1, gpu=config.machine.gpu,
        dtype=config.precision.dtype, frozen=work.lora_rank > 0,
    )  # fmt: skip
    limits = training_limits(amount, seconds)
    verdict = verdict_of(limits)
    planned = {} if plan is None else {
        "computation": plan.compute_s, "H2D copies": plan.inbound_s, "D2H copies": plan.outbound_s, "step": plan.step_s,
    }  # fmt: skip
    return Explanation(
        subject=result.name,
        verdict=verdict,
        limits=tuple(limits),
        causes=tuple(training_causes(amount, seconds)) if verdict == "impossible" else (),
        terms=tuple(
            TermPair(kind=kind, measured_s=seconds if kind == "step" else None, predicted_s=value)
            for kind, value in planned.items()
            if value is not None
        ),
    )


def _serving(config: RunConfig, result: Result) -> Explanation:
    engine = SERVING_ENGINES.get(config.engine)
    note = "the engine behind the server is not known" if engine is None else unpredictable(config)
    if result.output_tokens_per_s is None:
        raise ConfigError(f"{result.name} has no finished requests to explain")
    if note is not None or engine is None:
        return Explanation(subject=result.name, verdict="unknown", notes=(note or "",))
    latency = (result.ttft_ms["mean"], result.tpot_ms["mean"]) if result.ttft_ms and result.tpot_ms else None
    figures = ServedFigures(
        output_tokens_per_s=result.output_tokens_per_s,
        latency_ms=latency,
        prefix_hit_rate=result.prefix_hit_rate or 0.0,
    )
    return explain_serving(result.name, serving_setup_of(config, engine), figures)


def _published(config: RunConfig, result: Result) -> tuple[PublishedMatch, ...]:
    """Return published results of the same model; a proxy has none."""
    machine, dtype, work = config.machine, config.precision.dtype, config.workload
    if config.proxy:
        return ()
    recipes = load_recipes().values()
    if isinstance(work, Inference) and result.output_tokens_per_s_per_gpu:
        rate, lengths = result.output_tokens_per_s_per_gpu, (work.isl, work.osl)
        return tuple(serving_matches(recipes, config.model, machine.gpu, dtype, lengths, rate))
    if isinstance(work, Training) and result.tokens_per_s_per_gpu:
        return tuple(training_matches(recipes, config.model, machine.gpu, dtype, result.tokens_per_s_per_gpu))
    return ()


def _typed_command(config: LoadConfig, result: Result) -> str:
    """Return how to explain a load on a server, of whose model only the name is known."""
    figures = {
        "--tokens-per-s": result.output_tokens_per_s,
        "--isl": config.workload.isl,
        "--osl": config.workload.osl,
        "--concurrency": config.workload.concurrency or max(1, round(result.mean_concurrency or 0)),
        "--ttft-ms": result.ttft_ms and result.ttft_ms["mean"],
        "--tpot-ms": result.tpot_ms and result.tpot_ms["mean"],
    }
    words = [f"{name} {value:.6g}" for name, value in figures.items() if value]
    hardware = f"--gpu-type {config.machine.gpu or 'GPU'} --dtype {config.precision.dtype or 'DTYPE'}"
    command = f"llmb-run explain --model MODEL {hardware} {' '.join(words)}"
    return f"of the model only the name {config.workload.model} is known; describe it: {command}"


def _without_config(result: Result) -> Explanation:
    """Explain by the TFLOP/s of the result alone: no config.json says what was run."""
    note = "no config.json beside it says what was run: only its TFLOP/s are checked"
    ceiling = flops_ceiling(result.gpu, result.dtype or "bf16") if result.gpu else None
    if result.tflops_per_gpu is None or ceiling is None:
        return Explanation(subject=result.name, verdict="unknown", notes=(note,))
    limit = Limit(
        name="compute", needed=result.tflops_per_gpu, limit=ceiling.rate / TERA, unit="TFLOP/s/GPU", basis=ceiling.basis
    )
    return Explanation(subject=result.name, verdict=verdict_of([limit]), limits=(limit,), notes=(note,))
