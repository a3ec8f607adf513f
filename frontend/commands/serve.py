"""``outrider serve``: an HTTP server and an SDK gateway over one engine core."""

import argparse
import asyncio
import logging
import sys

from ..flags import add_engine_flags, add_flags, print_config, resolve_server
from ..server_config import ServerConfig


def main(args: list[str]) -> int:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(
        prog="outrider serve",
        usage="outrider serve --model MODEL [--port PORT] [flags]",
        description="Serve a model over HTTP (OpenAI and native) and to ZeroMQ SDK clients. "
        "Ready when GET /health answers 200; SIGTERM drains.",
        allow_abbrev=False,
    )
    add_flags(parser, ServerConfig, "server")
    add_engine_flags(parser)
    config, server = resolve_server(parser.parse_args(args))
    logging.basicConfig(
        level=server.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    print(print_config(config, server), file=sys.stderr, flush=True)

    from ..serve import serve  # starts the HTTP stack: not for --help

    return asyncio.run(serve(config, server))
