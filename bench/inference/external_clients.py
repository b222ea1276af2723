"""Load generators of others, behind one interface: the same prompts in, figures in our words out.

    load = ClientLoad(url=url, model="tiny-llama", tokenizer=folder, prompts=texts, osl=32, concurrency=8, warmup=8)
    figures = run_client("guidellm", load, Path("/tmp/out"), prefix=("taskset", "-c", "1"))

Each client lives in an environment of its own beside the checkout (`make peers`), or where LLMB_VLLM_VENV,
LLMB_GUIDELLM_VENV or LLMB_AIPERF_VENV point. What a tool calls a thing, in our words:

vllm       TPOT, E2EL: TPOT, E2E. Its TTFT ends with the first chunk, its E2EL with the last one that has choices
guidellm   ITL is our TPOT; request_latency our E2E, up to [DONE]. Its own TPOT includes the first token
aiperf     inter_token_latency is our TPOT; request_latency our E2E, up to the last chunk
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmb.events import RequestDone, read

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
# `vllm bench serve` without its command line, which looks for the metadata of a package called vllm.
VLLM_BENCH = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


@dataclass(frozen=True, kw_only=True)
class ClientLoad:
    """A closed loop of requests: the first `warmup` prompts are not measured."""

    url: str
    model: str
    tokenizer: Path
    prompts: Sequence[str]
    osl: int
    concurrency: int
    warmup: int = 0
    chat: bool = False
    own_count: bool = False  # AIPerf counts output tokens by its tokenizer; else all take the server's usage

    @property
    def requests(self) -> int:
        return len(self.prompts) - self.warmup

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class ClientFigures:
    """Report of a client, in our words; times are medians in ms, or means where they say so."""

    completed: int
    failed: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    ttft_mean_ms: float
    tpot_mean_ms: float
    e2e_mean_ms: float
    input_tokens: int  # of all measured requests
    output_tokens: int
    own_output_tokens: int | None = None  # by the client's tokenizer, where it counts beside the server's usage
    cpu_s: float = 0.0  # of all its processes, from start to end


def environment_of(name: str) -> Path | None:
    """Return the Python environment of a client; None: it is not installed."""
    folder = Path(os.environ.get(f"LLMB_{name.upper()}_VENV") or ROOT / f".venv-{name}")
    return folder if (folder / "bin" / "python").exists() else None


def run_client(name: str, load: ClientLoad, folder: Path, prefix: Sequence[str] = ()) -> ClientFigures:
    """Run a client to its end and read its report; `prefix`: a command before its own, such as taskset."""
    folder.mkdir(parents=True, exist_ok=True)
    before = _children_cpu_s()
    figures = CLIENTS[name](load, folder, prefix)
    return replace(figures, cpu_s=_children_cpu_s() - before)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_llmb(load: ClientLoad, folder: Path, prefix: Sequence[str]) -> ClientFigures:
    """Run `llmb-run load`."""
    dataset = _write_lines(folder / "prompts.jsonl", [{"prompt": p} for p in load.prompts[load.warmup :]])
    command = [sys.executable, "-m", "llmb.cli.llmb_run", "load", "--base-url", load.url, "--model", load.model]
    command += ["--dataset", str(dataset), "--osl", str(load.osl), "-n", str(load.requests)]
    command += ["-c", str(load.concurrency), "--warmup", str(load.warmup), "--tokenizer", str(load.tokenizer)]
    output = _run([*prefix, *command, "--json"] + ["--chat"] * load.chat, folder)
    result = json.loads(output.strip().splitlines()[-1])
    requests = _llmb_requests(folder)
    return ClientFigures(
        completed=len([r for r in requests if r.error is None]),
        failed=len([r for r in requests if r.error is not None]),
        requests_per_s=result["request_throughput"],
        output_tokens_per_s=result["output_tokens_per_s"],
        ttft_ms=result["ttft_ms"]["p50"],
        tpot_ms=result["tpot_ms"]["p50"],
        e2e_ms=result["e2e_ms"]["p50"],
        ttft_mean_ms=result["ttft_ms"]["mean"],
        tpot_mean_ms=result["tpot_ms"]["mean"],
        e2e_mean_ms=result["e2e_ms"]["mean"],
        input_tokens=sum(r.input_tokens for r in requests),
        output_tokens=sum(r.output_tokens for r in requests),
        own_output_tokens=sum(r.client_tokens or 0 for r in requests),
    )


def _llmb_requests(folder: Path) -> list[RequestDone]:
    """Return the measured requests of the one run in a folder."""
    (path,) = folder.rglob("events.rank0.jsonl")
    return [event for event in read(path) if isinstance(event, RequestDone) and not event.warmup]


def run_vllm(load: ClientLoad, folder: Path, prefix: Sequence[str]) -> ClientFigures:
    """Run `vllm bench serve`."""
    turns = [[{"value": prompt}, {"value": "-"}] for prompt in load.prompts[load.warmup :]]
    dataset, report = folder / "prompts.json", folder / "report.json"
    dataset.write_text(json.dumps([{"conversations": turn} for turn in turns]))
    command = [_program("vllm", "python"), "-c", VLLM_BENCH, "--backend", "openai-chat" if load.chat else "openai"]
    command += ["--base-url", load.url, "--endpoint", load.path, "--model", load.model]
    command += ["--tokenizer", str(load.tokenizer), "--dataset-name", "sharegpt", "--dataset-path", str(dataset)]
    command += ["--sharegpt-output-len", str(load.osl), "--disable-shuffle", "--num-prompts", str(load.requests)]
    command += ["--max-concurrency", str(load.concurrency), "--num-warmups", str(load.warmup)]
    command += ["--ignore-eos", "--temperature", "0", "--disable-tqdm", "--save-result"]
    command += ["--result-filename", str(report), "--percentile-metrics", "ttft,tpot,itl,e2el"]
    _run([*prefix, *command], folder)
    figures = json.loads(report.read_text())
    return ClientFigures(
        completed=figures["completed"],
        failed=figures["failed"],
        requests_per_s=figures["request_throughput"],
        output_tokens_per_s=figures["output_throughput"],
        ttft_ms=figures["median_ttft_ms"],
        tpot_ms=figures["median_tpot_ms"],
        e2e_ms=figures["median_e2el_ms"],
        ttft_mean_ms=figures["mean_ttft_ms"],
        tpot_mean_ms=figures["mean_tpot_ms"],
        e2e_mean_ms=figures["mean_e2el_ms"],
        input_tokens=figures["total_input_tokens"],
        output_tokens=figures["total_output_tokens"],
    )


def run_guidellm(load: ClientLoad, folder: Path, prefix: Sequence[str]) -> ClientFigures:
    """Run GuideLLM, without a warm-up: it leaves out so many requests at the start, but up to a time that may be wrong.

    Requests that end together with the last of the warm-up count, the time that they took does not.
    """
    lines = [{"prompt": prompt, "output_tokens_count": load.osl} for prompt in load.prompts[load.warmup :]]
    dataset, report = _write_lines(folder / "prompts.jsonl", lines), folder / "report.json"
    backend = {"kind": "openai_http", "target": load.url, "model": load.model, "request_format": load.path}
    options = {
        "backend": backend | {"extras": {"body": {"temperature": 0}}},
        "profile": {"kind": "concurrent", "streams": load.concurrency},
        "constraint": {"kind": "max_requests", "count": load.requests},
        "tokenizer": {"kind": "huggingface_auto", "model": str(load.tokenizer)},
        "data": {"kind": "json_file", "path": str(dataset)},
        "output": {"kind": "json", "path": str(report)},
    }
    command = [_program("guidellm", "guidellm"), "run", "--disable-console"]
    for name, value in options.items():
        command += [f"--{name}", json.dumps(value)]
    _run([*prefix, *command], folder)
    metrics = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    totals, successful = metrics["request_totals"], {}
    for name, values in metrics.items():
        if isinstance(values, dict) and isinstance(values.get("successful"), dict):
            successful[name] = values["successful"]
    return ClientFigures(
        completed=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        requests_per_s=successful["requests_per_second"]["mean"],
        output_tokens_per_s=successful["output_tokens_per_second"]["mean"],
        ttft_ms=successful["time_to_first_token_ms"]["median"],
        tpot_ms=successful["inter_token_latency_ms"]["median"],
        e2e_ms=1000 * successful["request_latency"]["median"],
        ttft_mean_ms=successful["time_to_first_token_ms"]["mean"],
        tpot_mean_ms=successful["inter_token_latency_ms"]["mean"],
        e2e_mean_ms=1000 * successful["request_latency"]["mean"],
        input_tokens=round(successful["prompt_token_count"]["total_sum"]),
        output_tokens=round(successful["output_token_count"]["total_sum"]),
    )


def run_aiperf(load: ClientLoad, folder: Path, prefix: Sequence[str]) -> ClientFigures:
    """Run AIPerf."""
    lines = [{"text": prompt, "output_length": load.osl} for prompt in load.prompts]
    dataset = _write_lines(folder / "prompts.jsonl", lines)
    command = [_program("aiperf", "aiperf"), "profile", "--url", load.url, "--model", load.model]
    command += ["--endpoint-type", "chat" if load.chat else "completions", "--streaming"]
    command += ["--tokenizer", str(load.tokenizer), "--input-file", str(dataset)]
    command += ["--custom-dataset-type", "single-turn", "--dataset-sampling-strategy", "sequential"]
    command += ["--concurrency", str(load.concurrency), "--request-count", str(load.requests)]
    command += ["--extra-inputs", "ignore_eos:true", "temperature:0", "--artifact-dir", str(folder), "--ui", "none"]
    command += [] if load.own_count else ["--use-server-token-count"]
    if load.warmup:
        command += ["--warmup-request-count", str(load.warmup)]
    _run([*prefix, *command], folder)
    metrics = json.loads((folder / "profile_export_aiperf.json").read_text())
    return ClientFigures(
        completed=round(metrics["request_count"]["avg"]),
        failed=load.requests - round(metrics["request_count"]["avg"]),
        requests_per_s=metrics["request_throughput"]["avg"],
        output_tokens_per_s=metrics["output_token_throughput"]["avg"],
        ttft_ms=metrics["time_to_first_token"]["p50"],
        tpot_ms=metrics["inter_token_latency"]["p50"],
        e2e_ms=metrics["request_latency"]["p50"],
        ttft_mean_ms=metrics["time_to_first_token"]["avg"],
        tpot_mean_ms=metrics["inter_token_latency"]["avg"],
        e2e_mean_ms=metrics["request_latency"]["avg"],
        input_tokens=round(metrics["total_usage_prompt_tokens"]["avg"]),
        output_tokens=round(metrics["total_usage_completion_tokens"]["avg"]),
        own_output_tokens=round(metrics["total_osl"]["avg"]) if load.own_count else None,
    )


CLIENTS: dict[str, Callable[[ClientLoad, Path, Sequence[str]], ClientFigures]] = {
    "llmb": run_llmb,
    "vllm": run_vllm,
    "guidellm": run_guidellm,
    "aiperf": run_aiperf,
}


def _program(name: str, program: str) -> str:
    folder = environment_of(name)
    if folder is None:
        raise SystemExit(f"{name} is not installed; `make peers` does, or set LLMB_{name.upper()}_VENV")
    return str(folder / "bin" / program)


def _write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _run(command: Sequence[str], folder: Path) -> str:
    """Run a client in its folder, without what this process's environment says about Python or the Hub."""
    hidden = () if sys.executable in command else ("PYTHONPATH", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"LLMB_INSTALL": str(folder / "llmb")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:8])} ... failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout
