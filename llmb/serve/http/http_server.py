"""The HTTP process from start to exit: engine processes, routes, signals, drain, exit code.

    exit_code = await HttpServer(config_path, config, options).run()

SIGTERM or SIGINT: new requests get 503, unfinished ones the drain timeout, then it ends with 0; a second signal ends it
at once. If an engine process ends, every open request gets an error and the server ends with 2.
"""

import asyncio
import gc
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from llmb.config.server_options import LOOPBACK, ServerOptions
from llmb.config.spec import Inference, RunConfig
from llmb.errors import ConfigError, LaunchError
from llmb.serve.benchmark.prompts import model_info
from llmb.serve.http.api_key import read_api_key
from llmb.serve.http.api_routes import ApiRoutes
from llmb.serve.http.completion_service import CompletionService
from llmb.serve.http.engine_messages import EngineReady, StepReport
from llmb.serve.http.engine_router import EngineRouter, Route, WorkerConnection
from llmb.serve.http.served_model_info import ServedModelInfo
from llmb.serve.http.server_metrics import ServerMetrics
from llmb.serve.http.worker_processes import WORKER_COMMAND, WorkerProcess, start_workers, stop_workers
from llmb.serve.text.chat_template import load_chat_template
from llmb.serve.text.text_tokenizer import eos_tokens, load_tokenizer

DEFAULT_CONTEXT = 8192  # tokens, of random weights, which say nothing about it
ERROR_FLUSH_S = 1.0  # for clients to read their errors after an engine has failed
BACKLOG = 4096
KEEPALIVE_S = 60  # of silence on a connection, before the kernel asks whether its peer is still there
SEND_BUFFER_BYTES = 128 * 1024  # of the kernel, for a connection: it would grow to megabytes if nobody reads
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class HttpServer:
    """One server: a port, and one or more engines behind it."""

    def __init__(
        self, config_path: Path, config: RunConfig, options: ServerOptions, command: Sequence[str] = WORKER_COMMAND
    ):
        assert isinstance(config.workload, Inference)
        self._path, self._config, self._work, self._options = config_path, config, config.workload, options
        self._command = command
        self._router = EngineRouter(options.max_queue)
        self._workers: list[WorkerProcess] = []
        self._connections: list[WorkerConnection] = []
        self._ready: list[EngineReady] = []
        self._failed_worker: WorkerProcess | None = None
        self._is_stopping = False
        self._changed = asyncio.Event()  # an engine is ready or failed, or a signal has arrived
        self._signals = 0
        self._routes: ApiRoutes | None = None

    async def run(self) -> int:
        """Serve until a signal or a failure; return the exit code."""
        api_key = read_api_key(self._options)
        tokenizer = load_tokenizer(self._config.model, self._work.weights)
        chat_template = load_chat_template(self._work.weights, not tokenizer.is_fallback)
        sock = bind_socket(self._options.host, self._options.port, self._options.stall_timeout)
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        try:
            await self._start_engines()
            if not await self._engines_ready():
                return self._startup_code()
            model = ServedModelInfo(
                name=self._options.served_model_name or self._config.model.name,
                vocab=self._config.model.vocab,
                max_model_len=min(ready.max_model_len for ready in self._ready),
                eos=eos_tokens(self._config.model, self._work.weights),
                tokenizer=tokenizer,
                chat_template=chat_template,
                created=int(time.time()),
            )
            metrics = ServerMetrics(model.name, self._router)
            service = CompletionService(
                model, self._router, metrics, self._options.request_timeout, self._options.stall_timeout
            )
            self._routes = ApiRoutes(service, api_key)
            return await self._serve(sock, self._routes)
        finally:
            sock.close()
            self._stop_engines()

    async def _start_engines(self) -> None:
        """Start the engine processes and connect to them."""
        length, exact = self._max_model_len()
        self._workers = start_workers(self._path, self._config, self._options.replicas, length, exact, self._command)
        loop, shards = asyncio.get_running_loop(), self._config.parallel.tp if self._work.attention_dp else 1
        for worker in self._workers:
            connection = WorkerConnection(partial(self._on_message, worker), partial(self._on_lost, worker))
            self._connections.append(connection)
            if worker.rank == 0:
                first = worker.replica * shards
                self._router.routes += [Route(f"{first + shard}", connection, shard) for shard in range(shards)]
        for worker, connection in zip(self._workers, self._connections, strict=True):
            await loop.create_connection(lambda c=connection: c, sock=worker.sock)  # type: ignore[misc]

    def _max_model_len(self) -> tuple[int, bool]:
        """Return the longest sequence, and whether the cache must hold it."""
        if self._options.max_model_len is not None:
            return self._options.max_model_len, True
        context = model_info(self._config.model, self._work.weights).context
        return context or max(DEFAULT_CONTEXT, self._work.isl + self._work.osl), False

    async def _engines_ready(self) -> bool:
        """Wait until all engines are ready; False if one failed, or a signal came before."""
        while len(self._ready) < len(self._workers) and not self._must_stop:
            await self._wait_for_change()
        return not self._must_stop

    @property
    def _must_stop(self) -> bool:
        return self._failed_worker is not None or self._signals > 0

    def _startup_code(self) -> int:
        """Return the exit code of a server whose engine did not start; the engine has printed why."""
        if self._failed_worker is None:
            return 0
        return 1 if stop_workers([self._failed_worker]) == [1] else 2

    async def _serve(self, sock: socket.socket, routes: ApiRoutes) -> int:
        app = routes.build_app(int(self._options.max_body_mb * 2**20))
        runner = web.AppRunner(
            app, handle_signals=False, access_log=None, handler_cancellation=True, shutdown_timeout=1
        )
        await runner.setup()
        site = web.SockSite(runner, sock, backlog=BACKLOG)
        await site.start()
        gc.collect()
        gc.freeze()
        self._print_ready(sock, routes)
        while not self._must_stop:
            await self._wait_for_change()
        if self._failed_worker is None:
            await self._drain(routes)
        if self._failed_worker is not None:
            await self._report_failure(self._failed_worker)
        await runner.cleanup()
        return 0 if self._failed_worker is None else 2

    def _print_ready(self, sock: socket.socket, routes: ApiRoutes) -> None:
        model, ready = routes.service.model, self._ready[0]
        host, port = self._options.host, sock.getsockname()[1]
        cache = "prefix cache on" if ready.prefix_cache else "prefix cache off"
        engines = f"{self._options.replicas} engines, each with " if self._options.replicas > 1 else ""
        tokens = ready.kv_blocks * ready.block_tokens
        print(f"{engines}max_model_len {model.max_model_len}, KV cache of {tokens} tokens, {cache}", flush=True)
        if model.tokenizer.is_fallback:
            print(
                "no tokenizer.json: text is read as bytes, and tokens without a character are written <id>", flush=True
            )
        if host not in (LOOPBACK, "localhost", "::1") and routes.api_key is None:
            print(f"warning: anybody who reaches {host} can use this server; set an API key", flush=True)
        address = f"[{host}]" if ":" in host else host
        print(f"serving {model.name} at http://{address}:{port}/v1 (Ctrl-C stops)", flush=True)

    async def _drain(self, routes: ApiRoutes) -> None:
        """Let unfinished requests end; cancel those that take too long."""
        routes.draining = True
        print(f"stopping: {routes.num_active} requests are unfinished", flush=True)
        deadline, signals = time.monotonic() + self._options.drain_timeout, self._signals
        while routes.num_active and self._failed_worker is None and self._signals == signals:
            if time.monotonic() > deadline:
                break
            await self._wait_for_change(0.05)

    async def _report_failure(self, worker: WorkerProcess) -> None:
        """Print one line, and give clients the time to read their errors."""
        await asyncio.sleep(ERROR_FLUSH_S)
        code = worker.process.poll()
        ending = "hangs" if code is None else f"exited with {code}" if code >= 0 else f"was killed by signal {-code}"
        print(f"llmb.serve.http: {worker.name} {ending}, so the server ends", file=sys.stderr, flush=True)

    async def _wait_for_change(self, timeout_s: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def _on_signal(self) -> None:
        self._signals += 1
        self._changed.set()

    def _on_message(self, worker: WorkerProcess, message: Any) -> None:
        if isinstance(message, StepReport):
            self._router.on_report(self._route_of(worker), message)
        elif isinstance(message, EngineReady):
            self._route_of(worker).slots = message.slots
            self._ready.append(message)
            self._changed.set()

    def _route_of(self, worker: WorkerProcess) -> Route:
        """Return the route that a rank computes requests of; ranks count along tensor parallelism first."""
        shards = len(self._router.routes) // self._options.replicas
        return self._router.routes[worker.replica * shards + worker.rank % shards]

    def _on_lost(self, worker: WorkerProcess) -> None:
        if self._failed_worker is None and not self._is_stopping:
            self._failed_worker = worker
            self._router.fail()
            self._changed.set()

    def _stop_engines(self) -> None:
        self._is_stopping = True
        for worker in self._workers:
            with suppress(OSError):  # it may be gone already
                worker.sock.shutdown(socket.SHUT_RDWR)
        for connection in self._connections:
            connection.close()
        is_idle = len(self._ready) == len(self._workers) and not self._router.outputs
        stop_workers(self._workers, kill_now=not is_idle or self._router.failed)


def bind_socket(host: str, port: int, stall_timeout_s: float) -> socket.socket:
    """Return a socket bound to the address, before anything expensive is started. Its connections inherit its options.

    The kernel closes connections whose peer acknowledges nothing for the stall timeout: it may be gone without a word.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout_s * 1000))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 4)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise LaunchError(f"cannot listen on {host}:{port}: {error.strerror}; --port 0 takes a free one") from error
    return sock
