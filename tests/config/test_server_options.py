"""Options of the server: a command line and back, and refusals."""

import argparse

import pytest

from llmb.config.server_options import ServerOptions, add_server_options, server_arguments, server_options
from llmb.errors import ConfigError


def parse(*arguments: str) -> ServerOptions:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    return server_options(parser.parse_args(arguments))


def test_options_survive_the_way_to_the_server():
    assert parse() == ServerOptions()
    options = ServerOptions(
        host="0.0.0.0", port=0, max_model_len=4096, replicas=2, request_timeout=1.5, api_key_file="/a b"
    )
    assert parse(*server_arguments(options)) == options
    assert server_arguments(ServerOptions()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--replicas", "0"], "--replicas 0: must be at least 1"),
        (["--max-model-len", "1"], "--max-model-len 1: must be at least 2"),
        (["--request-timeout", "0"], "--request-timeout 0: must be above 0"),
        (["--request-timeout", "nan"], "--request-timeout nan: must be above 0"),
        (["--drain-timeout", "-1"], "--drain-timeout -1"),
        (["--api-key-env", "A", "--api-key-file", "b"], "exclude each other"),
    ],
)
def test_wrong_options_are_one_line(arguments, words):
    with pytest.raises(ConfigError, match=words):
        parse(*arguments)
