"""Every published result of the recipes beside what follows from its step time, and where the documents contradict
themselves. The page is written from the recipe.yaml files alone:

    python docs/references.py > docs/references.md
"""

from dataclasses import dataclass
from typing import Any

from llmb.config.recipe import Recipe, Row, load_all, load_yaml, per_gpus, shipped
from llmb.perfmodel import flops, hardware, metrics

ONE_TRILLION = 1e12

INTRODUCTION = """\
# Published results, recomputed

Written by `python docs/references.py` from the recipes; do not edit. In each pair the first number is printed
in the source and the second follows from the printed step time: tokens/s = sequence length x GBS / step time; TFLOP/s
per GPU = tokens/s x model FLOPs a token / GPUs; MFU = that over the peak of the GPU for the dtype; days for 10^12
tokens. Model FLOPs are those of `llmb/perfmodel/flops.py`, with the attention convention named. A dash: the source does not
print it.
"""


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """What follows from a published step time; the fields are those of spec.Reference."""

    tokens_per_s: float | None
    tflops_per_gpu: float | None
    mfu_percent: float | None
    days_per_1t_tokens: float | None


def recompute(recipe: Recipe, published: Row) -> Recomputed:
    """The figures of a published training run from its step time and its row of the recipe."""
    gpu, size, dtype, gpus = (published[cell] for cell in ("gpu", "size", "dtype", "gpus"))
    row = recipe.matching(gpu=gpu, size=size, dtype=dtype, gpus=gpus)[0]
    seqlen, gbs, step_time = row["seqlen"], per_gpus(row["gbs"], gpus, "gbs"), published["step_time_s"]
    tokens_per_s = metrics.tokens_per_s(seqlen, gbs, step_time)
    tflops = metrics.tflops_per_gpu(gbs * flops_per_sequence(recipe, size, seqlen), step_time, gpus)
    mfu = metrics.mfu(tflops, hardware.peak_flops(gpu, dtype))
    return Recomputed(
        tokens_per_s=tokens_per_s,
        tflops_per_gpu=tflops,
        mfu_percent=None if mfu is None else 100 * mfu,
        days_per_1t_tokens=metrics.days_to_train(ONE_TRILLION, tokens_per_s),
    )


def flops_per_sequence(recipe: Recipe, size: str, seqlen: int) -> float:
    """Model FLOPs of one sequence, by the recipe's convention."""
    convention: Any = recipe.flops_convention
    return flops.train_flops_per_sequence(recipe.model(size), seqlen, convention)


def contradictions(recipe: Recipe) -> list[dict[str, Any]]:
    """Where the document of a recipe contradicts itself; none where there is no document."""
    path = shipped() / recipe.workload / "contradictions.yaml"
    return load_yaml(path) if path.exists() else []


def render() -> str:
    """The whole page as Markdown."""
    recipes = [recipe for recipe in load_all([shipped()]).values() if recipe.rows]
    results = [_results(recipe) for recipe in recipes]
    found = sum(len(contradictions(recipe)) for recipe in recipes)
    listed = [_contradictions(recipe) for recipe in recipes if contradictions(recipe)]
    heading = f"# Contradictions\n\n{found} places where a source contradicts itself, its siblings or arithmetic.\n"
    return "\n".join([INTRODUCTION, *results, heading, *listed])


def _results(recipe: Recipe) -> str:
    heading = f"## {recipe.title} (`{recipe.workload}`)\n\n"
    if not recipe.references:
        return heading + "The source prints no measured value.\n"
    timed = [row for row in recipe.references if "step_time_s" in row]
    served = [row for row in recipe.references if "output_tokens_per_s" in row]
    plans = [row for row in recipe.references if "plan" in row]
    tables = [*([_timed(recipe, timed)] if timed else []), *([_served(recipe, served)] if served else [])]
    return heading + "\n".join([*tables, *(_plan(row) for row in plans)])


def _served(recipe: Recipe, references: list[Row]) -> str:
    """Serving runs: what is printed, and what a request's lengths make of it."""
    header = ("size", "dtype", "GPUs", "use case", "output tokens/s", "requests/s", "source")
    lines = []
    for row in references:
        cells = {name: row[name] for name in ("gpu", "size", "dtype", "gpus", "mode", "use_case")}
        isl, osl = (recipe.matching(**cells)[0][name] for name in ("isl", "osl"))
        printed = row["output_tokens_per_s"]
        case = f"{row['use_case']} {isl}/{osl}"
        about = (row["size"], row["dtype"], f"{row['gpus']} {row['gpu']}", case)
        lines.append((*about, _number(printed), f"{printed / osl:,.1f}", row["source"]))
    notes = dict.fromkeys(f"- {row['size']}: {row['note']}." for row in references if "note" in row)
    return "\n".join([_table(header, lines), "Requests/s = output tokens/s / output length.", "", *notes, ""])


def _timed(recipe: Recipe, references: list[Row]) -> str:
    """Runs with a step time: one line each, printed and recomputed side by side."""
    header = ("size", "dtype", "GPUs", "step s", "tokens/s", "TFLOP/s per GPU", "MFU %", "days for 1T tokens", "source")
    lines = []
    for row in references:
        ours = recompute(recipe, row)
        lines.append(
            (
                row["size"],
                row["dtype"],
                f"{row['gpus']} {row['gpu']}",
                row["step_time_s"],
                _pair(row.get("tokens_per_s"), ours.tokens_per_s, 0),
                _pair(row.get("tflops_per_gpu"), ours.tflops_per_gpu, 1),
                _pair(row.get("mfu_percent"), ours.mfu_percent, 2),
                _pair(row.get("days_per_1t_tokens"), ours.days_per_1t_tokens, 2),
                row["source"],
            )
        )
    notes = [f"- {row['gpus']} {row['gpu']}, {row['dtype']}: {row['note']}." for row in references if "note" in row]
    seqlen = recipe.rows[0]["seqlen"]
    flops = ", ".join(
        f"{size} {flops_per_sequence(recipe, size, seqlen):.4g}"
        for size in dict.fromkeys(r["size"] for r in references)
    )
    footer = f"Model FLOPs of a sequence of {seqlen} tokens, {recipe.flops_convention} attention: {flops}."
    return "\n".join([_table(header, lines), footer, "", *notes, *([""] if notes else [])])


def _plan(row: Row) -> str:
    """A published automatic configuration."""
    about = f"{row['size']} {row['dtype']} on one {row['gpu']}, sequences of {row['seqlen']} tokens, "
    about += f"{row['host_gib']} GiB of host and {row['device_gib']} GiB of device memory ({row['source']})"
    table = _table(("plan", "printed"), [(name.replace("_", " "), value) for name, value in row["plan"].items()])
    return f"{about}: {row['note']}.\n\n{table}"


def _contradictions(recipe: Recipe) -> str:
    known = contradictions(recipe)
    numbers, words = [c for c in known if "computed" in c], [c for c in known if "says" in c]
    parts = [f"## {recipe.title} ({known[0]['source']})\n"]
    if numbers:
        cells = [(c["where"], _number(c["printed"]), _number(c["computed"]), f"`{c['how']}`") for c in numbers]
        parts.append(_table(("where", "printed", "computed", "how"), cells))
    if words:
        parts.append(_table(("where", "says", "but"), [(c["where"], c["says"], c["but"]) for c in words]))
    return "\n".join(parts)


def _pair(printed: float | None, ours: float | None, decimals: int) -> str:
    return f"{_number(printed)} / {'-' if ours is None else f'{ours:,.{decimals}f}'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,}"


def _table(header: tuple[str, ...], lines: list[tuple[Any, ...]]) -> str:
    rows = [header, ("---",) * len(header), *lines]
    return "".join("| " + " | ".join(_escaped(str(cell)) for cell in row) + " |\n" for row in rows)


def _escaped(cell: str) -> str:
    """Markdown takes `|` for a border and `<name>` for HTML."""
    return cell.replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    print(render(), end="")
