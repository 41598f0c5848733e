"""A bucket of an object store, by its URL: s3, gs or az. The extra ``[objects]`` brings obstore.

    s3://BUCKET/PREFIX?endpoint=http://10.0.0.5:9000&region=eu-west-1&secret=/etc/aifs/bucket

Parameters of the URL, like the environment (AWS_*, GOOGLE_*, AZURE_*), are those of obstore.
``secret`` names a file in the format of ~/.aws/credentials with any of them, and ``limit`` (bytes
that a server keeps there) may stand in either; without it, and
without keys in the environment, ``s3`` takes ~/.aws/credentials and ~/.aws/config (AWS_PROFILE),
and otherwise the role of the machine.

Requests that fail in passing (429, 5xx, resets, timeouts) are repeated with jitter for a minute.
Errors are OSErrors that name URL, key and what to do. All functions block, and may be used from
any thread.
"""

import configparser
import errno
import os
import random
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import wraps
from importlib import import_module
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar
from urllib.parse import parse_qsl

from aifs.core.errors import StoreError
from aifs.core.units import parse_size

P = ParamSpec("P")
R = TypeVar("R")

PART = 8 << 20
"""Bytes of each part of an upload. A store takes up to 10,000: objects have up to 78 GiB."""

PACK = 72 << 20
"""Bytes of each part of a pack, which is that of one drain: so it is put by one request."""

PARTS_AT_ONCE = 4
"""Of one upload: requests in flight."""

ANY = object()
"""A key may be put whatever is there."""

REPEAT: dict[str, Any] = {
    "max_retries": 10,
    "backoff": {"max_backoff": timedelta(seconds=5)},
    "retry_timeout": timedelta(seconds=60),
}
"""How requests that fail in passing are repeated, as obstore wants it."""

_PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Before idempotent requests are repeated that obstore does not repeat: resets of a deletion, and
bodies that are too short."""

_SECRETS = re.compile(r"secret_access_key|access_key|session_token|token|sas|password")
"""Parameters that must not stand in a URL, which logs and tables show."""

_MEMORY: dict[str, Any] = {}
"""Stores of ``memory://NAME`` (for tests), by NAME: as long as this process lives."""


def _repeated(call: Callable[P, R]) -> Callable[P, R]:
    @wraps(call)
    def repeat(*args: P.args, **named: P.kwargs) -> R:
        for pause_s in _PAUSES_S:
            began_s = time.monotonic()
            try:
                return call(*args, **named)
            except OSError as error:
                is_passing = error.errno in (errno.EIO, errno.EHOSTUNREACH)
                if not is_passing or time.monotonic() - began_s > _PAUSES_S[-1]:
                    raise  # else it was not obstore that has given up, after a minute
            time.sleep(pause_s * random.uniform(0.5, 1))
        return call(*args, **named)

    return repeat


class ObjectInfo(NamedTuple):
    """An object as a store describes it."""

    key: str
    size: int
    etag: str
    """Of exactly this content."""
    modified_s: float
    """Seconds since 1970, by the clock of the store."""


class Bucket:
    """Keys are relative to the PREFIX of the URL."""

    def __init__(self, url: str) -> None:
        """Does no I/O except to read files with secrets. Raises StoreError."""
        try:
            obstore: Any = import_module("obstore")
            import_module("obstore.store")
        except ImportError:
            raise StoreError(
                f"{url}: needs the package obstore; in a checkout of AIFS: pip install '.[objects]'"
            ) from None
        self.url, _, query = url.partition("?")
        """Without parameters: for people."""
        self._obstore = obstore
        self._faults = (obstore.exceptions.BaseError, FileNotFoundError)
        self.place = (self.url, "")
        """Differs between any two: the URL, and the endpoint that it names."""
        settings = settings_of(self.url, query)
        try:
            self.limit = parse_size(settings.pop("limit", "0"))
            """Bytes that a data server may keep there; 0: as many as it takes."""
        except ValueError as error:
            raise StoreError(f"{self.url}: limit: {error}") from None
        if self.url.startswith("memory://"):
            self._store = _MEMORY.setdefault(self.url, obstore.store.MemoryStore())
            return
        endpoints = (value for name, value in settings.items() if "endpoint" in name)
        self.place = (self.url, next(endpoints, ""))
        try:
            self._store = obstore.store.from_url(
                self.url.rstrip("/"),
                config=settings,
                client_options={"allow_http": _is_plain(settings), "timeout": "60s"},
                retry_config=REPEAT,
            )
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise StoreError(f"{self.url}: {_first_line(error)}") from None

    def where(self, key: str) -> str:
        return f"{self.url}/{key}"

    def get(self, key: str) -> tuple[bytes, str] | None:
        """The whole object and its ETag, or None."""
        with self.named(key):
            try:
                found = self._obstore.get(self._store, key)
                return bytes(found.bytes()), found.meta["e_tag"] or ""
            except FileNotFoundError as error:
                self._require_bucket(error)
                return None

    @_repeated
    def read_into(self, key: str, buffer: memoryview, offset: int, etag: str = "") -> int:
        """Fill ``buffer`` from ``offset``, which lies in the object, by one request; the bytes
        read, fewer only at the end. ``etag``: OSError (ESTALE) if the object is another."""
        options: dict[str, Any] = {"range": (offset, offset + len(buffer))}
        if etag:
            options["if_match"] = etag
        with self.named(key):
            try:
                found = self._obstore.get(self._store, key, options=options)
                end = min(offset + len(buffer), found.meta["size"])
                content = memoryview(found.bytes())
            except self._obstore.exceptions.PreconditionError as error:
                raise OSError(errno.ESTALE, "was replaced meanwhile", self.where(key)) from error
        if len(content) != end - offset:
            raise OSError(errno.EIO, "the store sent too few bytes", self.where(key))
        buffer[: len(content)] = content
        return len(content)

    def head(self, key: str) -> ObjectInfo | None:
        with self.named(key):
            try:
                return _found(self._obstore.head(self._store, key))
            except FileNotFoundError as error:
                self._require_bucket(error)
                return None

    def put(self, key: str, data: bytes | memoryview, expected: object = ANY) -> str | None:
        """Put a small object, whole or not at all, and return its ETag. ``expected``: the ETag that
        is to be replaced; None: there is no such object. Returns None where it is otherwise."""
        mode = "overwrite" if expected is ANY else {"e_tag": expected} if expected else "create"
        faults = self._obstore.exceptions
        with self.named(key):
            try:
                done = self._obstore.put(self._store, key, data, mode=mode, use_multipart=False)
                return done["e_tag"] or ""
            except (faults.AlreadyExistsError, faults.PreconditionError):
                return None
            except FileNotFoundError as error:  # of the object that was to be replaced
                self._require_bucket(error)
                return None

    def upload(self, key: str, part: int = PART) -> "Upload":
        """To put an object by one request, or, from ``part`` bytes on, by parts of so many."""
        with self.named(key):
            writer = self._obstore.open_writer(
                self._store,
                key,
                buffer_size=part,
                max_concurrency=max(1, PARTS_AT_ONCE * PART // part),
            )
        return Upload(writer, self, key)

    @_repeated
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, whether they are there or not: up to 1,000 by one request."""
        if not keys:
            return
        with self.named(keys[0]):
            try:
                self._obstore.delete(self._store, list(keys))
            except FileNotFoundError as error:
                self._require_bucket(error)
                for key in keys if len(keys) > 1 else ():  # some stores stop at the first
                    self.delete([key])

    def move(self, key: str, to: str) -> None:
        """By a copy in the store, up to 5 GiB in S3."""
        with self.named(key):
            self._obstore.rename(self._store, key, to)

    def pages(self, prefix: str, after: str = "", size: int = 1000) -> Iterator[list[ObjectInfo]]:
        """The objects PREFIX/..., in order of their keys, from behind ``after`` on."""
        with self.named(prefix):
            listed = self._obstore.list(
                self._store, prefix or None, offset=after or None, chunk_size=size
            )
            for page in listed:
                yield [_found(meta) for meta in page]

    def _require_bucket(self, error: FileNotFoundError) -> None:
        """Raise the error again unless it is that of a missing object."""
        if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
            raise error

    @contextmanager
    def named(self, key: str) -> Iterator[None]:
        try:
            yield
        except self._faults as error:
            number, text = _explained(str(error))
            raise OSError(number, text, self.where(key)) from error


class Upload:
    """A context: the object is there when it has ended; an exception aborts the upload. One that
    the process does not survive stays in the store, unseen, until a lifecycle rule of the bucket
    aborts it."""

    def __init__(self, writer: Any, bucket: Bucket, key: str) -> None:
        self._writer = writer
        self._bucket = bucket
        self._key = key
        self._length = 0
        """Bytes that have been written."""

    def __enter__(self) -> "Upload":
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append; waits while PARTS_AT_ONCE parts are under way."""
        with self._bucket.named(self._key):
            self._writer.write(data)
        self._length += len(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(error)
        else:
            self.complete()

    def complete(self) -> None:
        """The object is there on return. Its key is used for this content alone."""
        try:
            with self._bucket.named(self._key):
                self._writer.close()
        except OSError:
            found = self._bucket.head(self._key)  # the answer may have been lost, not the request
            if found is None or found.size != self._length:
                raise

    def abort(self, error: BaseException) -> None:
        """There is no object. Errors are ignored."""
        with suppress(Exception):
            self._writer.__exit__(type(error), error, None)


def _found(meta: Any) -> ObjectInfo:
    return ObjectInfo(
        meta["path"], meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp()
    )


# --- settings ---


def settings_of(url: str, query: str) -> dict[str, str]:
    """Of obstore, from the parameters of the URL and from files."""
    given = dict(parse_qsl(query))
    for name in given:
        if name != "secret" and _SECRETS.search(name):
            raise StoreError(f"{url}: {name} must not stand in a URL; write it to a file: secret=")
    path, profile = given.pop("secret", ""), given.pop("profile", "")
    profile = profile or os.environ.get("AWS_PROFILE", "default")
    if path:
        return _read(path, profile, is_secret=True) | given
    if not url.startswith("s3://") or "AWS_ACCESS_KEY_ID" in os.environ:
        return given
    credentials = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    config = os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")
    found = _read(config, profile) | _read(credentials, profile)
    named = {"region": "AWS_REGION", "endpoint_url": "AWS_ENDPOINT_URL"}
    kept = {
        name: value
        for name, value in found.items()
        if name in _OF_AWS and named.get(name, "") not in os.environ
    }
    return kept | given


_OF_AWS = (
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
    "endpoint_url",
    "region",
)
"""Of the many keys of ~/.aws/config and ~/.aws/credentials those that matter here."""


def _read(path: str, profile: str, is_secret: bool = False) -> dict[str, str]:
    path = os.path.expanduser(path)
    try:
        with open(path) as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read()
    except OSError as error:
        if not is_secret:
            return {}
        raise StoreError(
            f"{path}: the secret of a bucket cannot be read: {error.strerror}"
        ) from None
    if is_secret and stat.S_IMODE(mode) & 0o077:
        raise StoreError(f"{path}: others may read the secret of a bucket: chmod 600 {path}")
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(text if text.lstrip().startswith("[") else f"[default]\n{text}", path)
    except configparser.Error as error:
        raise StoreError(f"{path}: is not in the format of ~/.aws/credentials: {error}") from None
    for section in (profile, f"profile {profile}"):
        if parser.has_section(section):
            return dict(parser.items(section))
    if is_secret:
        raise StoreError(f"{path}: has no section [{profile}]; name one: profile=")
    return {}


def _is_plain(settings: dict[str, str]) -> bool:
    """Whether an endpoint without TLS is meant."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
    values = [*settings.values(), *(os.environ.get(name, "") for name in names)]
    return any(value.startswith("http://") for value in values)


# --- errors ---

_MEANINGS = (
    (r"NoSuchBucket|ContainerNotFound", errno.ENOENT, "there is no such bucket; create it"),
    (r"RequestTimeTooSkewed", errno.EACCES, "the clocks of host and store differ; set the host's"),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|401 ",
        errno.EACCES,
        "the store does not accept the key or its secret; correct them",
    ),
    (r"QuotaExceeded", errno.EDQUOT, "a quota of the store is exceeded; raise it"),
    (r"StorageFull|InsufficientCapacity|507 ", errno.ENOSPC, "the store is full"),
    (
        r"InvalidObjectState",
        errno.EIO,
        "the object lies in a class that has to be restored first; restore it",
    ),
    (
        r"403 ",
        errno.EACCES,
        "access is denied; allow to list the bucket, and to get, put and delete its objects",
    ),
    (r"PermanentRedirect|AuthorizationHeaderMalformed|30[1278] ", errno.EINVAL, "set its region"),
    (r"404 |NotFound|not found", errno.ENOENT, "there is no such object"),
    (
        r"429 |SlowDown|503 ",
        errno.EBUSY,
        "the store asked for fewer requests for a minute; lower data.threads",
    ),
    (r"50[0-9] ", errno.EIO, "the store failed for a minute; see its own state"),
    (
        r"error sending request|timed out|timeout|connect",
        errno.EHOSTUNREACH,
        "the store cannot be reached; see endpoint and network",
    ),
)
"""A pattern of an error's text, the errno, and the advice; the most specific first."""


def _explained(text: str) -> tuple[int, str]:
    """The errno of an error, and a line that says what has happened and what to do. ``text``: of
    obstore."""
    text = text.partition("\n\nDebug source")[0]
    code = re.search(r"<Code>(\w+)</Code>", text)
    status = re.search(r"\d{3} [A-Z][A-Za-z ]*(?=:)", text)
    short = " ".join(found for found in (status and status[0], code and code[1]) if found)
    for pattern, number, advice in _MEANINGS:
        if re.search(pattern, short or text):
            return number, f"{advice} ({short})" if short else advice
    return errno.EIO, short or text.partition("\n")[0]


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
