"""A server in processes of its own, over a small random Llama with a real tokenizer and chat template.

with LiveServer(config_path, "--max-queue", "8") as server: server.client().completions.create(...)
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

from config_changes import changed
from small_models import llama_model
from small_serving import CONFIG

from llmb.config.model import Model
from llmb.config.serialization import to_plain
from llmb.config.spec import RunConfig

DATA = Path(__file__).parents[2] / "data"
VOCAB = 600
BOS, EOS, HEADER, END_OF_TURN = "<|begin|>", "<|endoftext|>", "<|role|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    + HEADER
    + "{{ message.role }}\n{{ message.content | trim }}"
    + END_OF_TURN
    + "{% endfor %}{% if add_generation_prompt %}"
    + HEADER
    + "assistant\n{% endif %}"
)
MODEL: Model = llama_model(name="small-llama", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, vocab=VOCAB)
START_S = 90
SERVER = ("-m", "llmb.serve.http")
FAKE_ENGINE = (str(DATA.parent / "bench" / "fake_engine.py"), "serve")  # then its steps per second


def write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on the text in data/ and write it with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOS, BOS, HEADER, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with open(DATA / "kjv.txt") as text:
        tokenizer.train_from_iterator([text.read(200_000)], trainer)
    template = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))])
    tokenizer.post_processor = template
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    eos_token = {"__type": "AddedToken", "content": EOS, "special": True}  # as transformers writes it
    config = {"chat_template": CHAT_TEMPLATE, "bos_token": BOS, "eos_token": eos_token}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_weights_folder(folder: Path, model: Model = MODEL) -> Path:
    """Write random weights, large enough that outputs vary, and the tokenizer."""
    import torch

    from llmb.models.architectures import build_model
    from llmb.models.hf_weights import save_weights

    torch.manual_seed(5)
    network = build_model(model)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            weight.normal_(0.0, 0.15).add_("norm" in name)
    save_weights(network, folder, torch.float32)
    hf_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(hf_config | {"eos_token_id": 0, "max_position_embeddings": 256}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    write_tokenizer(folder)
    return folder


def server_config(folder: Path | None, **changes: Any) -> RunConfig:
    """Return a run that serves a weights folder, or random weights."""
    weights = None if folder is None else str(folder)
    defaults: dict[str, Any] = {
        "model": MODEL,
        "prefix_cache": True,
        "max_batch_size": 8,
        "max_num_tokens": 64,
        "kv_fraction": 0.002,
    }
    return changed(CONFIG, weights=weights, **(defaults | changes))


def write_config(folder: Path, config: RunConfig) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(to_plain(config)))
    return path


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Message
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


def call(method: str, url: str, body: bytes | None = None, **headers: str) -> Reply:
    request = urllib.request.Request(url, data=body, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return Reply(response.status, response.headers, response.read())
    except urllib.error.HTTPError as error:
        return Reply(error.code, error.headers, error.read())


class LiveServer:
    """`python -m llmb.serve.http` with its output, from ready to its end."""

    def __init__(self, config: Path, *arguments: str, program: Sequence[str] = SERVER, **environment: str):
        self.lines: list[str] = []
        self.url = ""
        command = [sys.executable, *program, str(config), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if match := re.search(r"serving (\S+) at (http://\S+)/v1 ", line):
                self.url = match[2]
                self._ready.set()
        self._ready.set()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def __enter__(self) -> "LiveServer":
        assert self._ready.wait(START_S), self.output
        assert self.url, self.output
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30) -> int:
        """Send a signal; return the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout_s)
        self._reader.join(5)
        return code

    def client(self, **options: Any) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))

    def async_client(self, **options: Any) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=f"{self.url}/v1", **({"api_key": "none", "max_retries": 0} | options))

    def get(self, path: str, **headers: str) -> Reply:
        return call("GET", f"{self.url}{path}", **headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """POST a body: JSON, or bytes as they are."""
        return call(
            "POST", f"{self.url}{path}", body if isinstance(body, bytes) else json.dumps(body).encode(), **headers
        )

    def complete(self, **fields: Any) -> Reply:
        return self.post("/v1/completions", fields)

    def metrics(self) -> dict[str, float]:
        """Return every sample by name and labels, without model_name."""
        return read_metrics(self.get("/metrics").text)

    def wait_idle(self, timeout_s: float = 20) -> dict[str, float]:
        """Wait until the engines have no request, block or slot in use; return the metrics."""
        deadline = time.monotonic() + timeout_s
        while True:
            figures = self.metrics()
            busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "llmb:kv_blocks_used")
            engines = [name[name.index("{") :] for name in figures if name.startswith("llmb:slots{")]
            is_idle = all(figures[f"{name}{engine}"] == 0 for name in busy for engine in engines)
            if is_idle and all(figures[f"llmb:slots_free{e}"] == figures[f"llmb:slots{e}"] for e in engines):
                return figures
            assert time.monotonic() < deadline, figures
            time.sleep(0.05)


def read_metrics(text: str) -> dict[str, float]:
    samples = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            samples[re.sub(r',?model_name="[^"]*"', "", name).replace("{,", "{").replace("{}", "")] = float(value)
    return samples
