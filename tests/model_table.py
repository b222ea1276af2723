"""The table of docs/models.md: what runs where, from the models that the tests compare with their references.

python tests/model_table.py > table.md        # the part of docs/models.md between its markers
"""

from collections.abc import Iterable, Sequence

from dense_cases import DENSE_CASES
from mixture_cases import MIXTURE_CASES
from small_models import SMALL_MODELS

from llmb.config.model import Model
from llmb.config.native.llama_layer_shapes import has_llama_layers
from llmb.config.native.outofcore_support import check_outofcore_model
from llmb.config.parallel_layout import check_model, check_serving
from llmb.config.spec import Parallel
from llmb.errors import ConfigError

BEGIN, END = "<!-- table of tests/model_table.py -->", "<!-- end of the table -->"
TITLES = {
    "llama": "Llama 2, 3", "qwen2": "Qwen2, Qwen2.5", "qwen3": "Qwen3", "mistral": "Mistral, Mistral 3 (text)",
    "smollm3": "SmolLM3",
    "phi3": "Phi-3, Phi-4", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "gemma2": "Gemma 2", "gemma3": "Gemma 3 (text)",
    "exaone4": "EXAONE 4", "granite": "Granite 3", "seed_oss": "Seed-OSS", "glm": "GLM-4 9b (2024)",
    "glm4": "GLM-4-0414", "ernie4_5": "ERNIE 4.5 (dense)", "arcee": "Arcee AFM",
    "mixtral": "Mixtral", "qwen3_moe": "Qwen3-MoE", "gpt_oss": "gpt-oss 20b, 120b",
    "glm4_moe": "GLM-4.5, 4.6, 4.7, GLM-4.5-Air", "minimax_m2": "MiniMax-M2",
    "dots1": "dots.llm1", "olmoe": "OLMoE", "ernie4_5_moe": "ERNIE 4.5 (MoE)",
    "nemotron_h": "Nemotron-H", "grok1": "Grok-1", "deepseek": "DeepSeek-V3, R1, Kimi K2",
}  # fmt: skip
TABLE_MODELS = [*SMALL_MODELS.values(), *DENSE_CASES, *MIXTURE_CASES]


def model_table(models: Sequence[Model] = TABLE_MODELS) -> str:
    """Return the table in Markdown, one row for each architecture."""
    lines = ["| model | compared variants | trained in | layouts | served | out of core |", "|---|---|---|---|---|---|"]
    for architecture, title in TITLES.items():
        cases = [model for model in models if model.architecture == architecture]
        cells = (title, _variants(cases), _trained_in(cases), _layouts(cases), _served(cases), _out_of_core(cases))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _variants(cases: Iterable[Model]) -> str:
    return ", ".join(dict.fromkeys(model.name.replace("-", " ") for model in cases if model.name != model.architecture))


def _trained_in(cases: Iterable[Model]) -> str:
    kinds = dict.fromkeys("explicit layers" if has_llama_layers(model) else "autograd layers" for model in cases)
    return ", ".join(kinds)


def _layouts(cases: Sequence[Model]) -> str:
    """Return the degrees that split every case; data parallelism and FSDP split anything."""
    degrees = {"tp": Parallel(tp=2), "pp": Parallel(pp=2), "cp": Parallel(cp=2), "ep": Parallel(dp=2, ep=2)}
    split = [name for name, parallel in degrees.items() if all(_divides(parallel, model) for model in cases[:1])]
    return ", ".join(["dp", "fsdp", *split])


def _divides(parallel: Parallel, model: Model) -> bool:
    try:
        check_model(parallel, model)
    except ConfigError:
        return False
    return True


def _served(cases: Sequence[Model]) -> str:
    try:
        check_serving(Parallel(tp=2), cases[0], attention_dp=False)
    except ConfigError:
        return "one GPU, pp"
    return "tp, pp"


def _out_of_core(cases: Iterable[Model]) -> str:
    """Return yes, and the fields that out-of-core training refuses."""
    runs, refused = False, dict[str, None]()
    for model in cases:
        try:
            check_outofcore_model(model, "bf16")
        except ConfigError as error:
            refused[str(error).partition("does not compute ")[2].partition("=")[0]] = None
        else:
            runs = True
    fields = ", ".join(refused)
    return f"no: {fields}" if not runs else f"yes, without {fields}" if fields else "yes"


if __name__ == "__main__":
    print(model_table())
