"""Settings of access control (`[access]`)."""

from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.cli.restrictions import parse_quota

if TYPE_CHECKING:
    from postroom.application.access.settings import AccessSettings

CACHE_TTL_MS = 30_000


class AccessSection(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `[access]`.

    Arguments:
        key_file: path of the keys that sign capabilities; None is beside the store.
        cap_cache_ttl_ms: how long a verified token is not verified again, 5 to 120 s.
        quotas: by principal, such as `1000/1m` or `50MB/1h`; `*` is that of each one that is not named.
    """

    key_file: str | None = None
    cap_cache_ttl_ms: int = CACHE_TTL_MS
    quotas: dict[str, str] = {}

    def validate(self) -> "AccessSection":
        """Return the settings; raise InvalidRequest for one out of bounds."""
        self.control()
        return self

    def control(self) -> "AccessSettings":
        """Return the settings of access control; raise InvalidRequest for one out of bounds."""
        from postroom.application.access.settings import AccessSettings

        quotas = {
            principal: parse_quota(text, f"the quota of {principal}")
            for principal, text in self.quotas.items()
        }
        return AccessSettings(cap_cache_ttl_ms=self.cap_cache_ttl_ms, principal_quotas=quotas).validate()
