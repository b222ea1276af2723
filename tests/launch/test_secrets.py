"""Secret values never reach a file."""

import json
from datetime import datetime

import pytest

from llmb.config.resolve import resolve
from llmb.config.row_selection import RunRequest
from llmb.launch.run_folder import RunFolder
from llmb.launch.secrets import (
    hidden_by_entropy,
    mask,
    mask_random_argument,
    scrub,
    scrub_thoroughly,
    secret_values,
)

HF = "hf_" + "aB3" * 9


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "GITHUB_TOKEN", "TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS", "DB_PASSWORD", "KEYS"],
)
def test_secret_by_name(name):
    assert mask({name: "anything"}) == {name: "***"}


@pytest.mark.parametrize(
    "name", ["MAX_NUM_TOKENS", "TOKENIZERS_PARALLELISM", "PATH", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"]
)
def test_not_secret_by_name(name):
    assert mask({name: "anything"}) == {name: "anything"}


@pytest.mark.parametrize(
    ("secret", "suffix"),
    [
        (HF, ""),
        ("sk-" + "Ab_-9" * 6, ""),
        ("AKIA" + "ABCD2345" * 2, ""),
        ("nvapi-" + "x" * 30, ""),
        ("ghp_" + "x" * 30, ""),
        ("user:pass", "@"),
    ],
)
def test_secret_by_pattern(secret, suffix):
    address = f"https://{secret}@host" if suffix else secret
    assert mask({"PLAIN": address}) == {"PLAIN": "***"}
    assert secret not in scrub(f"GET {address}, next")
    assert scrub(f"a {address} b").endswith(" b")


@pytest.mark.parametrize(
    "text",
    [
        "hf_hub_download",
        "risk-based-learning-rate-schedule-of-the-task",
        "http://host:80/a@b",
        "docker run -u 1000:1000 image",
        "PWD=/home/me/work",
        "the bearer of this message",
        "basic responsibilities of a layer, Basic 2 of 3",
        "design=a-very-long-name-of-a-design",
        "mysql -u root -p database",
        "docker login nvcr.io, then pull",
        "npm_config_registry and glibc-2.36-9+deb12u10",
        "the cookie: none",
    ],
)
def test_ordinary_text_is_not_scrubbed(text):
    assert scrub(text) == text
    assert mask({"PLAIN": text}) == {"PLAIN": text}


def test_values_are_scrubbed_by_line_and_as_quoted():
    values = secret_values({"SSH_KEY": "first line\nsecond\\line", "KEY_ON": "true", "PLAIN": "visible"})
    assert scrub("first line|second\\line|second\\\\line|true|visible", values) == "***|***|***|true|visible"


def test_longer_secret_is_scrubbed_first():
    values = secret_values({"A_KEY": "abcdef", "B_KEY": "abcdefghi"})
    assert scrub("abcdefghi abcdef", values) == "*** ***"


@pytest.mark.parametrize(
    "name",
    [
        "DB_PW",
        "APP_PASSCODE",
        "DB_PASS",
        "MYSQL_PWD",
        "SMTP_PASSWD",
        "GCP_CREDENTIAL",
        "PROXY_AUTH",
        "COOKIE",
        "URL_SIG",
        "XSIG",
        "DB_CREDS",
    ],
)
def test_secret_by_the_end_of_its_name(name):
    assert mask({name: "anything"}) == {name: "***"}


@pytest.mark.parametrize("name", ["PWD", "OLDPWD", "NCCL_BYPASS", "AUTHOR", "PASSES", "CONFIG"])
def test_names_that_only_resemble_those_of_secrets(name):
    assert mask({name: "anything"}) == {name: "anything"}


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ('{"auths": {"nvcr.io": {"auth": "JG9hdXRodG9rZW46c2Vj"}}}', "JG9hdXRodG9rZW46c2Vj"),
        ("machine host login me password hunter2x", "hunter2x"),
        ("curl -u me:hunter2x https://host", "hunter2x"),
        ("curl --user me:hunter2x https://host", "hunter2x"),
        ("https://x.blob.core.windows.net/c?sv=2022&sig=abc%2Bdefghijklmnop%3D&se=1", "abc%2Bdefghijklmnop%3D"),
        ("Authorization: Bearer abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
        ("Server=db;User Id=me;Password=hunter2x;", "hunter2x"),
        ("DefaultEndpointsProtocol=https;AccountKey=hunter2xhunter2x==;", "hunter2xhunter2x=="),
        ("postgresql://me:hunter2x@db/x", "hunter2x"),
        ('{"auths": {"nvcr.io": {"auth" : "JG9hdXRodG9rZW46c2Vj"}}}', "JG9hdXRodG9rZW46c2Vj"),
        (r"{\"auths\":{\"nvcr.io\":{\"auth\":\"JG9hdXRodG9rZW46c2Vj\"}}}", "JG9hdXRodG9rZW46c2Vj"),
        ("machine host\n  login me\n  password hunter2x\n", "hunter2x"),
        ("machine host password hunter2x login me", "hunter2x"),
        ("machine host login me account mine password hunter2x", "hunter2x"),
        ("-u me:hunter2x https://host", "hunter2x"),
        ("curl -ume:hunter2x https://host", "hunter2x"),
        ("curl -u 'me:hunter2x' https://host", "hunter2x"),
        ('curl --user="me:hunter2x" https://host', "hunter2x"),
        ("curl --proxy-user me:hunter2x https://host", "hunter2x"),
        ("sig=abc%2Bdefghijklmnop%3D&se=1", "abc%2Bdefghijklmnop%3D"),
        ("https://host/b?X-Amz-Signature=0123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcdef"),
        ("AUTHORIZATION: BEARER abcdefghijklmnopqrst", "abcdefghijklmnopqrst"),
        ("Authorization: Basic bWU6aHVudGVyMng=", "bWU6aHVudGVyMng="),
        ("Basic bWU6aHVudGVyMng=", "bWU6aHVudGVyMng="),
        ("Server=db;Password = hunter2x;", "hunter2x"),
        ("Driver=x;UID=me;PWD=hunter2x", "hunter2x"),
        ("host=db password='hunter2x and more' dbname=x", "hunter2x and more"),
        ("redis://:hunter2x@host:6379/0", "hunter2x"),
        ("postgresql://me:hunter/2x@db/x", "hunter/2x"),
        ("PuTTY-User-Key-File-2: ssh-rsa\nPrivate-Lines: 1\nhunter2x", "hunter2x"),
        ("glrt-" + "aB3" * 8, "aB3" * 8),
        ("npm_" + "aB3" * 12, "aB3" * 12),
        ("hvs." + "aB3" * 12, "aB3" * 12),
        ("x.atlasv1." + "aB3" * 20, "aB3" * 20),
        ("ya29." + "aB3" * 12, "aB3" * 12),
        ("SG." + "aB3" * 7 + "." + "dE4" * 14, "dE4" * 14),
        ("sk_live_" + "aB3" * 8, "aB3" * 8),
        ("dapi" + "0a1b2c3d" * 4, "0a1b2c3d" * 4),
        ("https://api.telegram.org/bot123456789:AA" + "aB3" * 11 + "/sendMessage", "aB3" * 11),
        ("https://hooks.slack.com/services/T0/B0/" + "aB3" * 8, "aB3" * 8),
        ("https://discord.com/api/webhooks/1234/" + "aB3" * 8, "aB3" * 8),
        ("MUNGE:" + "aB3" * 20 + ":", "aB3" * 20),
        ("AGE-SECRET-KEY-1" + "AB3" * 19, "AB3" * 19),
        ("Cookie: sessionid=hunter2xhunter2x", "hunter2xhunter2x"),
        ("Set-Cookie: sid=hunter2xhunter2x; HttpOnly", "hunter2xhunter2x"),
        ("Authorization: ApiKey hunter2xhunter2x", "hunter2xhunter2x"),
        ('Authorization: Digest username="me", response="hunter2x"', "hunter2x"),
        ("https://host/x?a=1&access_token=hunter2x", "hunter2x"),
        ("https://host/x?api_key=hunter2x&b=1", "hunter2x"),
        ('{"auths": {"nvcr.io": {"username": "$oauthtoken", "password": "hunter2x"}}}', "hunter2x"),
        ('{"auths": {"nvcr.io": {"identitytoken": "hunter2x"}}}', "hunter2x"),
        ("docker login -u me -p hunter2x nvcr.io", "hunter2x"),
        ("docker login --username me --password=hunter2x nvcr.io", "hunter2x"),
        ("wandb login --relogin " + "0a1b2c3d" * 5, "0a1b2c3d" * 5),
        ("sshpass -p hunter2x ssh host", "hunter2x"),
        ("mysql -u root -phunter2x db", "hunter2x"),
        ("client-key-data: " + "aB3" * 20, "aB3" * 20),
        ("jdbc:oracle:thin:scott/hunter2x@//host:1521/x", "hunter2x"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2x\n-----END OPENSSH PRIVATE KEY-----", "hunter2x"),
    ],
)
def test_secret_by_its_shape(text, secret):
    assert mask({"PLAIN": text}) == {"PLAIN": "***"}
    assert secret not in scrub(text)


@pytest.mark.parametrize("text", ["aws_secret_access_key = hunter2x", "  password: hunter2x", "--passphrase hunter2x"])
def test_variable_whose_value_names_a_secret_is_masked(text):
    assert mask({"PLAIN": text}) == {"PLAIN": "***"}


def test_random_value_is_hidden_and_named():
    environment = {"PLAIN": "q8Zr3LkT0vXn5WbY2cHd7JsFpA9mEuGi", "DB_PASS": "q8Zr3LkT0vXn5WbY2cHd7JsFpA9mEuGi"}
    assert mask(environment) == {"PLAIN": "***", "DB_PASS": "***"}
    assert hidden_by_entropy(environment) == ["PLAIN"]


@pytest.mark.parametrize(
    "value",
    [
        "/home/user/Models/Llama-3.1-8B-Instruct-2026",
        "GPU-5ac3b1f2-9d1e-4c7a-8f00-0123456789ab",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "expandable_segments:True,max_split_size_mb:512",
        "Llama-3-1-Nemotron-Ultra-253B-Instruct-v1",
    ],
)
def test_ordinary_values_are_not_random(value):
    assert mask({"PLAIN": value}) == {"PLAIN": value}


RANDOM = "q8Zr3LkT0vXn5WbY2cHd7JsFpA9mEuGi"


@pytest.mark.parametrize("before", ["", "PLAIN=", "--env=PLAIN=", "--api="])
def test_random_argument_of_a_command_is_masked(before):
    assert mask_random_argument(before + RANDOM) == f"{before}***"


@pytest.mark.parametrize("argument", ["--set", "steps=4", "num_key_value_heads=8", "--env=TP=2", "a=b=c", ""])
def test_ordinary_argument_of_a_command_stays(argument):
    assert mask_random_argument(argument) == argument


def test_command_of_a_run_has_no_random_value(tmp_path, recipes):
    config = resolve(recipes["pretrain_llama3.1"], RunRequest(size="8b", dtype="fp32", gpus=1, proxy="small"))
    run = RunFolder.create(tmp_path, config, datetime(2026, 1, 1))
    run.write_command_line(["/usr/bin/llmb-run", "submit", "--env", f"PLAIN={RANDOM}"], {})
    assert run.command_line.read_text() == "llmb-run submit --env 'PLAIN=***'\n"


def test_label_of_a_secret_stays_and_json_stays_valid():
    text = '{"auths": {"nvcr.io": {"auth": "JG9hdXRodG9rZW46c2Vj"}}, "rate": 3}'
    assert json.loads(scrub(text)) == {"auths": {"nvcr.io": {"auth": "***"}}, "rate": 3}
    assert scrub("host=db password=hunter2x dbname=x") == "host=db password=*** dbname=x"


@pytest.mark.parametrize(
    "name", ["DB_PASS", "MYSQL_PWD", "SMTP_PASSWD", "X_CREDENTIAL", "PROXY_AUTH", "A_COOKIE", "B_SIG"]
)
def test_printed_environment_is_scrubbed_by_the_end_of_names(name):
    """As in a log or a script that goes into an archive."""
    for text in (f"{name}=hunter2x", f"export {name}='hunter2x'", f'"{name}": "hunter2x"'):
        assert "hunter2x" not in scrub_thoroughly(text)
        assert name in scrub_thoroughly(text)
