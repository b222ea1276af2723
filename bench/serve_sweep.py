"""Pareto chart of `llmb-run serve`: Llama 3.1 8b in fp8 on one GPU, 1000/1000 tokens, 1 to 1,024 requests at once.

    python bench/serve_sweep.py [--json FILE] [--svg FILE] [--concurrency 1..1024] [--point-seconds 10]
    python bench/serve_sweep.py --tiny       # a small proxy, with or without a GPU: shows only that it runs

It runs `llmb-run sweep`, which starts the server once, with random weights and EOS ignored. Printed: the table, the
time of all points and of the server's start, and what the client cost (CPU per request and per token, the busiest
process, lateness). The aim: the whole ladder in under eight minutes, the start of the server included.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
ENGINE = ("-w", "inference_llama3.1", "-s", "8b", "--scale", "1")
FULL = (*ENGINE, "--dtype", "fp8", "--gpu-type", "h200", "--set", "max_batch_size=1024")
TINY = (*ENGINE, "--dtype", "bf16", "--proxy", "--no-calibrate", "--processes", "1")
MOST_S = 480.0


def main() -> int:
    options = parse()
    lines = ["--point-seconds", str(options.point_seconds), "--concurrency", options.concurrency]
    with TemporaryDirectory() as install:
        start = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "llmb.cli.llmb_run", "sweep", *(TINY if options.tiny else FULL), *lines]
        code = subprocess.run([*command, "-o", install], env=environment, check=False).returncode
        seconds = time.monotonic() - start
        folders = [path.parent for path in Path(install).glob("*/result.json")]
        if not folders:
            return code or 2
        result = json.loads((folders[0] / "result.json").read_text())
        points = [json.loads(line) for line in (folders[0] / "points.jsonl").read_text().splitlines()]
        if options.svg:
            options.svg.write_text((folders[0] / "sweep.svg").read_text())
    report = {"seconds": seconds, "client": client_cost(points), "sweep": result}
    print_times(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return code


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--svg", type=Path, metavar="FILE")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--concurrency", metavar="LADDER")
    parser.add_argument("--point-seconds", type=float, metavar="S")
    options = parser.parse_args()
    options.concurrency = options.concurrency or ("1..4" if options.tiny else "1..1024")
    options.point_seconds = options.point_seconds or (1.0 if options.tiny else 10.0)
    return options


def client_cost(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a request and a token cost the load generator, and how often it refused a verdict."""
    clients = [point["client"] for point in points if point["client"]]
    calibrated = ("request_cost_us", "token_cost_us", "idle_lateness_p99_ms")
    cost = {name: clients[0].get(name) for name in calibrated} if clients else {}
    return {**cost, "refusals": sum(point["client_refusal"] is not None for point in points)}


def print_times(report: dict[str, Any]) -> None:
    sweep, client = report["sweep"], report["client"]
    seconds, measured_s = report["seconds"], sweep["wall_s"]
    verdict = "under" if seconds < MOST_S else "OVER"
    print(f"\n{seconds:.0f} s in all, {verdict} {MOST_S:g} s: {sweep['points']} points {measured_s:.0f} s", end=", ")
    print(f"start and stop of the server {seconds - measured_s:.0f} s")
    if client:
        client = {**client, **(sweep["client"] or {})}
        print("client: " + ", ".join(f"{name} {value}" for name, value in client.items() if value is not None))


if __name__ == "__main__":
    sys.exit(main())
