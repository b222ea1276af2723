"""Requests that exceed the batch by few: the speed of a whole run with and without a last wave, on one H200.

    python bench/last_wave_gpu.py [--json FILE]
    python bench/last_wave_gpu.py --tiny        # a very small model, with or without a GPU: shows only that it runs

Llama 3.1 8b, fp8, random weights, all requests at once, EOS ignored. Whole batches set the speed that the others are
compared with; the batch that `llmb-run submit` takes (`balanced_batch`) has to reach 0.95 of it. About a minute.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from infer_gpu import models, tiny_models
from inference.infer_serving import Row, config_of, measure, open_engine
from measure.device import describe_machine

from llmb.perfmodel.serving_time.request_waves import balanced_batch

ROW = Row(dtype="fp8", isl=128, osl=512, batch=896, budget=8192, requests=896)
EXCESS = 4  # requests beyond the batch
AIM = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; --tiny runs anywhere")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = tiny_models()[0] if options.tiny else models()[0]
    whole = replace(ROW, isl=16, osl=16, batch=32, budget=128, requests=32) if options.tiny else ROW
    requests = whole.requests + EXCESS
    rows = {
        "whole batches": whole,
        "last wave": replace(whole, requests=requests),
        "balanced": replace(whole, batch=balanced_batch(whole.batch, requests, requests), requests=requests),
    }
    print(describe_machine(device), flush=True)
    print(f"{'':16} {'requests':>8} {'batch':>6} {'s':>7} {'output tokens/s':>16} {'of whole batches':>17}")
    speeds: dict[str, float] = {}
    for name, row in rows.items():
        config = config_of(model, row, device)
        measured = measure(open_engine(config, device, row.isl + row.osl), config, device)
        speeds[name] = measured.whole
        ratio = measured.whole / speeds["whole batches"]
        print(
            f"{name:16} {row.requests:8} {row.batch:6} {measured.seconds:7.2f} {measured.whole:16,.0f} {ratio:17.3f}",
            flush=True,
        )
    print(f"aim: balanced at least {AIM:g} of whole batches")
    if options.json:
        options.json.write_text(json.dumps({"row": ROW.title, "output_tokens_per_s": speeds, "aim": AIM}) + "\n")


if __name__ == "__main__":
    main()
