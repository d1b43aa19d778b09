"""`postroom erasure`: the key store with which messages of data subjects are encrypted."""

from postroom.adapters.cli.session import Session
from postroom.domain.errors import InvalidRequest


def init(session: Session) -> None:
    """Create the key store of [erasure], and the file of its master key unless it exists.

    A key store in PostgreSQL needs its tables first: postroom migrate --keys URL.

    Keep both outside the backups of the store, and apart from each other: who has both can read every message
    whose key was not destroyed.
    """
    from postroom.adapters.compose import shown_store
    from postroom.adapters.compose.erasure import create_key_store

    settings = session.erasure_settings()
    if settings is None:
        raise InvalidRequest(
            "The settings have no section [erasure]; add one with keys, master_key_file and topics."
        )
    master_key, keys = create_key_store(settings), shown_store(settings.keys)
    if session.out.as_json:
        session.out.json(
            {
                "keys": keys,
                "master_key": master_key.key_id,
                "master_key_file": settings.master_key_file,
                "public_key": master_key.public_key.hex(),
            }
        )
        return
    session.out.facts(
        [
            ("key store", keys),
            ("master key", master_key.key_id),
            ("file", settings.master_key_file),
            ("public key", master_key.public_key.hex()),
        ]
    )
