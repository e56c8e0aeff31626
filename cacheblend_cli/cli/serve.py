"""cacheblend serve: an HTTP server that keeps the model loaded."""

from __future__ import annotations

import asyncio
import gc
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any

from typer import Option

from cacheblend_cli import extensions
from cacheblend_cli.cli import options
from cacheblend_cli.cli.flags import SERVE
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import store_in_use
from cacheblend_cli.cli.units import counted, format_size
from cacheblend_cli.errors import UsageError
from cacheblend_cli.model.host_memory import resident_memory
from cacheblend_cli.model.read_ahead import read_ahead
from cacheblend_cli.settings import Resolved, Settings
from cacheblend_cli.settings.fields import API_KEY_VARIABLE

if TYPE_CHECKING:
    from cacheblend_cli.engine.events import EngineStats
    from cacheblend_cli.server.server_state import Decoder
    from cacheblend_cli.server.tenants import Keyring
    from cacheblend_cli.sockets import SocketFile

_WORK_BYTES = 512 << 20  # activations of a prefill, chunks being read, requests
_END_S = 2.0  # at the end, for threads that read or write the store
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@options.with_settings(*SERVE)
def serve(
    resolved: Resolved,
    host: str = Option("127.0.0.1", help="Address to listen on."),
    port: int = Option(8321, min=0, max=65535, help="Port to listen on; 0: any free port."),
    unix_socket: Path | None = Option(None, help="Listen on this Unix socket instead of an address."),
    api_key: list[str] | None = Option(
        None, help="KEY, or NAME:KEY for a tenant with separate KV (repeatable).", envvar=API_KEY_VARIABLE
    ),
    api_key_file: Path | None = Option(None, help="File of API keys, one per line."),
    max_waiting: int = Option(256, min=1, help="Maximum number of waiting requests; more get HTTP 429."),
    max_body: int = Option(32, min=1, help="Maximum request size in MiB."),
    grace: float = Option(30.0, min=0, help="Seconds for running answers to finish when the server stops."),
    idle_exit: float | None = Option(
        None,
        min=0,
        help="Exit after this many seconds without a request; 0: never.",
        show_default="3600 with --background, else 0",
    ),
    find_passages: bool = Option(
        False, "--find-passages", help="Treat <source> and <document> elements in messages as documents."
    ),
    any_model: bool = Option(False, "--any-model", help="Also answer requests that name another model."),
    decoder: str | None = Option(
        None,
        help="Prefill here and decode elsewhere, by an installed decoder: vllm:URL (docs/vllm.md).",
        metavar="NAME:ADDRESS",
    ),
    background: bool = Option(False, "--background", help="Run in the background; return once the server responds."),
    status: bool = Option(False, "--status", help="Show the engines running over this store."),
    stop: bool = Option(False, "--stop", help="Stop the engines running over this store."),
    json: options.Json = False,
    quiet: options.NoMessages = False,
) -> None:
    """Serve the OpenAI API at /v1 and the Ollama API at /api, with extra fields for documents, chunks and search.

    ask and chat with the same store, model and settings use the running engine automatically.
    """
    output, settings = Output(json=json, quiet=quiet), resolved.settings
    if sum((background, status, stop)) > 1:
        raise UsageError("--background, --status and --stop were given together", "give one of them")
    if stop:
        _stop(settings, grace, output)
    elif status:
        _status(settings, output)
    elif background:
        if decoder is not None:
            raise UsageError("--background cannot be used with --decoder", "omit it; use a service manager")
        _start(settings, idle_exit, grace, output)
    else:
        http = _Http(
            host, port, unix_socket, max_waiting, max_body, grace, idle_exit or 0.0, find_passages, any_model,
            decoder or "",
        )  # fmt: skip
        _run(resolved, http, [*(api_key or ())], api_key_file, output)


@dataclass(frozen=True)
class _Http:
    """Options of the HTTP server."""

    host: str
    port: int
    unix_socket: Path | None
    max_waiting: int
    max_body: int  # MiB
    grace_s: float
    idle_exit_s: float
    find_passages: bool
    any_model: bool
    decoder: str  # NAME:ADDRESS, or empty


def _stop(settings: Settings, grace_s: float, output: Output) -> None:
    from cacheblend_cli.server.background import stop_all

    for engine in stop_all(settings, grace_s):
        output.result({"pid": engine.pid, "stopped": True}, f"stopped the server with process id {engine.pid}")


def _status(settings: Settings, output: Output) -> None:
    from cacheblend_cli.server.background import running

    for engine_status in running(settings):
        output.result(engine_status, _status_line(engine_status))


def _start(settings: Settings, idle_exit_s: float | None, grace_s: float, output: Output) -> None:
    from cacheblend_cli.server.background import end_own, listens, start

    end_own(settings, grace_s)
    if listens(settings):
        output.note("an engine with these settings is already running; other flags of this command are ignored")
    reply = start(settings, 3600.0 if idle_exit_s is None else idle_exit_s)
    output.result(reply, _status_line(reply))


def _run(resolved: Resolved, http: _Http, keys: list[str], key_file: Path | None, output: Output) -> None:
    from cacheblend_cli.server.auth import LOOPBACK, read_origins
    from cacheblend_cli.server.background import RUNS, ask_status, end_own
    from cacheblend_cli.server.tenants import Keyring, read_keys
    from cacheblend_cli.sockets import socket_of

    settings, (elsewhere, _, address) = resolved.settings, http.decoder.partition(":")
    if elsewhere:
        extensions.find("decoder", elsewhere)
    origins, keyring = read_origins(settings.allow_origin), Keyring(read_keys(keys, key_file), settings.salt)
    _check_access(http, keyring, origins, output)
    warm = socket_of(settings)
    if not (is_own := http.unix_socket == warm):
        end_own(settings, http.grace_s)
    if not is_own and (reply := ask_status(warm)) is not None:
        there = f"an engine with these settings already runs at {reply['url']} (process {reply['pid']})"
        raise UsageError(there, "use it, or end it: cacheblend stop")
    with store_in_use(settings, create=True, note=output.note) as store, ExitStack() as held:
        warm_socket, warm_file, public, url = _bind(warm, settings, http, held)  # first: other commands wait for it
        read_ahead(settings.model, settings.dtype, settings.weight_dtype)
        from cacheblend_cli.cli.tier import share
        from cacheblend_cli.engine.events import Limits
        from cacheblend_cli.server.app import make_app
        from cacheblend_cli.server.document_routes import count_documents
        from cacheblend_cli.server.http_server import Server
        from cacheblend_cli.server.server_state import ServerState
        from cacheblend_cli.server.warm_socket import WarmSocket
        from cacheblend_cli.types import model_sampled, sampling_of

        logging.basicConfig(format="%(asctime)s %(message)s")
        logging.getLogger("cacheblend").setLevel(logging.WARNING if output.quiet else logging.INFO)
        sampling = sampling_of(settings)
        share(store, settings, output, strict=True)
        remote: Decoder | None = extensions.load("decoder", elsewhere)(address) if elsewhere else None
        engine = options.load_engine(settings, output)
        options.note_model(resolved, output)
        if remote is not None:
            from cacheblend_cli.kv.export import check_exportable

            check_exportable(engine.model.spec, elsewhere)
        sampling = engine.sampling_of_model(sampling, model_sampled(resolved))
        engine.use(store, Limits(max_waiting=http.max_waiting))
        gc.freeze()  # what exists now lasts; on a GPU, searching it for garbage takes as long as half a prefill
        names = LOOPBACK if keyring.is_open and http.unix_socket is None else None
        state = ServerState(
            engine,
            store,
            settings,
            sampling,
            keyring,
            names,
            origins=origins,
            max_body=http.max_body << 20,
            find_passages=http.find_passages,
            any_model=http.any_model,
            decoder=remote,
        )
        held.callback(state.pools.close, _END_S)
        held.callback(engine.close)  # first
        warm_app = WarmSocket(state, warm_socket, warm_file, url)
        serving = Server(
            make_app(state),
            state,
            warm_app,
            grace_s=http.grace_s,
            idle_exit_s=http.idle_exit_s,
            yields_memory=is_own,
        )
        if engine.model.decoder.device.type == "cpu" and (own := resident_memory()):
            output.note(_memory_line(own, engine.service.stats()))
        if settings.retrieve:
            count = count_documents(state)
            found = f"from {counted(count, 'document')}; --no-retrieve for chats without them"
            output.note(f"chats are answered {found if count else 'without documents, until some are stored for them'}")
        output.note(f"{state.model}{RUNS}{url}/v1; Ctrl-C stops it")
        asyncio.run(serving.serve(public))


def _check_access(http: _Http, keyring: Keyring, origins: frozenset[str], output: Output) -> None:
    """Raises UsageError if others could use the server without a key; warn if web pages can."""
    from cacheblend_cli.server.auth import ANY

    if keyring.is_open and http.host not in _LOOPBACK and http.unix_socket is None:
        raise UsageError(f"{http.host} is reachable by others, and no --api-key was given", "give one, or omit --host")
    if keyring.is_open and ANY in origins:
        output.note("every web page that this machine's browsers open can use the server: give an --api-key")


def _bind(warm: Path, settings: Settings, http: _Http, held: ExitStack) -> tuple[socket, SocketFile, list[socket], str]:
    """Return the listening socket for commands, its file, the sockets for clients, and the URL. held: closes and
    removes them. The engine that a command starts inherits the first one and has no other."""
    from cacheblend_cli.registry import register
    from cacheblend_cli.server.binding import bind_tcp, bind_unix, inherited
    from cacheblend_cli.sockets import SocketFile, make_folder

    make_folder(warm.parent)
    is_own = http.unix_socket == warm
    warm_socket = held.enter_context((is_own and inherited()) or bind_unix(warm))
    warm_file = SocketFile(warm, settings.store_path)
    held.callback(warm_file.remove)
    held.callback(register(warm, settings))
    if is_own:
        return warm_socket, warm_file, [], f"unix:{warm}"
    if http.unix_socket is not None:
        public = held.enter_context(bind_unix(http.unix_socket))
        held.callback(SocketFile(http.unix_socket).remove)
        return warm_socket, warm_file, [public], f"unix:{http.unix_socket}"
    public = held.enter_context(bind_tcp(http.host, http.port))
    name = f"[{http.host}]" if ":" in http.host else http.host
    return warm_socket, warm_file, [public], f"http://{name}:{public.getsockname()[1]}"


def _memory_line(own: int, stats: EngineStats) -> str:
    """Describe how large the process may grow. own: bytes used now, with the weights loaded."""
    most = own + stats.pool_bytes + stats.swap_space_bytes + _WORK_BYTES
    return (
        f"memory: {format_size(own)} now, at most about {format_size(most)}: KV takes up to {format_size(stats.pool_bytes)} "
        f"as it is used, and up to {format_size(stats.swap_space_bytes)} more if KV is swapped out (--swap-space)"
    )


def _status_line(reply: dict[str, Any]) -> str:
    return (
        f"process {reply['pid']}: {reply['model']} at {reply['url']}, up {reply['up_s']:.0f} s, idle {reply['idle_s']:.0f} s; "
        f"{reply['running']} running, {reply['waiting']} waiting, {reply['finished']} finished"
    )
