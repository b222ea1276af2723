"""Load generators that others wrote, each in an environment of its own (`make peers`), drive the server.

Every request succeeds, and the server, the client's report and the client's own tokenizer count the same tokens.
"""

import sys
from pathlib import Path
from random import Random

import pytest
from live_server import LiveServer, write_config

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from inference.external_clients import CLIENTS, ClientLoad, environment_of, run_client
from inference.tiny_llama import SMALL, server_config, write_tiny_llama

from llmb.loadgen.prompt_text import TextWriter, load_tokenizer

pytestmark = pytest.mark.nightly
REQUESTS, ISL, OSL, CONCURRENCY = 24, 48, 20, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("weights") / "tiny-llama", SMALL)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with LiveServer(write_config(tmp_path_factory.mktemp("server"), server_config(folder, SMALL))) as server:
        yield server


@pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_and_the_server_count_the_same(server, folder, tmp_path, name, chat):
    if name != "llmb" and environment_of(name) is None:
        pytest.skip(f"{name} is not installed: make peers, or LLMB_{name.upper()}_VENV")
    writer, random = TextWriter(load_tokenizer(folder)), Random(3)
    prompts = [writer.text(random, ISL, serial=number) for number in range(REQUESTS)]
    load = ClientLoad(
        url=server.url,
        model=folder.name,
        tokenizer=folder,
        prompts=prompts,
        osl=OSL,
        concurrency=CONCURRENCY,
        chat=chat,
        own_count=True,
    )
    before = server.wait_idle()
    figures = run_client(name, load, tmp_path)
    after = server.wait_idle()

    assert (figures.completed, figures.failed) == (REQUESTS, 0)
    assert figures.output_tokens == REQUESTS * OSL
    assert figures.own_output_tokens in (None, REQUESTS * OSL)
    template = writer.count("user: \nassistant: ") if chat else 0
    assert figures.input_tokens in range(REQUESTS * ISL, REQUESTS * (ISL + template) + 1)
    for metric, count in (("prompt", figures.input_tokens), ("generation", figures.output_tokens)):
        assert after[f"vllm:{metric}_tokens_total"] - before[f"vllm:{metric}_tokens_total"] == count
    assert 0 < figures.ttft_ms < figures.e2e_ms
    assert 0 < figures.tpot_ms < figures.e2e_ms / (OSL - 1)
