"""Sweep a setting of a workload: which value is fastest here?

    python examples/sweep_setting.py                                              a proxy, micro-batch sizes 1, 2 and 4
    python examples/sweep_setting.py --field seqlen --values 128 256 --steps 20

Every value is a run of its own, compared with the first. A value that cannot run is reported and left out.
"""

import argparse

import llmb


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="pretrain_llama3.1")
    parser.add_argument("--size", default="8b")
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--gpu", help="GPU type; without it a small proxy runs")
    parser.add_argument("--field", default="mbs")
    parser.add_argument("--values", nargs="+", default=["1", "2", "4"])
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args(arguments)

    results: dict[str, llmb.Result] = {}
    for value in options.values:
        settings = {options.field: value, "steps": options.steps}
        try:
            config = llmb.resolve(
                options.workload, size=options.size, dtype=options.dtype, gpus=1, gpu=options.gpu,
                proxy=options.gpu is None, **settings,
            )  # fmt: skip
            result = llmb.run(config)
        except llmb.ConfigError as error:
            print(f"{options.field}={value}: {error}")
            continue
        if result.status == "ok":
            results[value] = result
        else:
            print(f"{options.field}={value}: {result.status} ({result.reason})")
    if not results:
        return 1

    first, *others = results.values()
    compared = llmb.compare(first, *others) if others else None
    speedups = (1.0, *(compared.speedups if compared else ()))
    verdicts = ("the baseline", *(compared.verdicts if compared else ()))
    print(f"\n{options.field:>10}  tokens/s  peak GiB  speedup")
    for (value, result), speedup, verdict in zip(results.items(), speedups, verdicts, strict=True):
        print(f"{value:>10}  {result.tokens_per_s:8,.0f}  {result.peak_memory_gib:8.2f}  {speedup:7.3f}  {verdict}")
    best = max(results, key=lambda value: results[value].tokens_per_s or 0.0)
    print(f"fastest: {options.field}={best}, {results[best].folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
