"""Settings of encryption and erasure."""

import os
from collections.abc import Mapping

import msgspec

from postroom.application.erasure.policy import SubjectPolicy, check_policies
from postroom.domain.arguments import check_path, check_text
from postroom.domain.errors import InvalidRequest


class ErasureSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of encryption and erasure (ADR 0089).

    Arguments:
        keys: path of the key store, which `postroom erasure init` creates; outside the store and its backups.
        topics: policies by topic; `*` is that of all topics without one of their own.
        master_key_file: path of the file with the master key.
        master_key_variable: environment variable with the master key, instead of a file.
    """

    keys: str
    topics: Mapping[str, SubjectPolicy] = {}
    master_key_file: str | None = None
    master_key_variable: str | None = None

    def validate(self) -> "ErasureSettings":
        """Return the settings with absolute paths, or raise InvalidRequest."""
        keys, file, variable = self.keys, self.master_key_file, self.master_key_variable
        if (file is None) == (variable is None):
            raise InvalidRequest(
                "The settings of erasure must name one master key, with master_key_file or "
                "master_key_variable."
            )
        return ErasureSettings(
            keys=os.path.abspath(check_path("keys", keys)),
            topics=check_policies(self.topics),
            master_key_file=None if file is None else os.path.abspath(check_path("master_key_file", file)),
            master_key_variable=None if variable is None else check_text("master_key_variable", variable, 1),
        )
