"""SVG of predicted over measured values: one dot per row, a colour per group, lines at given ratios."""

from collections.abc import Sequence

import numpy as np

COLOURS = ("#277da1", "#f94144", "#43aa8b", "#7209b7", "#f8961e", "#555555", "#b5179e")
WIDTH, HEIGHT, MARGIN = 720, 420, 50
LARGEST = 0.9  # log ratio at the edge


def ratio_svg(values: Sequence[float], errors: Sequence[float], groups: Sequence[str], title: str) -> str:
    """Return the picture of log errors over the measured values, which are shown on a logarithmic axis."""
    names = sorted(set(groups))
    colours = dict(zip(names, COLOURS * (len(names) // len(COLOURS) + 1), strict=False))
    logs = np.log10(values)
    low, high = float(np.floor(logs.min())), float(np.ceil(logs.max()))

    def x(log_value: float) -> float:
        return MARGIN + (log_value - low) / (high - low) * (WIDTH - 2 * MARGIN)

    def y(error: float) -> float:
        return float(HEIGHT / 2 - np.clip(error, -LARGEST, LARGEST) / LARGEST * (HEIGHT / 2 - MARGIN))

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
             'font-size="12"><rect width="100%" height="100%" fill="white"/>']  # fmt: skip
    for ratio in (0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 2.0):
        at = y(float(np.log(ratio)))
        lines.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{at:.1f}" y2="{at:.1f}" stroke="#cccccc"/>'
                     f'<text x="8" y="{at + 4:.1f}">{ratio:g}</text>')  # fmt: skip
    for power in range(int(low), int(high) + 1):
        lines.append(f'<text x="{x(power):.1f}" y="{HEIGHT - 28}" text-anchor="middle">{10.0**power:g}</text>')
    for log_value, error, group in zip(logs, errors, groups, strict=True):
        dot = f'cx="{x(log_value):.1f}" cy="{y(error):.1f}"'
        lines.append(f'<circle {dot} r="2.5" fill="{colours[group]}" opacity="0.45"/>')
    spacing = min(150, (WIDTH - 2 * MARGIN) // len(names))
    for index, name in enumerate(names):
        lines.append(f'<text x="{MARGIN + spacing * index}" y="20" fill="{colours[name]}">{name}</text>')
    lines.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{title}; '
                 "vertical: predicted / measured</text></svg>")  # fmt: skip
    return "\n".join(lines) + "\n"
