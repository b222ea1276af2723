"""TensorRT-LLM's own benchmark, trtllm-bench: its requests, its options file, its command.

    local_command(config)    what runs in the run folder: bash -c SCRIPT
    order(config, environ)   the same on a cluster: a task for each GPU, of which the first runs SCRIPT
    check(config, here)      one line where it cannot be started

The report it prints is read by results/trtllm.py. `prepare-dataset` is part of trtllm-bench from 1.3 on; with an older
one the requests come from a file: DATASET.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from typing import Any

from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.launch.engines.launch_spec import EngineOrder

PROGRAM = "trtllm-bench"
SCRIPT_FILE, OPTIONS_FILE, DATASET_FILE = "trtllm.sh", "trtllm.yaml", "dataset.jsonl"
STREAM_INTERVAL = 4  # tokens between two messages of a stream, as the recipe has it
# DeepSeek's own prediction layer drafts this many tokens; one that is among the likeliest, or nearly, is accepted.
DRAFTED, LIKELIEST, NEARLY = 3, 10, 0.6


def check(config: RunConfig, here: bool = True) -> None:
    """A ConfigError where trtllm-bench cannot be started for this run. `here`: on this machine, without a cluster."""
    if here and which(PROGRAM) is None:
        raise ConfigError(f"--engine trtllm needs {PROGRAM} on the PATH, as in TensorRT-LLM's container; or --dry-run")
    if _work(config).weights is None:
        raise ConfigError("--engine trtllm needs published weights: WEIGHTS=FOLDER, in Hugging Face's layout")
    if here and config.machine.nodes > 1:
        raise ConfigError(f"--engine trtllm needs {config.machine.nodes} nodes, here is one; use --on slurm")


def local_command(config: RunConfig) -> list[str]:
    """The whole run as one command, for the folder it is started in."""
    return ["bash", "-c", script(config)]


def order(config: RunConfig, environ: Mapping[str, str]) -> EngineOrder:
    """A task for each GPU. Its launcher makes the first run the script and the others wait for work.

    The script is a file, as some versions of that launcher take quoted words apart. Tasks find each other by MPI:
    PMIx, unless srun's own variable names another.
    """
    work = _work(config)
    folders = [work.weights, str(Path(work.dataset).parent) if work.dataset else None]
    return EngineOrder(
        command=("trtllm-llmapi-launch", "bash", SCRIPT_FILE),
        mpi=environ.get("SLURM_MPI_TYPE", "pmix"),
        files={SCRIPT_FILE: script(config)},
        folders=tuple(folder for folder in folders if folder),
    )


def environment(config: RunConfig) -> dict[str, str]:
    """What it wants to be told by variables: which of its steps are profiled."""
    asked = config.profile
    if not asked.profile:
        return {}
    window = {"TLLM_PROFILE_START_STOP": f"{asked.profile_start}-{asked.profile_stop}"}
    if asked.profiler == "torch":
        return window | {"TLLM_TORCH_PROFILE_TRACE": "trace.json"}
    return window | {"TLLM_LLMAPI_ENABLE_NVTX": "1", "TLLM_PROFILE_RECORD_GC": "1"}


def script(config: RunConfig) -> str:
    """Writes the options file, prepares the requests, runs the benchmark."""
    return "\n".join(["set -euo pipefail", *_preparations(config), f"exec {bench_line(config)}"]) + "\n"


def _preparations(config: RunConfig) -> list[str]:
    lines = [] if _work(config).weights else [': "${WEIGHTS:?set it to the folder of the weights}"']
    lines += [f"cat > {OPTIONS_FILE} <<'END'", options_text(config).rstrip("\n"), "END"]
    return lines + ([] if _work(config).dataset else [dataset_line(config)])


def dataset_line(config: RunConfig) -> str:
    """The command that writes the requests. Its tokenizer is that of the model named, so that is the folder here."""
    work = _work(config)
    given = ["--output", DATASET_FILE, "--random-seed", work.seed]
    if work.lengths == "uniform":
        kind, lengths = "token-unif-dist", _bounds(work)
    else:
        kind = "token-norm-dist"
        means = {"--input-mean": work.isl, "--output-mean": work.osl}
        lengths = means | {"--input-stdev": round(work.isl_spread), "--output-stdev": round(work.osl_spread)}
    words = ["prepare-dataset", *given, kind, "--num-requests", work.num_requests, *_flat(lengths)]
    return f"{PROGRAM} --model {_weights(work)} {_joined(words)}"


def _bounds(work: Inference) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, length, spread in (("input", work.isl, work.isl_spread), ("output", work.osl, work.osl_spread)):
        found |= {f"--{name}-min": length - round(spread), f"--{name}-max": length + round(spread)}
    return found


def bench_line(config: RunConfig) -> str:
    """The benchmark itself. Both modes are throughput runs; a latency run has one request in flight."""
    work, split = _work(config), config.parallel
    settings = {
        "--backend": "pytorch",
        "--tp": split.tp,
        "--ep": split.ep,
        "--pp": split.pp,
        "--dataset": work.dataset or DATASET_FILE,
        "--max_batch_size": work.max_batch_size,
        "--max_num_tokens": work.max_num_tokens,
        "--num_requests": work.num_requests,
        "--concurrency": work.concurrency,
        "--warmup": 0 if work.warmup_requests is None else work.warmup_requests,
        "--extra_llm_api_options": OPTIONS_FILE,
    }
    words = ["throughput", *_flat(settings), *(["--streaming"] if work.streaming else [])]
    return f"{PROGRAM} --model {shlex.quote(config.model.name)} --model_path {_weights(work)} {_joined(words)}"


def options_text(config: RunConfig) -> str:
    """The options file: what has no flag on the command line."""
    import yaml  # slow to import, and only needed here

    return yaml.safe_dump(_options(config), sort_keys=False, default_flow_style=None, width=1000)


def _options(config: RunConfig) -> dict[str, Any]:
    work = _work(config)
    cache: dict[str, Any] = {"dtype": "fp8"} if config.precision.kv_dtype == "fp8" else {}
    cache |= {"free_gpu_memory_fraction": work.kv_fraction, "enable_block_reuse": work.prefix_cache}
    options: dict[str, Any] = {
        "enable_attention_dp": work.attention_dp,
        "kv_cache_config": cache,
        "enable_chunked_prefill": work.chunked_prefill,
        "stream_interval": STREAM_INTERVAL,
        "print_iter_log": True,
    }
    if work.cuda_graphs:
        options["cuda_graph_config"] = {"enable_padding": True, "batch_sizes": _graph_sizes(work.max_batch_size)}
    if work.mode == "min_latency" and config.model.architecture == "deepseek":
        options |= {
            "moe_config": {"backend": "TRTLLM"},
            "speculative_config": {
                "decoding_type": "MTP",
                "num_nextn_predict_layers": DRAFTED,
                "use_relaxed_acceptance_for_thinking": True,
                "relaxed_topk": LIKELIEST,
                "relaxed_delta": NEARLY,
            },
        }
    return options


def _graph_sizes(most: int) -> list[int]:
    """Powers of two, and the largest batch."""
    powers = [1 << power for power in range(most.bit_length())]
    return powers if powers[-1] == most else [*powers, most]


def _weights(work: Inference) -> str:
    return shlex.quote(work.weights) if work.weights else '"$WEIGHTS"'


def _flat(settings: dict[str, Any]) -> list[Any]:
    return [word for pair in settings.items() for word in pair]


def _joined(words: list[Any]) -> str:
    return shlex.join(map(str, words))


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload
