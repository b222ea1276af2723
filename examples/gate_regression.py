"""Gate a CI job on a regression: exit 1 if training became slower than a baseline by more than a limit.

    python examples/gate_regression.py baseline.json --write        once, on the machine that runs the job
    python examples/gate_regression.py baseline.json                in the job

`llmb-run gate` is the same as a command. The baseline is a small file that lives in the repository. Seconds of another
machine are no baseline, so the device has to be the same.
"""

import argparse
import json
from pathlib import Path

import llmb


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path)
    parser.add_argument("--write", action="store_true", help="measure, and write the baseline")
    parser.add_argument("--max-slowdown", type=float, default=5.0, metavar="PERCENT")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    config = llmb.resolve("pretrain_llama3.1", size="8b", dtype="fp32", gpus=1, proxy=True, steps=options.steps)
    result = llmb.run(config, progress=False)
    if result.status != "ok" or result.tokens_per_s is None:
        print(f"FAIL: the run is {result.status} ({result.reason}); see {result.folder}")
        return 1
    measured = {"name": result.name, "device": result.gpu_name, "tokens_per_s": result.tokens_per_s}
    if options.write:
        options.baseline.write_text(json.dumps(measured, indent=2) + "\n")
        print(f"wrote {options.baseline}: {result.tokens_per_s:,.0f} tokens/s")
        return 0

    baseline = json.loads(options.baseline.read_text())
    for key in ("name", "device"):
        if baseline[key] != measured[key]:
            print(f"FAIL: the {key} differs: {measured[key]}, in the baseline {baseline[key]}")
            return 1
    change = 100 * (result.tokens_per_s / baseline["tokens_per_s"] - 1)
    verdict = "FAIL" if change < -options.max_slowdown else "PASS"
    print(f"{verdict}: {change:+.1f} % tokens/s against the baseline, {-options.max_slowdown:+.1f} % allowed")
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    raise SystemExit(main())
