"""cacheblend serve: an HTTP server that keeps the model loaded."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from cacheblend_cli.cli import options
from cacheblend_cli.cli.flags import SERVE
from cacheblend_cli.cli.output import Output
from cacheblend_cli.cli.stores import open_store
from cacheblend_cli.cli.units import counted, format_size
from cacheblend_cli.errors import UsageError
from cacheblend_cli.extras import require
from cacheblend_cli.model.read_ahead import read_ahead
from cacheblend_cli.settings import API_KEY_VARIABLE, Resolved, Settings

if TYPE_CHECKING:
    from cacheblend_store import ChunkStore

    from cacheblend_cli.engine.events import EngineStats
    from cacheblend_cli.server.remote_decoder import RemoteDecoder

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
    decode_url: str | None = Option(
        None, help="Prefill here and decode on the vLLM server at this URL (docs/vllm.md)."
    ),
    decode_key: str | None = Option(
        None, help="API key of the vLLM server.", envvar="CACHEBLEND_DECODE_KEY", show_default=False
    ),
    hand_over: Path = Option(
        Path("/dev/shm/cacheblend"), help="Private directory for KV handed over to the vLLM server."
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
    output, settings = Output(quiet=quiet), resolved.settings
    if sum((background, status, stop)) > 1:
        raise UsageError("--background, --status and --stop were given together", "give one of them")
    if stop:
        from cacheblend_cli.server.background import stop_all

        for pid in stop_all(settings, grace):
            _show({"pid": pid, "stopped": True}, f"stopped the server with process id {pid}", output, json=json)
        return
    if status:
        from cacheblend_cli.server.background import running

        for engine_status in running(settings):
            _show(engine_status, _status_line(engine_status), output, json=json)
        return
    check_installed()
    if decode_url is not None and background:
        raise UsageError("--background cannot be used with --decode-url", "omit it; use a service manager")
    if background:
        from cacheblend_cli.server.background import listens, start

        if listens(settings):
            output.note("an engine with these settings is already running; other flags of this command are ignored")
        reply = start(settings, 3600.0 if idle_exit is None else idle_exit)
        _show(reply, _status_line(reply), output, json=json)
        return
    from cacheblend_cli.server.origins import ANY, read_origins
    from cacheblend_cli.server.tenants import Keyring, read_keys

    origins = read_origins(settings.allow_origin)
    keyring = Keyring(read_keys(api_key or (), api_key_file), settings.salt)
    if keyring.is_open and host not in _LOOPBACK and unix_socket is None:
        raise UsageError(f"{host} is reachable by others, and no --api-key was given", "give one, or omit --host")
    if keyring.is_open and ANY in origins:
        output.note("every web page that this machine's browsers open can use the server: give an --api-key")
    read_ahead(settings)
    from cacheblend_cli.cli.tier import share
    from cacheblend_cli.engine.events import Limits
    from cacheblend_cli.server.app import make_app
    from cacheblend_cli.server.auth import LOOPBACK
    from cacheblend_cli.server.document_routes import count_documents
    from cacheblend_cli.server.http_server import Server, bind_tcp, bind_unix, remover
    from cacheblend_cli.server.server_state import ServerState
    from cacheblend_cli.server.warm_socket import WarmSocket
    from cacheblend_cli.sockets import make_folder, socket_of
    from cacheblend_cli.types import model_sampled, sampling_of

    logging.basicConfig(format="%(asctime)s %(message)s")
    sampling = sampling_of(settings)
    with _opened(settings, output) as store, ExitStack() as held:
        share(store, settings, output, strict=True)
        warm = socket_of(settings)
        make_folder(warm.parent)
        warm_socket = held.enter_context(bind_unix(warm))
        held.callback(remover(warm))
        public = held.enter_context(bind_tcp(host, port) if unix_socket is None else bind_unix(unix_socket))
        if unix_socket is not None:
            held.callback(remover(unix_socket))
        address = public.getsockname()
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{address[1]}" if unix_socket is None else f"unix:{unix_socket}"
        decoder = None if decode_url is None else _decoder(decode_url, decode_key, hand_over)
        engine = options.load_engine(settings, output)
        options.note_fallback(settings, output, json=json)
        if decoder is not None:
            from cacheblend_cli.kv.export import check_exportable

            check_exportable(engine.model.spec, "vLLM")
        if (llama := engine.llama_note()) is not None:
            output.note(llama)
        sampling = engine.sampling_of_model(sampling, model_sampled(resolved))
        engine.serve(store, Limits(max_waiting=max_waiting))
        try:
            names = LOOPBACK if keyring.is_open and unix_socket is None else None
            state = ServerState(
                engine,
                store,
                settings,
                sampling,
                keyring,
                names,
                origins=origins,
                max_body=max_body << 20,
                find_passages=find_passages,
                any_model=any_model,
                decoder=decoder,
            )
            held.callback(state.pools.close, _END_S)
            serving = Server(
                make_app(state),
                state,
                WarmSocket(state, warm_socket, warm, url),
                grace_s=grace,
                idle_exit_s=idle_exit or 0.0,
            )
            if engine.model.decoder.device.type == "cpu" and (own := _resident_bytes()):
                output.note(_memory_line(own, engine.stats(), decoded_twice=llama is not None))
            if settings.retrieve:
                output.note(_retrieval_line(count_documents(state)))
            output.note(f"{state.model} answers at {url}/v1; Ctrl-C stops it")
            asyncio.run(serving.serve([public]))
        finally:
            engine.close()


def _resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes, None if the system does not report it."""
    with suppress(OSError, IndexError, ValueError), open("/proc/self/statm", encoding="ascii") as line:
        return int(line.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _memory_line(own: int, stats: EngineStats, *, decoded_twice: bool) -> str:
    """Describe how large the process may grow.

    own: bytes used now, with the weights loaded. decoded_twice: llama.cpp holds the KV of running answers a second
    time, in at most half the bytes.
    """
    pool = stats.pool_bytes * 3 // 2 if decoded_twice else stats.pool_bytes
    most = own + pool + stats.swap_space_bytes + _WORK_BYTES
    return (
        f"memory: {format_size(own)} now, at most about {format_size(most)}: KV takes up to {format_size(pool)} as it is used, and up to "
        f"{format_size(stats.swap_space_bytes)} more if KV is swapped out (--swap-space)"
    )


def _retrieval_line(num_documents: int) -> str:
    if not num_documents:
        return "chats are answered without documents, until some are stored for them"
    return f"chats are answered from {counted(num_documents, 'document')}; --no-retrieve for chats without them"


def _decoder(url: str, key: str | None, directory: Path) -> RemoteDecoder:
    """Return the client of the decoding vLLM server. Raises UsageError."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--decode-url {url} is not an HTTP URL", "for example http://127.0.0.1:8000")
    require("--decode-url", "vllm", "httpx2")
    from cacheblend_cli.engine.connectors.vllm import HandOverDirectory
    from cacheblend_cli.server.remote_decoder import RemoteDecoder

    return RemoteDecoder(url, HandOverDirectory(directory.expanduser().absolute()), key)


def check_installed() -> None:
    """Raises UsageError if a package that serving needs is not installed."""
    require("serve", "serve", "starlette", "uvicorn", "prometheus_client")


def _show(record: dict[str, Any], line: str, output: Output, *, json: bool) -> None:
    if json:
        output.json(record)
    else:
        output.text(line)


def _opened(settings: Settings, output: Output) -> ChunkStore:
    """Open the store for writing and create it, or for reading if it exists and this user cannot write to it."""
    from cacheblend_store import StorePermission

    try:
        return open_store(settings, write=True)
    except StorePermission as error:
        path = settings.store_path
        if not path.exists() or os.access(path, os.W_OK):  # cannot be created, or is not safe
            raise
        output.note(f"{error.message}: documents and computed KV are not stored")
        return open_store(settings, write=False)


def _status_line(reply: dict[str, Any]) -> str:
    return (
        f"process {reply['pid']}: {reply['model']} at {reply['url']}, up {reply['up_s']:.0f} s, idle {reply['idle_s']:.0f} s; "
        f"{reply['running']} running, {reply['waiting']} waiting, {reply['finished']} finished"
    )
