"""`llmb-run load`: send a load to any OpenAI-compatible server, and say how fast it is."""

import argparse
import sys
from pathlib import Path
from typing import Any

from llmb.cli.subcommand import command

EXAMPLES = (
    "llmb-run load --base-url http://localhost:8000 --model llama --isl 1000 --osl 500 --concurrency 32 -n 320",
    "llmb-run load --base-url http://localhost:8000 --model llama --rate 8 --duration 120 --slo ttft=500ms,tpot=50ms",
    "llmb-run load --base-url https://host/v1 --model m --chat --dataset sharegpt.json --rate 4 --api-key-env KEY",
    "llmb-run load --base-url http://localhost:8000 --model llama --trace mooncake.jsonl --trace-speedup 2",
    "llmb-run load --base-url http://localhost:8000 --model llama --turns 4 --think 2 --concurrency 16 --requests 256",
    "python -m llmb.loadgen.noop_server --port 8001    # a server that computes nothing, to try the client",
)
TIME_LIMIT_S = 1800  # at least, of a run that says nothing else


def add_commands(commands: Any) -> None:
    """Register load."""
    parser = command(commands, "load", run, "send a load to an OpenAI-compatible server and measure it", *EXAMPLES)
    _add_server_options(parser.add_argument_group("server").add_argument)
    add_request_options(parser.add_argument_group("requests").add_argument)
    _add_arrival_options(parser.add_argument_group("arrivals").add_argument)
    _add_measurement_options(parser.add_argument_group("measurement").add_argument)


def _add_server_options(add: Any) -> None:
    add("--base-url", metavar="URL", required=True, help="http:// or https:// address, with or without /v1")
    add("--model", metavar="NAME", required=True, help="name under which the server knows the model")
    add("--chat", action="store_true", help="chat completions; default: completions")
    add("--no-stream", action="store_true", help="whole responses: no TTFT, TPOT and ITL")
    add("--api-key-env", metavar="VARIABLE", help="environment variable that holds the API key")
    add("--ready-timeout", type=float, default=60.0, metavar="S", help="wait this long for the server; default: 60")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="of one request; default: 600")
    add("--gpus", type=int, metavar="N", help="GPUs behind the server, for figures per GPU and cost")
    add("--gpu-type", metavar="GPU", help="their type, for the record")
    add("--dtype", metavar="D", help="number format of the served model, for the record")
    add("--gpu-cost-per-hour", type=float, metavar="COST", help="of one GPU: gives the cost per million tokens")


def add_request_options(add: Any) -> None:
    """Add what the requests are: lengths, prompts, sessions."""
    add("--isl", type=int, metavar="TOKENS", help="input tokens of a request; default: 1000")
    add("--osl", type=int, metavar="TOKENS", help="output tokens of a request; default: 1000")
    add("--lengths", choices=("fixed", "uniform", "normal"), default="fixed", help="distribution of both lengths")
    add(
        "--isl-spread",
        type=float,
        default=0.0,
        metavar="TOKENS",
        help="of input lengths: standard deviation, or half the range",
    )
    add("--osl-spread", type=float, default=0.0, metavar="TOKENS", help="the same of output lengths")
    add("--lengths-file", type=Path, metavar="FILE", help="pairs of input and output length to draw from")
    add("--dataset", type=Path, metavar="FILE", help="prompts from a file: JSONL or ShareGPT's JSON")
    add("--trace", type=Path, metavar="FILE", help="lengths and times from a trace: Mooncake JSONL or Azure CSV")
    add("--trace-speedup", type=float, default=1.0, metavar="X", help="send the trace X times as fast")
    add("--prefix-fraction", type=float, default=0.0, metavar="F", help="of each prompt, shared by its group")
    add("--prefix-groups", type=int, default=1, metavar="N", help="groups with a shared prefix each; default: 1")
    add("--turns", type=int, default=1, metavar="N", help="requests of a session, each with the history before it")
    add("--think", type=float, default=0.0, metavar="S", help="from the end of a turn to the next")
    add("--prompts", choices=("text", "ids"), default="text", help="send texts or token ids; default: text")
    add("--tokenizer", type=Path, metavar="FOLDER", help="counts tokens exactly; without it a word counts as one")
    add("--vocab-size", type=int, metavar="N", help="of token ids, without a tokenizer")
    add("--use-eos", action="store_true", help="outputs may end before --osl; default: ask the server to ignore EOS")
    add("--temperature", type=float, default=0.0, metavar="T", help="of sampling; default: 0, greedy")
    add("--max-completion-tokens", action="store_true", help="send --osl under this name instead of max_tokens")
    add("--extra-body", metavar="JSON", help="further fields of every request; null leaves one out: '{\"min_p\": 0.1}'")
    add("--seed", type=int, default=1234, metavar="N", help="of prompts, lengths and arrival times")


def _add_arrival_options(add: Any) -> None:
    add("-n", "--requests", type=int, metavar="N", help="requests to send")
    add("--duration", type=float, metavar="S", help="send nothing after this time, then wait for the last responses")
    add("-c", "--concurrency", type=int, metavar="C", help="requests in progress; with --rate or --trace, at most")
    add("--rate", type=float, metavar="R", help="requests per second at random times (Poisson)")
    add("--burstiness", type=float, metavar="B", help="with --rate: gamma intervals; 1 is Poisson, less is burstier")
    add("--constant", action="store_true", help="with --rate: equal intervals")
    add("--ramp", type=float, default=0.0, metavar="S", help="raise rate or concurrency linearly over this time")
    add("--ramp-start", type=float, default=0.0, metavar="F", help="from this fraction of it; default: 0")
    add("--warmup", type=int, default=0, metavar="N", help="requests before, which are left out; default: 0")


def _add_measurement_options(add: Any) -> None:
    add("--slo", metavar="LIMITS", help="goodput limits: ttft=500ms,tpot=50ms,itl=200ms,e2e=10s")
    add("-r", "--repeats", type=int, default=1, metavar="K", help="run the load K times")
    add("--processes", type=int, metavar="N", help="of the client; default: as many as the load needs")
    add("--no-calibrate", action="store_true", help="do not measure the client on a no-op server first")
    add(
        "--timeout",
        type=int,
        metavar="S",
        help="stop the run after this time; default: 1800, or more for longer arrivals",
    )
    add("--no-report", action="store_true", help="write no report.html when the load ends")
    add("--dry-run", action="store_true", help="check everything and print the configuration, send nothing")
    add("-q", "--quiet", action="store_true", help="no progress and no tables: a line for each run, its outcome")
    add("--json", action="store_true", help="print the stored Result as the last line")


def run(options: argparse.Namespace) -> int:
    """Check the load, then run it like any other run, as often as asked."""
    from llmb.cli.submit import run_repeatedly
    from llmb.config.load_settings import check_load, load_config
    from llmb.config.serialization import to_json
    from llmb.errors import ConfigError
    from llmb.loadgen.load_test import api_key_of
    from llmb.loadgen.request_source import RequestSource

    settings = load_settings(options)
    check_load(settings)
    api_key_of(settings)  # refuses a variable that is not set
    source = RequestSource(settings)  # refuses unreadable files
    for name in ("repeats", "gpus", "timeout"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ConfigError(f"--{name} {value}: expected 1 or more")
    if settings.gpu_cost_per_hour is not None and options.gpus is None:
        raise ConfigError("--gpu-cost-per-hour needs --gpus: how many GPUs are behind the server?")
    limit = options.timeout or int(max(TIME_LIMIT_S, 2 * source.planned_s + settings.timeout_s))
    config = load_config(settings, options.gpus, options.gpu_type, options.dtype, limit)
    if options.dry_run:
        print(to_json(config, indent=None if options.json else 2))
        return 0
    report, quiet = not options.no_report, options.quiet
    codes, _ = run_repeatedly(config, {}, options.repeats, options.json, "local", report=report, quiet=quiet)
    failed = sum(code != 0 for code in codes) + options.repeats - len(codes)
    if failed:
        print(f"ERROR: {failed} of {options.repeats} runs failed", file=sys.stderr)
    return max(codes)


def load_settings(options: argparse.Namespace) -> Any:
    """Return the LoadSettings of a command line."""
    from llmb.config.load_settings import LoadSettings, check_url, parse_slo
    from llmb.errors import ConfigError

    if "@" in options.base_url.partition("://")[2].partition("/")[0]:
        raise ConfigError("--base-url: leave user:password@ out of the URL, and name a key with --api-key-env")
    if options.rate is None and (options.burstiness is not None or options.constant):
        raise ConfigError("--burstiness and --constant say how --rate is met; give --rate")
    if options.constant and options.burstiness is not None:
        raise ConfigError("--constant and --burstiness exclude each other")
    kind = _arrivals(options)
    lengths: Any = "empirical" if options.lengths_file is not None else options.lengths
    return LoadSettings(
        base_url=check_url(options.base_url),
        model=options.model,
        endpoint="chat" if options.chat else "completions",
        streaming=not options.no_stream,
        api_key_env=options.api_key_env,
        isl=1000 if options.isl is None else options.isl,
        osl=1000 if options.osl is None else options.osl,
        lengths=lengths,
        isl_spread=options.isl_spread,
        osl_spread=options.osl_spread,
        lengths_file=_absolute(options.lengths_file),
        dataset=_absolute(options.dataset),
        trace=_absolute(options.trace),
        trace_speedup=options.trace_speedup,
        prefix_fraction=options.prefix_fraction,
        prefix_groups=options.prefix_groups,
        turns=options.turns,
        think_s=options.think,
        prompt_format=options.prompts,
        tokenizer=_absolute(options.tokenizer),
        vocab_size=options.vocab_size,
        arrivals=kind,
        rate=options.rate,
        burstiness=1.0 if options.burstiness is None else options.burstiness,
        concurrency=options.concurrency,
        ramp_s=options.ramp,
        ramp_start=options.ramp_start,
        num_requests=options.requests,
        duration_s=options.duration,
        warmup_requests=options.warmup,
        ignore_eos=not options.use_eos,
        temperature=options.temperature,
        max_completion_tokens=options.max_completion_tokens,
        extra_body=options.extra_body,
        seed=options.seed,
        slo=parse_slo(options.slo) if options.slo is not None else None,
        gpu_cost_per_hour=options.gpu_cost_per_hour,
        timeout_s=options.request_timeout,
        ready_timeout_s=options.ready_timeout,
        processes=options.processes,
        calibrate=not options.no_calibrate,
    )


def _arrivals(options: argparse.Namespace) -> Any:
    """Return the arrival process that the options describe."""
    from llmb.errors import ConfigError

    if options.rate is not None:
        if options.trace is not None:
            raise ConfigError("--trace has times of its own; leave out --rate, or scale it with --trace-speedup")
        return "constant" if options.constant else "poisson" if options.burstiness in (None, 1) else "gamma"
    if options.trace is not None:
        return "trace"
    return "concurrency" if options.concurrency is not None else "all_at_once"


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())
