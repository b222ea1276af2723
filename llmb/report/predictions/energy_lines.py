"""Lines of energy and cost below a prediction."""

from collections.abc import Sequence

from llmb.perfmodel.explain.energy_cost import JOULES_PER_KWH, EnergyCost
from llmb.report.table import number


def energy_lines(energy: EnergyCost, joules_per_step: float | None = None, unit: str = "tokens") -> list[str]:
    """Return one line per subject: energy, cost, the whole training run."""
    step = "" if joules_per_step is None else f"{number(joules_per_step / 1e3)} kJ a step, "
    kwh = energy.joules_per_million_tokens / JOULES_PER_KWH
    lines = [
        f"energy: {step}{number(kwh)} kWh per million {unit}, at {energy.watts_per_gpu:g} W a GPU, hosts not included"
    ]
    if energy.cost_per_million_tokens is not None:
        lines.append(f"cost: {number(energy.cost_per_million_tokens)} per million {unit}")
    if energy.days_to_train is not None and energy.kwh_to_train is not None:
        cost = "" if energy.cost_to_train is None else f", cost {energy.cost_to_train:,.0f}"
        lines.append(
            f"{energy.tokens_to_train:.4g} tokens: {energy.days_to_train:,.1f} days, "
            f"{energy.kwh_to_train / 1e3:,.1f} MWh{cost}"
        )
    return lines


def with_costs(
    header: tuple[str, ...], rows: Sequence[tuple[object, ...]], costs: Sequence[float | None]
) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return a table of a curve with the cost of a million tokens at each point, where prices were given."""
    if not any(costs):
        return header, list(rows)
    cells = ["-" if cost is None else number(cost) for cost in costs]
    return (*header, "cost/1M tokens"), [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
