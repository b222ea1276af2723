"""Launches of training: forward, backward and update of models of a few layers at full width, as in a dry run."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from training.train_rows import ROWS, Row, configuration

from kernel_matrix.launch_recorder import LaunchRecorder
from kernel_matrix.serving_launches import shortened
from llmb.config.native.training_support import supported_training
from llmb.config.spec import RunConfig, Training
from llmb.errors import ConfigError
from llmb.ops.attention import segment_attention
from llmb.ops.device_capabilities import check_dtypes
from llmb.train.dry_run.dry_run import dry_run_rank
from llmb.train.dry_run.meta_rank import MetaRank

META = torch.device("meta")


def launch_training(recorder: LaunchRecorder) -> list[str]:
    """Compute a step of each row of `bench/train_gpu.py`; return why some are refused on this GPU."""
    refused = []
    for row in ROWS:
        recorder.step = f"train {row.title}"
        try:
            check_dtypes(META, dtype=row.dtype)
            _launch_step(_short_config(row))
        except ConfigError as error:
            refused.append(f"{recorder.step}: {error}")
    return refused


def _short_config(row: Row) -> RunConfig:
    config = configuration(row, "h200", ())
    work = config.workload
    assert isinstance(work, Training)
    workload = replace(work, cuda_graphs=False, recompute_layers=min(work.recompute_layers or 0, 1))
    return replace(config, model=shortened(config.model), workload=workload)


def _launch_step(config: RunConfig) -> None:
    with ExitStack() as stack:
        kernel_for = segment_attention.kernel_for
        mesh, watch = stack.enter_context(dry_run_rank(config, 0))
        fused = segment_attention.kernel_for

        def softcap_or_fused(q: Any, segments: Any, window: int | None = None, softcap: float | None = None) -> Any:
            kernel: Callable[..., Any] = fused if softcap is None else kernel_for
            return kernel(q, segments, window, softcap)

        stack.enter_context(patch.object(segment_attention, "kernel_for", softcap_or_fused))
        MetaRank(config, supported_training(config), mesh, watch).step()
