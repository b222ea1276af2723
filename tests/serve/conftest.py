"""One server for all tests of the API."""

import pytest
from live_server import LiveServer, server_config, write_config, write_weights_folder


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory):
    """Random weights of a small Llama, with a tokenizer and a chat template."""
    return write_weights_folder(tmp_path_factory.mktemp("weights") / "small-llama")


@pytest.fixture(scope="session")
def live_server(weights_folder, tmp_path_factory):
    config = write_config(tmp_path_factory.mktemp("server"), server_config(weights_folder))
    with LiveServer(config, "--max-body-mb", "0.05") as server:
        yield server
