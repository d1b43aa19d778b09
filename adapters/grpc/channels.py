"""Channels of gRPC clients."""

import grpc

from postroom.adapters.sockets.address import is_loopback_name
from postroom.adapters.sockets.client_tls import ClientFiles, make_client_context, read_pem, system_ca

OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # what was received must not be lost for its size
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),  # a server that is paused or cut off is noticed within 15 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def open_channel(address: str, tls: ClientFiles | None = None, *, is_shared: bool = True) -> grpc.aio.Channel:
    """Return a channel to a server, which connects with its first call.

    Proxies of the environment, such as `http_proxy`, are not used on the loopback interface.

    Arguments:
        address: `host:port` or `unix:/path`.
        tls: certificates; None connects without TLS.
        is_shared: the channels of this process to the same address share a connection.

    Raises: InvalidRequest for a file of `tls` that is missing, unreadable or malformed.
    """
    options = [
        *OPTIONS,
        ("grpc.use_local_subchannel_pool", int(not is_shared)),
        ("grpc.enable_http_proxy", int(not is_loopback_name(address))),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(tls), options=options)


def _credentials(tls: ClientFiles) -> grpc.ChannelCredentials:
    make_client_context(tls)  # whose errors are clear
    ca = tls.ca or system_ca()
    return grpc.ssl_channel_credentials(
        None if ca is None else read_pem("ca", ca, "CERTIFICATE"),
        None if tls.key is None else read_pem("key", tls.key, "PRIVATE KEY"),
        None if tls.certificate is None else read_pem("certificate", tls.certificate, "CERTIFICATE"),
    )
