"""Breakdown of a traced step: kernels by class, GEMMs by size, and idle time.

A kernel is known by its own name and by the torch operation that launched it, which also has the sizes; one that a CUDA
graph launched has a name only. Where several run at once the class named first owns the moment. On a CPU the times are
the own times of torch's operations.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from llmb.train.kernel_intervals import KernelInterval, resolve_nesting, resolve_overlaps

PRODUCTS, ATTENTION, SCAN = "GEMM", "attention", "scan and convolution"
SMALL, QUANTISING, LOSS = "normalisation and activation", "quantization and transposition", "loss"
ROUTING, ADDING, OPTIMIZER = "routing", "gradient accumulation", "optimizer"
COPIES, OTHER, IDLE = "copies and casts", "other", "idle"
CLASSES = (
    PRODUCTS, ATTENTION, SCAN, SMALL, QUANTISING, LOSS, ROUTING, ADDING, OPTIMIZER, COPIES, OTHER,
)  # fmt: skip
# By the name of a kernel, ours and others', and by that of a torch operation; the first line that fits decides.
NAMES = (
    (OPTIMIZER, r"adam|multi_tensor|_foreach|total_norm"),
    (ATTENTION, r"sdpa|flash|fmha|attention|attn"),
    (PRODUCTS, r"gemm|gemv|nvjet|cutlass|cublas|xmma|matmul|split_?k"
               r"|aten::(mm|addmm_?|bmm|_(scaled_)?(grouped_)?mm)$"),
    (LOSS, r"cross_?entropy|logsumexp|log_?softmax|nll|aten::(exp_|sub_|div_|gather|scatter_add_?)$"),
    (SCAN, r"\b_?(scan|states|scores|score_grads|input_grads|key_grads)_kernel|causal_?conv|softplus|_ssd"),
    (SMALL, r"rms_?norm|gated_?norm|inverse_rms|sum_partials|glu_|silu|gelu|relu|activation|rope"),
    (QUANTISING, r"fp8|float8|quant|amax|vector_norm|NormTwoOps|transpose"
                 r"|aten::(max|amax|abs)$"),
    (ROUTING, r"rout|sort|topk|searchsorted|one_hot|bincount|radix|permute|cumsum|aten::index_select$"),
    (SMALL, r"norm|gated|sigmoid|tanh|threshold|aten::(mul_?|add|pow|square|neg|cat)$"),
    (ADDING, r"accumulate_?grad|scaled_add|aten::add_$"),
    (COPIES, r"memcpy|memset|copy|fill|zero|embedding|gather|aten::(to|clone|contiguous)$"),
)  # fmt: skip
LONGEST = 8  # names listed of a class


class Launched(NamedTuple):
    """Kernel, operation and operands of one interval."""

    kernel: str
    operation: str  # that launched it; empty: nobody knows
    dims: tuple[tuple[int, ...], ...]  # of its operands
    types: tuple[str, ...]
    call: Any  # the same for all kernels of one call


def class_of(launched: Launched) -> str:
    """By the kernel, which knows best; one that is used for anything has a name that says nothing."""
    for name in (launched.kernel, launched.operation):
        for kind, pattern in NAMES:
            if re.search(pattern, name, re.IGNORECASE):
                return kind
    return OTHER


@dataclass(frozen=True)
class Size:
    """A matrix product: MACs of one call are `sizes` multiplied with one another; unknown in a CUDA graph."""

    dtype: str
    sizes: tuple[int, ...]  # ascending

    @property
    def flops(self) -> float | None:
        return 2.0 * prod(self.sizes) if self.sizes else None

    def __str__(self) -> str:
        return f"{self.dtype} {' x '.join(map(str, self.sizes)) or 'of unknown sizes'}"


def size_of(launched: Launched) -> Size:
    """From the first two operands that are matrices: all of the left one times the columns of the right one."""
    dims, types = launched.dims, launched.types
    if re.search(r"addmm|baddbmm", launched.operation):  # what is added comes first
        dims, types = dims[1:], types[1:]
    matrices = [(dim, kind) for dim, kind in zip(dims, types, strict=False) if len(dim) >= 2]
    dtype = "fp8" if any("float8" in kind.lower() for _, kind in matrices) else "bf16"
    if any(kind == "float" for _, kind in matrices[:2]):
        dtype = "fp32"
    if len(matrices) < 2:
        return Size("fp8" if re.search(r"fp8|float8|e4m3|e5m2|qq", launched.kernel) else dtype, ())
    (left, _), (right, _) = matrices[:2]
    return Size(dtype, tuple(sorted((prod(left[:-1]), left[-1], right[-1]))))


@dataclass(frozen=True)
class StepBreakdown:
    """An average step. Seconds."""

    span: float  # from the first kernel's start to the last one's end
    kinds: dict[str, float]
    products: dict[Size, tuple[int, float]]  # calls and seconds
    longest: dict[str, list[tuple[str, float]]] = field(default_factory=dict)  # names of each class
    gaps: list[tuple[str, float]] = field(default_factory=list)  # what came behind those that are longest in all

    @property
    def idle(self) -> float:
        """In which nothing ran."""
        return max(0.0, self.span - sum(self.kinds.values()))


def split_trace(events: Iterable[dict[str, Any]], on_gpu: bool, steps: int) -> StepBreakdown:
    """From the events of a Chrome trace of so many steps."""
    timed = [event for event in events if event.get("ph") == "X"]
    launches: dict[str, Launched] = {}
    intervals = list(_gpu_intervals(timed, launches) if on_gpu else _cpu_intervals(timed, launches))
    kinds, names = Counter[str](), {kind: Counter[str]() for kind in CLASSES}
    calls: dict[Size, set[Any]] = {}
    products: dict[Size, float] = {}
    for interval in intervals:
        seconds, launched = (interval.end - interval.start) * 1e-6 / steps, launches[interval.name]
        kinds[interval.kind] += seconds
        names[interval.kind][f"{launched.operation} {launched.kernel}".strip()] += seconds
        if interval.kind == PRODUCTS:
            size = size_of(launched)
            products[size] = products.get(size, 0.0) + seconds
            calls.setdefault(size, set()).add(launched.call)
    span = max(interval.end for interval in intervals) - min(interval.start for interval in intervals)
    each = {size: (round(len(calls[size]) / steps), seconds) for size, seconds in products.items()}
    longest = {kind: counts.most_common(LONGEST) for kind, counts in names.items() if counts}
    return StepBreakdown(span * 1e-6 / steps, dict(kinds), each, longest, _gaps(intervals, launches, steps))


def _gaps(intervals: list[KernelInterval], launches: dict[str, Launched], steps: int) -> list[tuple[str, float]]:
    """In which nothing ran, by what came then."""
    waits, until = Counter[str](), intervals[0].start
    for interval in intervals:
        if interval.start > until:
            launched = launches[interval.name]
            waits[f"{launched.operation} {launched.kernel}".strip()] += (interval.start - until) * 1e-6 / steps
        until = max(until, interval.end)
    return waits.most_common(LONGEST)


def _gpu_intervals(timed: list[dict[str, Any]], launches: dict[str, Launched]) -> Iterator[KernelInterval]:
    operations = {_external(event): event for event in timed if event.get("cat") == "cpu_op"}
    work = []
    for number, event in enumerate(timed):
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            by = operations.get(_external(event)) if _external(event) is not None else None
            launches[str(number)] = _launched(event["name"], by, number)
            kind = class_of(launches[str(number)])
            work.append(KernelInterval(event["ts"], event["ts"] + event["dur"], kind, str(number)))
    return resolve_overlaps(work, CLASSES)


def _cpu_intervals(timed: list[dict[str, Any]], launches: dict[str, Launched]) -> Iterator[KernelInterval]:
    """Operations enclose one another: what an inner one is decides, unless nobody knows it."""
    work = []
    for number, event in enumerate(timed):
        if event.get("cat") == "cpu_op":
            launches[str(number)] = _launched("", event, number)
            work.append(
                KernelInterval(
                    event["ts"], event["ts"] + event["dur"], class_of(launches[str(number)]), str(number), False
                )
            )
    return resolve_nesting(work)


def _external(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("External id")


def _launched(kernel: str, operation: dict[str, Any] | None, number: int) -> Launched:
    if operation is None:
        return Launched(kernel, "", (), (), number)
    arguments = operation.get("args", {})
    dims = tuple(tuple(d) if all(isinstance(n, int) for n in d) else () for d in arguments.get("Input Dims", ()))
    return Launched(kernel, operation["name"], dims, tuple(arguments.get("Input type", ())), _external(operation))
