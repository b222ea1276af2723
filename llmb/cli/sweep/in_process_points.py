"""Points measured by the engine itself, without HTTP: each is a run of its own, listed by `llmb-run jobs`."""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from llmb.cli.sweep.sweep_loop import Measurement
from llmb.config.serialization import build
from llmb.config.spec import Inference, Override, RunConfig
from llmb.events import Event
from llmb.loadgen.sweep.sweep_plan import PointLoad
from llmb.perfmodel.explain.run_prediction import predict_run
from llmb.results.sweep.sweep_points import PointKey


class InProcessPoints:
    """Driver of points in processes of the engine; `configs`: by variant."""

    def __init__(self, configs: Mapping[str, Mapping[str, Any]], on_event: Callable[[Event], None]):
        self._configs = {name: build(RunConfig, config["run"], "sweep.json") for name, config in configs.items()}
        self._on_event = on_event

    def prepare(self, key: PointKey) -> None:
        """Nothing: each run starts its own engine."""

    def measure(self, key: PointKey, load: PointLoad, folder: Path) -> Measurement:
        """Run the engine once and copy its events and configuration."""
        from llmb.cli.stored_runs import write_result
        from llmb.launch.command import engine_command
        from llmb.launch.install_root import install_root
        from llmb.launch.local import run_local
        from llmb.launch.run_folder import RunFolder, store_path
        from llmb.launch.run_lock import exclusive_run_lock
        from llmb.results.job_store import Store

        config = point_config(self._configs[key.variant], key, load)
        root = install_root(os.environ)
        with exclusive_run_lock(root, config), Store(store_path(root)) as store:
            run_dir = RunFolder.create(root, config, datetime.now())
            job = store.add(config, run_dir.path)
            run_dir.write_record(config, job)
            run_dir.add_short_path(job)
            command = engine_command(config, run_dir, sys.executable)
            try:
                outcome = run_local(config, run_dir, command, {}, self._on_event, config.limits.time_limit_s)
            finally:
                result = write_result(run_dir, config)
                store.finish(job, result)
        for path in (run_dir.config, *run_dir.all_events()):
            shutil.copyfile(path, folder / path.name)
        if outcome.interrupted is not None:
            raise KeyboardInterrupt
        return Measurement(result=result)


def point_config(config: RunConfig, key: PointKey, load: PointLoad) -> RunConfig:
    """Return the configuration of one point, with what the sweep chose among its overrides."""
    work = config.workload
    assert isinstance(work, Inference)
    values: dict[str, Any] = {"num_requests": load.requests}
    values |= {"concurrency": int(key.load)} if key.load_kind == "concurrency" else {"rate": key.load}
    values |= {"seed": work.seed + key.repeat - 1} if key.repeat > 1 else {}
    chosen = tuple(
        Override(field=field, value=value, replaced=getattr(work, field), source="--set")
        for field, value in values.items()
    )
    overrides = tuple(override for override in config.overrides if override.field not in values)
    name = config.name.replace(f"_CON{work.concurrency}_", f"_CON{values.get('concurrency', work.concurrency)}_")
    point = replace(config, name=name, workload=replace(work, **values), overrides=(*overrides, *chosen))
    return replace(point, predicted=predict_run(point))
