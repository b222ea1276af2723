"""The tables of the source documents, typed as they are printed; every row of a recipe must equal them cell by cell.

DP and GA are checked twice: the recipe keeps the printed cell, and the printed cell must follow from the others.
"""

from typing import Any

import pytest

from llmb.config.recipe import Recipe, Row, expand_gpus, load_all, per_gpus, shipped

RECIPES = load_all([shipped()])

LLAMA_GB300 = """
| Llama3.1 Model Size | GPUs | Datatype | SeqLen | Layers | FSDP | TP | PP | CP | EP | ETP | DP | VP | MBS | GBS | GA | CG | RL | OL |
| 405b | 128-1024 | FP8 | 8192 | 126 | True | 2 | 1 | 1 | NA | NA | GPUs/2 | NA | 1 | GPUs/2 | 1 | False | 0 | 80 |
| 70b | 64-1024 | FP8 | 8192 | 80 | True | 1 | 1 | 1 | NA | NA | GPUs | NA | 2 | GPUs*2 | 1 | False | 0 | 40 |
| 8b | 8-128 | FP8 | 8192 | 32 | False | 1 | 1 | 1 | NA | NA | GPUs | NA | 2 | GPUs*16 | 8 | True | 0 | 0 |
"""  # noqa: E501

LLAMA_GB200 = """
| Llama3.1 Model Size | GPUs | Datatype | SeqLen | Layers | FSDP | TP | PP | CP | EP | ETP | DP | VP | MBS | GBS | GA | CG | RL | OL |
| 405b | 128-512 | FP8 | 8192 | 126 | True | 2 | 1 | 1 | NA | NA | GPUs/2 | NA | 1 | GPUs/2 | 1 | False | 0 | 80 |
| 70b | 64-512 | FP8 | 8192 | 80 | True | 1 | 1 | 1 | NA | NA | GPUs | NA | 2 | GPUs*2 | 1 | False | 0 | 40 |
| 8b | 8-128 | FP8 | 8192 | 32 | False | 1 | 1 | 1 | NA | NA | GPUs | NA | 2 | GPUs*16 | 8 | True | 0 | 0 |
"""  # noqa: E501

LLAMA_B200 = """
| Llama3.1 Model Size | GPUs | Datatype | SeqLen | Layers | FSDP | TP | PP | CP | EP | ETP | DP | VP | MBS | GBS | GA | CG | RL | OL |
| 405b | 128-1024 | FP8 | 8192 | 126 | False | 4 | 8 | 2 | NA | NA | GPUs/64 | 8 | 1 | GPUs/2 | 32 | False | 0 | 0 |
| 70b | 64-1024 | FP8 | 8192 | 80 | True | 1 | 1 | 1 | NA | NA | GPUs | NA | 1 | GPUs*2 | 2 | False | 5 | 0 |
| 8b | 8-128 | FP8 | 8192 | 32 | False | 1 | 1 | 1 | NA | NA | GPUs | NA | 2 | GPUs*16 | 8 | True | 0 | 0 |
"""  # noqa: E501

LLAMA_H100 = """
| Llama3.1 Model Size | GPUs | Datatype | SeqLen | Layers | FSDP | TP | PP | CP | EP | ETP | DP | VP | MBS | GBS | GA | CG | RL | OL |
| 405b | 1024 | FP8 | 8192 | 126 | False | 8 | 8 | 2 | NA | NA | GPUs/128 | 8 | 1 | GPUs/2 | 64 | False | 0 | 0 |
| 70b | 64-1024 | FP8 | 8192 | 80 | False | 4 | 8 | 1 | NA | NA | GPUs/32 | 5 | 1 | GPUs*2 | 64 | False | 5 | 0 |
| 8b | 8-128 | FP8 | 8192 | 32 | True | 1 | 1 | 1 | NA | NA | GPUs | NA | 1 | GPUs*16 | 16 | True | 0 | 0 |
"""  # noqa: E501

NEMOTRONH_H100 = """
| Size | Precision | GPUs | SeqLen | Layers | TP | PP | CP | EP | DP | VP | MBS | GBS | GA |
| 56b | FP8 | 32 | 8192 | 118 | 8 | 1 | 1 | NA | 4 | NA | 1 | 96 | 24 |
| 56b | FP8 | 64 | 8192 | 118 | 8 | 1 | 1 | NA | 8 | NA | 1 | 192 | 24 |
| 56b | FP8 | 128 | 8192 | 118 | 8 | 1 | 1 | NA | 16 | NA | 1 | 384 | 24 |
| 56b | FP8 | 256 | 8192 | 118 | 8 | 1 | 1 | NA | 32 | NA | 1 | 768 | 24 |
| 56b | FP8 | 512 | 8192 | 118 | 8 | 1 | 1 | NA | 64 | NA | 1 | 1536 | 24 |
| 56b | FP8 | 1024 | 8192 | 118 | 8 | 1 | 1 | NA | 128 | NA | 1 | 3072 | 24 |
| 56b | FP8 | 2048 | 8192 | 118 | 8 | 1 | 1 | NA | 256 | NA | 1 | 6144 | 24 |
"""

GROK1_GB200 = """
| GPUs | SeqLen | Layers | TP | PP | CP | EP | ETP | DP | VP | MBS | GBS | GA |
| 128 | 8192 | 64 | 4 | 1 | 1 | 8 | 4 | 32 | 1 | 1 | 256 | 8 |
| 256 | 8192 | 64 | 4 | 1 | 1 | 8 | 4 | 64 | 1 | 1 | 512 | 8 |
| 512 | 8192 | 64 | 4 | 1 | 1 | 8 | 4 | 128 | 1 | 1 | 1024 | 8 |
"""

GROK1_H100 = """
| GPUs | SeqLen | Layers | TP | PP | CP | EP | ETP | DP | VP | MBS | GBS | GA |
| 512 | 8192 | 64 | 4 | 8 | 2 | 8 | 1 | 8 | 8 | 1 | 1024 | 128 |
"""

R1_THROUGHPUT_GB200 = """
| Use Case | GPUs | ISL | OSL | max_batch_size | concurrency | max_num_tokens | kv_cache_free_gpu_mem_fraction | Quantization | num_requests | TP | PP | EP | attn_dp_enabled | chunked_prefill_enabled |
| reasoning | 4 | 1,000 | 1,000 | 768 | 3,072 | 6,000 | 0.85 | NVFP4 | 30,720 | 4 | 1 | 4 | Yes | No |
| chat | 4 | 128 | 128 | 2,884 | 11,536 | 16,000 | 0.50 | NVFP4 | 115,360 | 4 | 1 | 4 | Yes | No |
| summarization | 4 | 8,000 | 512 | 160 | 960 | 9,000 | 0.69 | NVFP4 | 9,600 | 4 | 1 | 4 | Yes | Yes |
| generation | 4 | 512 | 8,000 | 224 | 896 | 2,000 | 0.97 | NVFP4 | 8,960 | 4 | 1 | 4 | Yes | Yes |
"""  # noqa: E501

R1_THROUGHPUT_B200 = """
| Use Case | GPUs | ISL | OSL | max_batch_size | concurrency | max_num_tokens | kv_cache_free_gpu_mem_fraction | Quantization | num_requests | TP | PP | EP | attn_dp_enabled |
| reasoning | 4 | 1,000 | 1,000 | 786 | 3,144 | 5,000 | 0.85 | NVFP4 | 31,440 | 4 | 1 | 4 | Yes |
| chat | 4 | 128 | 128 | 3,600 | 4,000 | 12,000 | 0.50 | NVFP4 | 40,000 | 4 | 1 | 4 | Yes |
| summarization | 4 | 8,000 | 512 | 256 | 256 | 4,000 | 0.85 | NVFP4 | 2,560 | 4 | 1 | 4 | Yes |
| generation | 4 | 512 | 8,000 | 256 | 512 | 2,000 | 0.85 | NVFP4 | 5,120 | 4 | 1 | 4 | Yes |
"""  # noqa: E501

R1_THROUGHPUT_H100 = """
| Use Case | GPUs | ISL | OSL | max_batch_size | concurrency | max_num_tokens | kv_cache_free_gpu_mem_fraction | Quantization | num_requests | TP | PP | EP | attn_dp_enabled |
| reasoning | 16 | 1,000 | 1,000 | 384 | 3,072 | 3,000 | 0.65 | FP8 | 30,720 | 8 | 2 | 8 | Yes |
| chat | 16 | 128 | 128 | 384 | 3,072 | 30,720 | 0.65 | FP8 | 3,000 | 8 | 2 | 8 | Yes |
| summarization | 16 | 8,000 | 512 | 128 | 1024 | 2,000 | 0.65 | FP8 | 10,240 | 8 | 2 | 8 | Yes |
| generation | 16 | 512 | 8,000 | 450 | 450 | 1,000 | 0.65 | FP8 | 4,500 | 8 | 2 | 8 | Yes |
"""  # noqa: E501

R1_LATENCY_GB200 = """
| Use Case | GPUs | ISL | OSL | max_batch_size | concurrency | max_num_tokens | kv_cache_free_gpu_mem_fraction | Quantization | num_requests | TP | PP | EP | attn_dp_enabled |
| reasoning | 4 | 1,000 | 1,000 | 1 | 1 | 1000 | 0.1 | NVFP4 | 10 | 4 | 1 | 1 | No |
| chat | 4 | 128 | 128 | 1 | 1 | 128 | 0.1 | NVFP4 | 10 | 4 | 1 | 1 | No |
| summarization | 4 | 8,000 | 512 | 1 | 1 | 8000 | 0.1 | NVFP4 | 10 | 4 | 1 | 1 | No |
| generation | 4 | 512 | 8,000 | 1 | 1 | 512 | 0.1 | NVFP4 | 10 | 4 | 1 | 1 | No |
"""  # noqa: E501

FIELDS = {
    "Llama3.1 Model Size": "size", "Size": "size", "Datatype": "dtype", "Precision": "dtype", "Quantization": "dtype",
    "GPUs": "gpus", "SeqLen": "seqlen", "Layers": "layers", "FSDP": "fsdp", "TP": "tp", "PP": "pp", "CP": "cp",
    "EP": "ep", "ETP": "etp", "DP": "dp", "VP": "vp", "MBS": "mbs", "GBS": "gbs", "GA": "ga", "CG": "cuda_graphs",
    "RL": "recompute_layers", "OL": "offload_layers", "Use Case": "use_case", "ISL": "isl", "OSL": "osl",
    "max_batch_size": "max_batch_size", "concurrency": "concurrency", "max_num_tokens": "max_num_tokens",
    "kv_cache_free_gpu_mem_fraction": "kv_fraction", "num_requests": "num_requests",
    "attn_dp_enabled": "attention_dp", "chunked_prefill_enabled": "chunked_prefill",
}  # fmt: skip

# Cells that are in a table's heading or in the text.
BOTH_DTYPES = {"size": "314b", "dtype": ["fp8", "bf16"]}
THROUGHPUT = {"size": "671b", "mode": "max_throughput"}
TABLES = [
    ("pretrain_llama3.1", LLAMA_GB300, {"gpu": "gb300"}),
    ("pretrain_llama3.1", LLAMA_GB200, {"gpu": "gb200"}),
    ("pretrain_llama3.1", LLAMA_B200, {"gpu": "b200"}),
    ("pretrain_llama3.1", LLAMA_H100, {"gpu": "h100"}),
    ("pretrain_nemotronh", NEMOTRONH_H100, {"gpu": "h100"}),
    ("pretrain_grok1", GROK1_GB200, {"gpu": "gb200", **BOTH_DTYPES, "cuda_graphs": True}),  # of its launch.sh
    ("pretrain_grok1", GROK1_H100, {"gpu": "h100", **BOTH_DTYPES}),
    ("inference_deepseek-r1", R1_THROUGHPUT_GB200, {"gpu": "gb200", **THROUGHPUT}),
    ("inference_deepseek-r1", R1_THROUGHPUT_B200, {"gpu": "b200", **THROUGHPUT}),
    ("inference_deepseek-r1", R1_THROUGHPUT_H100, {"gpu": "h100", **THROUGHPUT}),
    ("inference_deepseek-r1", R1_LATENCY_GB200, {"gpu": "gb200", "size": "671b", "mode": "min_latency"}),
]
# Cells that a row may have beyond the printed ones.
EXTRA = {"time_limit_s"}


def cell(text: str) -> Any:
    """Convert a printed cell to the recipe's value; NA is null."""
    words = {"NA": None, "True": True, "False": False, "Yes": True, "No": False, "FP8": "fp8", "NVFP4": "nvfp4"}
    if text in words:
        return words[text]
    plain = text.replace(",", "")
    if plain.isdigit():
        return int(plain)
    return float(plain) if plain.replace(".", "", 1).isdigit() else plain


def printed_rows(table: str, heading: dict[str, Any]) -> list[Row]:
    """Convert a printed table to recipe rows; ep and etp of NA are left out, as in the recipe."""
    header, *lines = [[c.strip() for c in line.strip("|").split("|")] for line in table.strip().splitlines()]
    rows = []
    for line in lines:
        row = heading | {FIELDS[name]: cell(text) for name, text in zip(header, line, strict=True)}
        rows.append({k: v for k, v in row.items() if not (k in ("ep", "etp") and v is None)})
    return rows


PRINTED = [(workload, row) for workload, table, heading in TABLES for row in printed_rows(table, heading)]


@pytest.mark.parametrize("workload", dict.fromkeys(workload for workload, _ in PRINTED))
def test_recipe_rows_are_the_printed_ones(workload: str) -> None:
    published = [r for r in RECIPES[workload].rows if expand_gpus(r["gpus"])[0] != 1]  # rows from one GPU on are ours
    rows = [{k: v for k, v in row.items() if k not in EXTRA} for row in published]
    assert at_each_scale(rows) == at_each_scale([row for name, row in PRINTED if name == workload])


def at_each_scale(rows: list[Row]) -> list[Row]:
    """Expand rows to one GPU count each, so that a weak-scaling rule can be compared with printed rows."""
    return [
        row | {"gpus": gpus} | {k: per_gpus(row[k], gpus, k) for k in ("dp", "gbs") if k in row}
        for row in rows
        for gpus in expand_gpus(row["gpus"])
    ]


def test_every_table_is_parsed_completely() -> None:
    assert [len(printed_rows(table, {})) for _, table, _ in TABLES] == [3, 3, 3, 3, 7, 3, 1, 4, 4, 4, 4]


def scaled() -> list[tuple[str, Row, int]]:
    return [(name, row, gpus) for name, row in PRINTED if "dp" in row for gpus in expand_gpus(row["gpus"])]


@pytest.mark.parametrize(("workload", "row", "gpus"), scaled())
def test_printed_dp_and_ga_follow_from_the_other_cells(workload: str, row: Row, gpus: int) -> None:
    dp = per_gpus(row["dp"], gpus, "dp")
    assert dp * row["tp"] * row["pp"] * row["cp"] == gpus
    assert row["ga"] * row["mbs"] * dp == per_gpus(row["gbs"], gpus, "gbs")


@pytest.mark.parametrize(("workload", "row"), [(name, row) for name, row in PRINTED if "layers" in row])
def test_printed_layers_are_those_of_the_model(workload: str, row: Row) -> None:
    assert RECIPES[workload].model(row["size"]).layers == row["layers"]


@pytest.mark.parametrize(("workload", "row"), [(name, row) for name, row in PRINTED if "use_case" in row])
def test_inference_ranks_fill_the_gpus(workload: str, row: Row) -> None:
    assert row["tp"] * row["pp"] == row["gpus"]
    assert row["tp"] % row["ep"] == 0


def test_printed_scales() -> None:
    llama: Recipe = RECIPES["pretrain_llama3.1"]
    assert llama.values("gpus", gpu="gb200", size="405b") == [128, 256, 512]
    assert llama.values("gpus", gpu="h100", size="405b") == [1024]
    assert llama.values("gpus", gpu="h100", size="70b") == [64, 128, 256, 512, 1024]
    assert llama.values("gpus", gpu="b200", size="8b") == [8, 16, 32, 64, 128]


def test_published_out_of_core_plan_is_consistent() -> None:
    recipe = RECIPES["outofcore_llama3"]
    (published,) = recipe.references
    plan, layers = published["plan"], recipe.model("8b").layers
    assert {k: published[k] for k in ("seqlen", "host_gib", "device_gib")} == {
        "seqlen": 65536, "host_gib": 178, "device_gib": 78,
    }  # fmt: skip
    assert plan["chunk_size"] * plan["chunks_per_round"] == plan["seqs_per_round"] * published["seqlen"]
    assert plan["seqs_per_round"] * plan["rounds_per_step"] == plan["seqs_per_step"]
    assert plan["seqs_per_step"] * published["seqlen"] == plan["global_batch_tokens"]
    assert layers * plan["chunks_per_round"] - plan["activation_slots"] == plan["host_activations"]
    saved = ("host_fully_saved", "host_inp_context_attn", "host_inp_context")
    assert sum(plan[level] for level in saved) == plan["host_activations"]
