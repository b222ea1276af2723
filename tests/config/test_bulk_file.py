"""Bulk files: sweeps, the older text format, and errors with their location."""

import random

import pytest

from llmb.config.bulk_file import read_bulk
from llmb.config.resolve import resolve
from llmb.config.run_list import RunSelection
from llmb.errors import ConfigError

SWEEP = """
pretrain_llama3.1_405b:
  defaults: {env: {NCCL_DEBUG: INFO}, params: {mbs: 1}}
  dtypes: [fp8]
  scales: [128, 256]
  repeats: 2
  tasks:
    - overrides: {params: {tp: [2, 4]}}
    - scales: 512
      repeats: 1
      profile: true
inference_deepseek-r1_671b:
  dtypes: nvfp4
  scales: 4
  tasks:
    - overrides: {env: {USE_CASE: chat, MAX_BATCH_SIZE: 100}}
"""
TEXT = """# comment
pretrain_llama3.1_70b:
('fp8', [128, 256], 3)   # a trailing comment is no reason to drop a line
('fp8', [512], 1, True)
inference_deepseek-r1_671b:
(['nvfp4'], [4], 1)
"""


@pytest.fixture
def bulk(tmp_path, recipes):
    def read(text, name="runs.yaml", **selection):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_bulk(path, recipes, RunSelection(gpu="gb200", **selection))

    return read


def test_yaml_sweeps_every_combination(bulk, recipes):
    tasks = bulk(SWEEP)
    runs = [(t.request.gpus, t.repeats, resolve(recipes[t.workload], t.request).parallel.tp) for t in tasks]
    assert sorted(runs) == [(4, 1, 4), (128, 2, 2), (128, 2, 4), (256, 2, 2), (256, 2, 4), (512, 1, 2)]
    profiled = [t for t in tasks if t.request.gpus == 512]
    assert resolve(recipes["pretrain_llama3.1"], profiled[0].request).profile.profile
    assert tasks[0].request.environment == {"NCCL_DEBUG": "INFO"}
    chat = resolve(recipes["inference_deepseek-r1"], tasks[-1].request)
    assert (chat.workload.use_case, chat.workload.max_batch_size) == ("chat", 100)


@pytest.mark.parametrize(
    "overrides", ['{env: {USE_CASE: "chat:64/32", NCCL_DEBUG: INFO}}', '{params: {use_case: ["chat:64/32"]}}']
)
def test_a_use_case_may_have_its_lengths(bulk, recipes, overrides):
    tasks = bulk(f"inference_deepseek-r1_671b: {{dtypes: nvfp4, scales: 4, tasks: [{{overrides: {overrides}}}]}}")
    work = resolve(recipes["inference_deepseek-r1"], tasks[0].request).workload
    assert (work.use_case, work.isl, work.osl) == ("chat", 64, 32)
    assert "USE_CASE" not in tasks[0].request.environment


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("DTYPE: bf16", "yaml DTYPE: a variable of ranks does not choose the row; name the dtype$"),
        ("FP8_RECIPE: mx", "^FP8_RECIPE=mx has no effect here"),
    ],
)
def test_variables_that_change_nothing_are_refused(bulk, variable, message):
    with pytest.raises(ConfigError, match=message):
        bulk(f"pretrain_llama3.1_405b: {{scales: 128, tasks: [{{overrides: {{env: {{{variable}}}}}}}]}}")


def test_text_format_accepts_hyphens_and_trailing_comments(bulk):
    tasks = bulk(TEXT, "runs.txt")
    assert [(t.workload, t.request.gpus, t.repeats) for t in tasks] == [
        ("pretrain_llama3.1", 256, 3),
        ("pretrain_llama3.1", 128, 3),
        ("pretrain_llama3.1", 512, 1),
        ("inference_deepseek-r1", 4, 1),
    ]


def test_command_line_flags_apply_to_files(bulk):
    tasks = bulk(TEXT, "runs.txt", scales=(512,), repeats=7)
    assert [(t.request.gpus, t.repeats) for t in tasks] == [(512, 7)]


def test_add_profile_adds_one_run(bulk):
    tasks = bulk("pretrain_grok1_314b: {dtypes: fp8, scales: 128, repeats: 3, add_profile: true}")
    assert [(t.repeats, bool(t.request.settings)) for t in tasks] == [(3, False), (1, True)]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("a: [}", "x.yaml", "x.yaml line 1: not valid YAML"),
        ("a:\n  - b\n c: d", "x.yaml", "line 3"),
        ("pretrain_llama3.1_8b: {scalez: 8}", "x.yaml", "did you mean scales"),
        ("pretrain_llama3.1_8b: {scales: [eight]}", "x.yaml", "scales"),
        ("pretrain_lama_8b: {}", "x.yaml", "unknown workload"),
        ("[1, 2]", "x.yaml", "expected sections"),
        ("pretrain_llama3.1_8b: {tasks: []}", "x.yaml", "no tasks generated"),
        ("pretrain_llama3.1_8b: {profile: true, add_profile: true}", "x.yaml", "exclude each other"),
        ("('fp8', [8], 1)", "x.txt", "line 1: a task before any"),
        ("pretrain_llama3.1_8b:\n('fp8', 8)", "x.txt", "line 2: expected"),
        ("pretrain_llama3.1_8b:\nfp8 8 1", "x.txt", "line 2: expected"),
        ("", "x.txt", "no tasks generated"),
    ],
)
def test_invalid_file_gives_a_one_line_error_with_its_location(bulk, text, name, message):
    with pytest.raises(ConfigError) as caught:
        bulk(text, name)
    assert message in str(caught.value)


def test_missing_file_is_named(tmp_path, recipes):
    for name in ("no.yaml", "no.txt"):
        with pytest.raises(ConfigError, match="cannot read"):
            read_bulk(tmp_path / name, recipes, RunSelection())


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Apply a few random edits: flipped, deleted, repeated and inserted bytes."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 20)]
        elif kind == 2:
            data[at:at] = data[at : at + 30]
        elif kind == 3:
            data[at:at] = bytes(rng.choice(b"\t\r\n:{}[]-'\"&*!|>%@`#,\x00\xff 19"))
        else:
            data[at:at] = rng.choice([b"null", b"-1", b"1e999", b"!!python/name:os.system", b"*a", b"&a", b"- -"])
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_mutated_files_raise_only_config_errors(bulk, recipes, tmp_path, count):
    """Mutated YAML and text bulk files and recipes give a config or a ConfigError, never another exception."""
    from llmb.config.recipe import load, paths, shipped

    rng = random.Random(20261115)
    recipe_files = [path.read_bytes() for path in paths([shipped()])]
    broken = tmp_path / "recipe.yaml"
    outcomes = {"read": 0, "refused": 0}
    for number in range(count):
        try:
            if number % 10 == 0:
                broken.write_bytes(mutate(rng.choice(recipe_files), rng))
                recipe = load(broken)
                tasks = [t for row in recipe.rows[:2] for t in _request(recipe, row)]
                for request in tasks:
                    resolve(recipe, request)
            else:
                name, text = rng.choice([("x.yaml", SWEEP), ("x.txt", TEXT)])
                for task in bulk(mutate(text.encode(), rng), name):
                    resolve(recipes[task.workload], task.request)
            outcomes["read"] += 1
        except ConfigError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > count / 20


def _request(recipe, row):
    from llmb.config.row_selection import RunRequest

    size, dtype = row.get("size"), row.get("dtype")
    if isinstance(size, str) and isinstance(dtype, str):
        yield RunRequest(size=size, dtype=dtype, gpus=128, gpu="gb200")


@pytest.mark.parametrize("line", ["('fp8', [8], {n})", "('fp8', [{n}], 1)"])
def test_number_in_the_text_format_that_python_does_not_print_is_refused(bulk, line):
    with pytest.raises(ConfigError, match=r"runs\.txt line 2: expected"):
        bulk("pretrain_llama3.1_70b:\n" + line.format(n="0x" + "f" * 5000), "runs.txt")
