"""The master key port (a file, the environment, a command), and the cipher of subjects' keys."""

import hashlib
import hmac
import os
import re
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_bytes
from signal import SIGKILL
from subprocess import DEVNULL, PIPE, Popen
from threading import Event, Timer

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, AESSIV

from postroom.adapters.files import sync
from postroom.application.ports.subject_keys import MasterKey, Part
from postroom.domain.errors import IntegrityFailure, InvalidRequest, NotFound, Unavailable

KEY_BYTES = 32
NONCE_BYTES = 12
MODE = 0o600
OTHERS = 0o077
_KEY = re.compile(rf"\s*([0-9a-fA-F]{{{2 * KEY_BYTES}}})\s*\Z")
_MAX_TEXT = 1_000
COMMAND_SECONDS = 10.0
"""Time limit of a command that prints a master key."""


class LocalMasterKey(MasterKey):
    """Master key in the memory of this process; see `MasterKey`.

    Arguments:
        key: 32 random bytes, from which keys for each purpose are derived.
    """

    def __init__(self, key: bytes) -> None:
        def derive(purpose: bytes) -> bytes:
            return hmac.digest(key, b"postroom " + purpose, hashlib.sha256)

        self._key_id = derive(b"key id")[:8].hex()
        self._cipher = AESGCM(derive(b"wrap"))
        self._index_key = derive(b"index")
        self._signing_key = Ed25519PrivateKey.from_private_bytes(derive(b"sign"))

    def __repr__(self) -> str:
        return f"LocalMasterKey({self._key_id!r})"

    @property
    def key_id(self) -> str:
        """Return the id, derived from the key."""
        return self._key_id

    def wrap(self, data_key: bytes, pseudonym: str) -> bytes:
        nonce = token_bytes(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data_key, pseudonym.encode())

    def unwrap(self, data_key: bytes, pseudonym: str) -> bytes:
        try:
            nonce, ciphertext = data_key[:NONCE_BYTES], data_key[NONCE_BYTES:]
            return self._cipher.decrypt(nonce, ciphertext, pseudonym.encode())
        except (InvalidTag, ValueError):
            raise IntegrityFailure(
                f"The key of {pseudonym} was altered in the key store; restore it from a backup."
            ) from None

    def index(self, subject: str) -> bytes:
        return hmac.digest(self._index_key, subject.encode(), hashlib.sha256)

    def sign(self, record: bytes) -> bytes:
        return self._signing_key.sign(record)

    def verify(self, record: bytes, signature: bytes) -> bool:
        try:
            self._signing_key.public_key().verify(signature, record)
        except InvalidSignature:
            return False
        return True

    @property
    def public_key(self) -> bytes:
        return self._signing_key.public_key().public_bytes_raw()


def create_master_key(path: Path) -> LocalMasterKey:
    """Write a new master key to a file of mode 0600, and return it.

    Raises: InvalidRequest when the file exists, Unavailable when it can't be written.
    """
    key = token_bytes(KEY_BYTES)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, MODE)
        with open(descriptor, "w") as file:
            file.write(f"{key.hex()}\n")
            file.flush()
            os.fsync(descriptor)
        sync(path.parent)
    except FileExistsError:
        raise InvalidRequest(f"The file {path} exists; a master key is never overwritten.") from None
    except OSError as error:
        raise Unavailable(f"The master key {path} can't be written: {error.strerror}.") from error
    return LocalMasterKey(key)


def read_master_key(path: Path) -> LocalMasterKey:
    """Return the master key of a file.

    Raises: NotFound when the file does not exist, InvalidRequest when it contains no key or others may read
        it, Unavailable when it can't be read.
    """
    try:
        # Non-blocking: opening a pipe waits for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidRequest(f"The master key {path} is not a file; name another path.")
            if status.st_mode & OTHERS:
                mode = status.st_mode & 0o7777
                raise InvalidRequest(
                    f"Others may read the master key {path}, whose mode is {mode:04o}; run chmod 600 on it."
                )
            text = file.read(_MAX_TEXT).decode("ascii", "replace")
    except FileNotFoundError:
        raise NotFound(
            f"There is no master key {path}; restore the file, or create one with postroom erasure init."
        ) from None
    except OSError as error:
        raise Unavailable(f"The master key {path} can't be read: {error.strerror}.") from error
    return _parse(text, f"The file {path}")


def master_key_of(environment: Mapping[str, str], name: str) -> LocalMasterKey:
    """Return the master key of an environment variable.

    Raises: NotFound when it is not set, InvalidRequest when it contains no key.
    """
    if name not in environment:
        raise NotFound(f"The environment has no variable {name}; set it to the master key.")
    return _parse(environment[name], f"The environment variable {name}")


def run_master_key_command(command: str) -> LocalMasterKey:
    """Return the master key that a command prints; its output is never quoted.

    Arguments:
        command: program and arguments, in the syntax of a shell but run without one.

    Raises: InvalidRequest for a malformed command or output, Unavailable when it can't be run, fails, or
        takes longer than `COMMAND_SECONDS`.
    """
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise InvalidRequest(f"master_key_command is malformed: {error}.") from None
    if not arguments:
        raise InvalidRequest("master_key_command is empty; name a program that prints the master key.")
    what = f"The master key command {arguments[0]}"  # its arguments may be secret
    try:
        process = Popen(arguments, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, start_new_session=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        reason = error.strerror if isinstance(error, OSError) else error
        raise Unavailable(f"{what} can't be run: {reason}.") from error
    text, status = _read_output(process)
    if status is None:
        raise Unavailable(f"{what} did not end within {COMMAND_SECONDS:g} s.")
    if status:
        raise Unavailable(f"{what} failed with exit status {status}; run it yourself to see why.")
    return _parse(text, f"The output of the master key command {arguments[0]}")


def _read_output(process: Popen[bytes]) -> tuple[str, int | None]:
    """Return the beginning of a process's output, and its exit status or None if it took too long."""
    is_over = Event()

    def kill() -> None:
        is_over.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, SIGKILL)

    timer = Timer(COMMAND_SECONDS, kill)
    timer.start()
    try:
        assert process.stdout is not None
        with process.stdout as output:
            text = output.read(_MAX_TEXT).decode("ascii", "replace")
        status = process.wait()
    finally:
        timer.cancel()
        timer.join()
        if process.poll() is None:  # the wait was interrupted
            kill()
            process.wait()
    return text, None if is_over.is_set() else status


def _parse(text: str, where: str) -> LocalMasterKey:
    match = _KEY.match(text)
    if match is None:  # the error must not quote the key
        raise InvalidRequest(f"{where} must contain a master key of {2 * KEY_BYTES} hexadecimal digits.")
    return LocalMasterKey(bytes.fromhex(match[1]))


CIPHER_BYTES = 64
"""A key of AES-256-SIV, which is two keys."""
DATA_KEY_BYTES = CIPHER_BYTES + 32
"""Data key: a key of AES-256-SIV, and one of HMAC."""
PSEUDONYM_PREFIX = "subject:"
TOKEN_PREFIX = "blind:"
TOKEN_BYTES = 16


class DataKey:
    """Data key of a subject; see `SubjectKey`.

    Arguments:
        key: `DATA_KEY_BYTES` random bytes.
    """

    def __init__(self, pseudonym: str, key: bytes) -> None:
        self._pseudonym = pseudonym
        self._cipher = AESSIV(key[:CIPHER_BYTES])
        self._hmac_key = key[CIPHER_BYTES:]

    def __repr__(self) -> str:
        return f"DataKey({self._pseudonym!r})"

    @property
    def pseudonym(self) -> str:
        """Return the pseudonym of the subject."""
        return self._pseudonym

    def encrypt(self, part: Part, plaintext: bytes) -> bytes:
        """Return a ciphertext, 16 bytes longer than the plaintext; see `SubjectKey.encrypt`."""
        # A version byte comes first, because libraries refuse to encrypt an empty text by AES-SIV.
        return self._cipher.encrypt(b"\x01" + plaintext, [part.encode()])

    def decrypt(self, part: Part, ciphertext: bytes) -> bytes:
        """Return the plaintext; see `SubjectKey.decrypt`."""
        try:
            plaintext = self._cipher.decrypt(ciphertext, [part.encode()])
        except (InvalidTag, ValueError):  # ValueError: too short
            plaintext = b""
        if plaintext[:1] != b"\x01":
            raise IntegrityFailure(f"The {part} of a message of {self._pseudonym} was altered.")
        return plaintext[1:]

    def token(self, name: str, value: bytes) -> str:
        """Return the token of a header's value; see `SubjectKey.token`."""
        text = name.encode()
        digest = hmac.digest(self._hmac_key, len(text).to_bytes(4, "big") + text + value, hashlib.sha256)
        return TOKEN_PREFIX + digest[:TOKEN_BYTES].hex()
