"""TensorRT-LLM's benchmark, trtllm-bench: its dataset, its options file, its command.

    local_command(config)          bash -c SCRIPT, in the run folder
    launch_spec(config, environ)   the same on a cluster: one task per GPU, of which the first runs SCRIPT
    check(config, local)           ConfigError where it cannot be started

The report it prints is parsed in results/readers/. `prepare-dataset` is part of trtllm-bench since 1.3; with
an older version pass a file: DATASET.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from shutil import which
from typing import Any

from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError
from llmb.launch.engines.launch_spec import LaunchSpec

PROGRAM = "trtllm-bench"
SCRIPT_FILE, OPTIONS_FILE, DATASET_FILE = "trtllm.sh", "trtllm.yaml", "dataset.jsonl"
STREAM_INTERVAL = 4  # tokens between two streamed responses, as in the recipe
# Speculative decoding with DeepSeek's MTP layer: draft tokens, and relaxed acceptance.
MTP_DRAFT_TOKENS, RELAXED_TOPK, RELAXED_DELTA = 3, 10, 0.6


def check(config: RunConfig, local: bool = True) -> None:
    """Raise a ConfigError where trtllm-bench cannot be started for this run. `local`: without Slurm."""
    if local and which(PROGRAM) is None:
        raise ConfigError(f"--engine trtllm needs {PROGRAM} on the PATH, as in TensorRT-LLM's container; or --dry-run")
    if _work(config).weights is None:
        raise ConfigError("--engine trtllm needs published weights: WEIGHTS=FOLDER, in Hugging Face's layout")
    if local and config.machine.nodes > 1:
        raise ConfigError(f"--engine trtllm needs {config.machine.nodes} nodes, this is one; use --on slurm")


def local_command(config: RunConfig) -> list[str]:
    """Return the whole run as one command, to be started in the run folder."""
    return ["bash", "-c", script(config)]


def launch_spec(config: RunConfig, environ: Mapping[str, str]) -> LaunchSpec:
    """Return one task per GPU; trtllm-llmapi-launch runs the script on the first and workers on the others.

    The script is a file, as some versions of that launcher split quoted arguments. Tasks use MPI: PMIx, unless
    SLURM_MPI_TYPE names another.
    """
    work = _work(config)
    folders = [work.weights, str(Path(work.dataset).parent) if work.dataset else None]
    return LaunchSpec(
        command=("trtllm-llmapi-launch", "bash", SCRIPT_FILE),
        mpi=environ.get("SLURM_MPI_TYPE", "pmix"),
        files={SCRIPT_FILE: script(config)},
        folders=tuple(folder for folder in folders if folder),
    )


def environment(config: RunConfig) -> dict[str, str]:
    """Return the variables that set which steps are profiled."""
    profile = config.profile
    if not profile.profile:
        return {}
    variables = {"TLLM_PROFILE_START_STOP": f"{profile.profile_start}-{profile.profile_stop}"}
    if profile.profiler == "torch":
        return variables | {"TLLM_TORCH_PROFILE_TRACE": "trace.json"}
    return variables | {"TLLM_LLMAPI_ENABLE_NVTX": "1", "TLLM_PROFILE_RECORD_GC": "1"}


def script(config: RunConfig) -> str:
    """Return the script that writes the options file, prepares the dataset and runs the benchmark."""
    return "\n".join(["set -euo pipefail", *_setup_lines(config), f"exec {bench_line(config)}"]) + "\n"


def _setup_lines(config: RunConfig) -> list[str]:
    lines = [] if _work(config).weights else [': "${WEIGHTS:?set it to the folder of the weights}"']
    lines += [f"cat > {OPTIONS_FILE} <<'END'", options_text(config).rstrip("\n"), "END"]
    return lines + ([] if _work(config).dataset else [dataset_line(config)])


def dataset_line(config: RunConfig) -> str:
    """Return the command that writes the dataset. Its tokenizer is that of --model, which is the weight folder here."""
    work = _work(config)
    common = ["--output", DATASET_FILE, "--random-seed", work.seed]
    if work.lengths == "uniform":
        distribution, lengths = "token-unif-dist", _length_bounds(work)
    else:
        distribution = "token-norm-dist"
        means = {"--input-mean": work.isl, "--output-mean": work.osl}
        lengths = means | {"--input-stdev": round(work.isl_spread), "--output-stdev": round(work.osl_spread)}
    arguments = ["prepare-dataset", *common, distribution, "--num-requests", work.num_requests, *_flat(lengths)]
    return f"{PROGRAM} --model {_weights(work)} {_join(arguments)}"


def _length_bounds(work: Inference) -> dict[str, int]:
    bounds: dict[str, int] = {}
    for name, length, spread in (("input", work.isl, work.isl_spread), ("output", work.osl, work.osl_spread)):
        bounds |= {f"--{name}-min": length - round(spread), f"--{name}-max": length + round(spread)}
    return bounds


def bench_line(config: RunConfig) -> str:
    """Return the benchmark command. Both modes are throughput runs; a latency run has concurrency 1."""
    work, parallel = _work(config), config.parallel
    settings = {
        "--backend": "pytorch",
        "--tp": parallel.tp,
        "--ep": parallel.ep,
        "--pp": parallel.pp,
        "--dataset": work.dataset or DATASET_FILE,
        "--max_batch_size": work.max_batch_size,
        "--max_num_tokens": work.max_num_tokens,
        "--num_requests": work.num_requests,
        "--concurrency": work.concurrency,
        "--warmup": 0 if work.warmup_requests is None else work.warmup_requests,
        "--extra_llm_api_options": OPTIONS_FILE,
    }
    arguments = ["throughput", *_flat(settings), *(["--streaming"] if work.streaming else [])]
    return f"{PROGRAM} --model {shlex.quote(config.model.name)} --model_path {_weights(work)} {_join(arguments)}"


def options_text(config: RunConfig) -> str:
    """Return the options file: settings without a flag on the command line."""
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
        options["cuda_graph_config"] = {"enable_padding": True, "batch_sizes": _graph_batch_sizes(work.max_batch_size)}
    if work.mode == "min_latency" and config.model.architecture == "deepseek":
        options |= {
            "moe_config": {"backend": "TRTLLM"},
            "speculative_config": {
                "decoding_type": "MTP",
                "num_nextn_predict_layers": MTP_DRAFT_TOKENS,
                "use_relaxed_acceptance_for_thinking": True,
                "relaxed_topk": RELAXED_TOPK,
                "relaxed_delta": RELAXED_DELTA,
            },
        }
    return options


def _graph_batch_sizes(max_batch_size: int) -> list[int]:
    """Return the powers of two up to the largest batch, and that itself."""
    powers = [1 << power for power in range(max_batch_size.bit_length())]
    return powers if powers[-1] == max_batch_size else [*powers, max_batch_size]


def _weights(work: Inference) -> str:
    return shlex.quote(work.weights) if work.weights else '"$WEIGHTS"'


def _flat(settings: dict[str, Any]) -> list[Any]:
    return [word for pair in settings.items() for word in pair]


def _join(arguments: list[Any]) -> str:
    return shlex.join(map(str, arguments))


def _work(config: RunConfig) -> Inference:
    assert isinstance(config.workload, Inference)
    return config.workload
