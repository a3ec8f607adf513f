"""What ``outrider serve`` takes beside the engine's flags, and its own checks."""

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ..engine_core.refusal import Refused

Doc = msgspec.Meta


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The frontend's part of a server; every field is a flag (underscores become dashes)."""

    host: Annotated[str, Doc(description="address of the HTTP server")] = "127.0.0.1"
    port: Annotated[int, Doc(description="port of the HTTP server; 0 takes a free one")] = 30000
    api_key: Annotated[
        str | None, Doc(description="Bearer key that HTTP clients must send; none if unset")
    ] = None
    drain_timeout: Annotated[
        float, Doc(description="seconds that running requests may take after SIGTERM")
    ] = 30.0
    restart_engine: Annotated[
        bool, Doc(description="start a new engine core when it dies, instead of exiting")
    ] = False
    zmq_endpoint: Annotated[
        str | None,
        Doc(description="where SDK clients connect; a private ipc:// address if unset"),
    ] = None
    zmq_token: Annotated[
        str | None, Doc(description="token that SDK clients must send; none if unset")
    ] = None
    zmq_curve_secret_key_file: Annotated[
        str | None,
        Doc(description="CURVE secret key file of the server (zmq.auth.create_certificates)"),
    ] = None
    zmq_curve_clients_dir: Annotated[
        str | None, Doc(description="folder with the CURVE public keys of the clients let in")
    ] = None
    tool_call_parser: Annotated[
        Literal["hermes", "llama3_json", "mistral", "pythonic"] | None,
        Doc(description="how the model writes tool calls; needed for tool_choice auto"),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Doc(description="what the server logs")
    ] = "info"


def is_local_endpoint(endpoint: str) -> bool:
    """Whether only this host can reach a ZeroMQ address: ipc, or tcp on loopback."""
    if endpoint.startswith("ipc://"):
        return True
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_server(config: ServerConfig) -> Refused | None:
    """Check the server's part by itself, before anything is started."""
    if not 0 <= config.port <= 65535:
        return Refused("port", f"must be between 0 and 65535, got {config.port}")
    if not config.drain_timeout >= 0.0:
        return Refused("drain_timeout", f"must be 0 or more seconds, got {config.drain_timeout}")
    if config.api_key == "":
        return Refused("api_key", "must not be empty; leave it out to serve without a key")
    if config.zmq_token == "":
        return Refused("zmq_token", "must not be empty; leave it out to serve without a token")
    return _refuse_curve(config) or _refuse_endpoint(config)


def _refuse_curve(config: ServerConfig) -> Refused | None:
    secret, clients = config.zmq_curve_secret_key_file, config.zmq_curve_clients_dir
    if (secret is None) != (clients is None):
        given, missing = (
            ("zmq_curve_secret_key_file", "zmq_curve_clients_dir")
            if clients is None
            else ("zmq_curve_clients_dir", "zmq_curve_secret_key_file")
        )
        return Refused(missing, f"must be given together with {given}")
    if secret is not None and not Path(secret).is_file():
        return Refused("zmq_curve_secret_key_file", f"{secret!r} is not a file")
    if clients is not None and not Path(clients).is_dir():
        return Refused("zmq_curve_clients_dir", f"{clients!r} is not a folder")
    return None


def _refuse_endpoint(config: ServerConfig) -> Refused | None:
    endpoint = config.zmq_endpoint
    if endpoint is None:
        return None
    if not endpoint.startswith(("ipc://", "tcp://")):
        return Refused("zmq_endpoint", f"must start with ipc:// or tcp://, got {endpoint!r}")
    if endpoint.startswith("tcp://") and not _has_port(endpoint):
        return Refused(
            "zmq_endpoint", f"needs a host and a port, as in tcp://127.0.0.1:5555, got {endpoint!r}"
        )
    if (
        not is_local_endpoint(endpoint)
        and config.zmq_token is None
        and config.zmq_curve_secret_key_file is None
    ):
        return Refused(
            "zmq_endpoint",
            f"{endpoint} is reachable from other hosts: give zmq_token, or "
            "zmq_curve_secret_key_file with zmq_curve_clients_dir, or use ipc:// or loopback",
        )
    return None


def _has_port(endpoint: str) -> bool:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return bool(host) and (port == "*" or (port.isdigit() and int(port) <= 65535))
