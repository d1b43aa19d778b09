"""Settings of Kafka, importable without its client."""

import re
from typing import Any, Literal

from postroom.application.ingest.broker_access import BrokerAccess
from postroom.domain.errors import InvalidRequest

KAFKA_SCHEMES = ("kafka", "kafka+ssl")
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
_SERVER = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::([0-9]{1,5}))?\Z")
_FILES = {"ca": "ssl.ca.location", "certificate": "ssl.certificate.location", "key": "ssl.key.location"}


class KafkaSettings(BrokerAccess, frozen=True, kw_only=True):
    """Address of Kafka, and access to it.

    Arguments:
        url: `kafka://host:9092`, or `kafka+ssl://` with TLS; several brokers are separated by commas.
        sasl_mechanism: mechanism by which `user` is authenticated.

    Raises: InvalidRequest for another scheme or an invalid address; see also `BrokerAccess`.
    """

    url: str
    sasl_mechanism: SaslMechanism = "SCRAM-SHA-512"

    def __post_init__(self) -> None:
        super().__post_init__()
        scheme, _, servers = self.url.partition("://")
        if scheme not in KAFKA_SCHEMES or not all(map(_is_server, servers.split(","))):
            # The message omits the URL: it may contain a password.
            raise InvalidRequest(
                "The Kafka URL is invalid; write kafka://host:9092, or kafka+ssl:// for TLS, with commas "
                "between several brokers; the user belongs into the setting user."
            )
        if not self.needs_tls and (self.ca is not None or self.certificate is not None):
            raise InvalidRequest(
                "The Kafka settings ca and certificate need TLS; write the URL with kafka+ssl://."
            )

    @property
    def needs_tls(self) -> bool:
        """Return whether connections are encrypted."""
        return self.url.startswith("kafka+ssl://")

    @property
    def servers(self) -> str:
        """Return the addresses of brokers, separated by commas."""
        return self.url.partition("://")[2]

    @property
    def shown_url(self) -> str:
        """Return the URL for messages and logs; it contains no secrets."""
        return self.url

    def client_settings(self) -> dict[str, Any]:
        """Return the settings of librdkafka; raise InvalidRequest if the password file can't be read."""
        settings: dict[str, Any] = {"bootstrap.servers": self.servers, "client.id": "postroom"}
        settings["security.protocol"] = ("sasl_" if self.user else "") + (
            "ssl" if self.needs_tls else "plaintext"
        )
        settings |= {option: path for name, option in _FILES.items() if (path := getattr(self, name))}
        if (password := self.read_password()) is not None:
            settings |= {
                "sasl.mechanism": self.sasl_mechanism,
                "sasl.username": self.user,
                "sasl.password": password,
            }
        return settings


def client_reason(text: str) -> str:
    """Return a reason of librdkafka without connection names, timings and librdkafka's own settings."""
    text = re.sub(r"^(?:sasl_)?(?:plaintext|ssl)://(\S+?)/\S+: ", r"\1: ", text, flags=re.IGNORECASE)
    text = re.sub(r" \(after \d+ms in state \w+\)|: broker certificate could not be verified.*", "", text)
    return text.rstrip(". :")


def _is_server(text: str) -> bool:
    match = _SERVER.match(text)
    return match is not None and (match[1] is None or 0 < int(match[1]) < 1 << 16)
