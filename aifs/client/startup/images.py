"""Container images: archives of ``docker save`` and OCI layouts, unpacked once for all hosts.

    DIR/images/DIGEST/rootfs        its layers, applied one after the other
    DIR/images/DIGEST/config.json   its configuration; DIGEST is its SHA-256, Docker's image ID

``once`` makes it: by one importer, whole or not at all. The directory is for root alone: programs
in it may be set-user-ID. Parts are found by digests, which are checked (OCI image specification,
"Image Manifest Specification"), also those of unpacked layers in the configuration.
"""

import errno
import gzip
import hashlib
import io
import json
import os
import platform
import re
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from aifs.client.startup.layers import HEADER_MAX, PIECE, ImageRefused, Limits, Rootfs
from aifs.client.startup.once import MadeDirectory, make_once
from aifs.core import beneath, trees

IMAGES = "images"
OWNER = 0
"""Images, and the directory that they are in, belong to root: others could plant programs."""

BYTES_MAX = 64 << 30
"""Bytes that an image may unpack to, unless the caller allows more."""

_DOCUMENT_MAX = 4 << 20  # bytes of an index, manifest or configuration
_INDEXES_MAX = 64
_WINDOW_MAX = 128 << 20  # bytes of memory that unpacking zstd may take
_INDEX, _SAVED, _BLOBS = "index.json", "manifest.json", "blobs/sha256/"
_ZSTD = b"\x28\xb5\x2f\xfd"
_SHA256 = re.compile("sha256:([0-9a-f]{64})")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_DAMAGE = (
    tarfile.TarError,
    zlib.error,
    gzip.BadGzipFile,
    EOFError,
    ValueError,
    ArithmeticError,
    LookupError,
    RecursionError,
)
"""Errors of the readers of archives for damaged ones."""

T = TypeVar("T")


@dataclass
class ImageLayer:
    """A layer's place in an archive, and its digests."""

    path: str
    """In the archive."""

    unpacked: str
    """The digest of its unpacked bytes."""

    digest: str = ""
    """The digest of its bytes; empty where the archive does not say."""

    size: int = -1
    """Of these bytes; -1 where the archive does not say."""


@dataclass
class ArchivedImage:
    """An image in an archive, before it is imported."""

    digest: str
    """64 hexadecimal digits: of its configuration."""

    config: bytes
    layers: list[ImageLayer]
    names: list[str] = field(default_factory=list)


def import_image(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    name: str | None = None,
    bytes_max: int = BYTES_MAX,
) -> MadeDirectory:
    """Unpack the image in ``source`` (an archive, or a directory with an OCI layout) below
    ``directory``, unless it is there.

    One of all callers, on any host, unpacks it; the others wait. It is durable, and all digests
    were right, when it has its name; an image that is refused leaves nothing. ``name``: which of
    several images. ``bytes_max`` limits what its layers unpack to. Raises ImageRefused,
    PermissionError unless root calls, MakingFailed, OSError.
    """
    if os.geteuid():
        raise PermissionError(errno.EPERM, "only root can give files their owners", source)
    with open_archive(source) as archive:
        image = _choose(archive.images(), name)
        return make_once(
            os.path.join(directory, IMAGES),
            image.digest,
            key={"names": image.names, "source": os.path.basename(os.path.realpath(source))},
            make=lambda path: _unpack(archive, image, path, Limits(bytes_max)),
            owner=OWNER,
        )


def _unpack(archive: "ImageArchive", image: ArchivedImage, path: str, limits: Limits) -> None:
    fd = beneath.open_directory(path)
    try:
        beneath.set_mode(".", 0o700, fd)
        beneath.make_directory("rootfs", fd)
    finally:
        os.close(fd)
    rootfs = Rootfs(os.path.join(path, "rootfs"), limits)
    try:
        for number, layer in enumerate(image.layers, start=1):
            with _refusing(f"layer {number}"), archive.open_layer(layer) as file:
                _apply(rootfs, layer, file, limits)
        rootfs.finish()
    finally:
        rootfs.close()
    trees.replace_file(os.path.join(path, "config.json"), image.config)


def _apply(rootfs: Rootfs, layer: ImageLayer, file: IO[bytes], limits: Limits) -> None:
    packed = _Measured(file, layer.digest, layer.size, lambda count: None)
    with _unpacked(io.BufferedReader(packed, PIECE)) as stream:
        unpacked = _Measured(stream, layer.unpacked, -1, limits.take)
        rootfs.apply(io.BufferedReader(unpacked, PIECE))
        unpacked.finish()
        packed.finish()


@contextmanager
def _unpacked(packed: io.BufferedReader) -> Iterator[IO[bytes]]:
    """The bytes packed by gzip or Zstandard, by their magic, or these bytes."""
    start = packed.peek(4)[:4]
    if start.startswith(b"\x1f\x8b"):
        yield gzip.GzipFile(fileobj=packed)  # type: ignore[misc]
    elif start == _ZSTD:
        import zstandard

        unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW_MAX)
        try:
            yield unpacker.stream_reader(packed, read_across_frames=True)
        except zstandard.ZstdError as error:
            raise ImageRefused(str(error)) from None
    else:
        yield packed


class _Measured(io.RawIOBase):
    """Bytes that are hashed and counted as they are read."""

    def __init__(
        self, source: IO[bytes], digest: str, size: int, on_bytes: Callable[[int], None]
    ) -> None:
        self._source = source
        self._digest = digest
        self._size = size
        self._on_bytes = on_bytes
        self._hasher = hashlib.sha256()
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        self._hasher.update(data)
        self._read += len(data)
        self._on_bytes(len(data))
        if 0 <= self._size < self._read:
            raise ImageRefused(f"is longer than its {self._size} bytes")
        buffer[: len(data)] = data
        return len(data)

    def finish(self) -> None:
        """Read the rest. Raises ImageRefused if it was not what it must be."""
        rest = bytearray(PIECE)
        while self.readinto(rest):
            pass
        if 0 <= self._size != self._read:
            raise ImageRefused(f"ends after {self._read} of {self._size} bytes")
        if self._digest and self._digest != f"sha256:{self._hasher.hexdigest()}":
            raise ImageRefused(f"is not what its digest says, {self._digest}")


@contextmanager
def _refusing(what: str | os.PathLike[str]) -> Iterator[None]:
    """Put ``what`` before the text of errors inside."""
    try:
        yield
    except ImageRefused as error:
        raise ImageRefused(f"{os.fspath(what)}: {error}") from None
    except _DAMAGE as error:
        raise ImageRefused(
            f"{os.fspath(what)}: is damaged: {error or type(error).__name__}"
        ) from None


def _choose(images: list[ArchivedImage], name: str | None) -> ArchivedImage:
    found = [image for image in images if name is None or name in image.names]
    if len(found) == 1:
        return found[0]
    names = ", ".join(each for image in images for each in image.names or [image.digest])
    if not images:
        raise ImageRefused(f"has no image for {_machine()}")
    if not found:
        raise ImageRefused(f"has no image {name}, but {names}")
    raise ImageRefused(f"has several images; choose one with --name: {names}")


def _machine() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())


# --- archives -------------------------------------------------------------------------------------


@contextmanager
def open_archive(source: str | os.PathLike[str]) -> Iterator["ImageArchive"]:
    """The archive, until the context ends. Raises ImageRefused, OSError."""
    with _refusing(source):
        if os.path.isdir(source):
            yield ImageArchive(lambda path: _open_below(os.fspath(source), path))
            return
        with open(source, "rb") as file:
            if file.read(4).startswith((b"\x1f\x8b", _ZSTD)):
                raise ImageRefused("is packed as a whole; unpack it first (gunzip, unzstd)")
            file.seek(0)
            with tarfile.open(fileobj=_ShortReads(file), mode="r:") as tar:
                members = {os.path.normpath(member.name): member for member in tar}
                yield ImageArchive(lambda path: _extract(tar, members, path))


class _ShortReads(io.BufferedReader):
    """A header that claims to be long is not read."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > HEADER_MAX:
            raise ImageRefused(f"a header of {size} bytes is too long")
        return super().read(size)


def _open_below(directory: str, path: str) -> IO[bytes]:
    """Raises FileNotFoundError. Follows symlinks: the target's digest is checked."""
    found = os.path.join(directory, path)
    if path != _INDEX and not path.startswith(_BLOBS):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), found)
    if not stat.S_ISREG(os.stat(found).st_mode):
        raise ImageRefused(f"{path}: is no file")
    return open(found, "rb")


def _extract(tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo], path: str) -> IO[bytes]:
    """Raises FileNotFoundError."""
    member = members.get(os.path.normpath(path))
    if member is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    file = tar.extractfile(member)
    if file is None:
        raise ImageRefused(f"{path}: is no file")
    return file


class ImageArchive:
    """The files of an archive by their paths; ``open`` raises FileNotFoundError."""

    def __init__(self, open: Callable[[str], IO[bytes]]) -> None:
        self.open = open

    def images(self) -> list[ArchivedImage]:
        """Those for this machine. Raises ImageRefused, OSError."""
        with suppress(FileNotFoundError):
            return self._listed(self._read(_INDEX))
        try:
            saved = _parse(self._read(_SAVED))
        except FileNotFoundError:
            raise ImageRefused(f"is no image: it has neither {_INDEX} nor {_SAVED}") from None
        return [self._saved(one) for one in _all(saved, dict)]

    def open_layer(self, layer: ImageLayer) -> IO[bytes]:
        """Raises ImageRefused, OSError."""
        try:
            return self.open(layer.path)
        except FileNotFoundError:
            raise ImageRefused(f"{layer.path} is missing in the archive") from None

    def _listed(self, index: bytes) -> list[ArchivedImage]:
        """The images of an OCI index, and of nested ones."""
        images: dict[str, ArchivedImage] = {}
        indexes: list[tuple[bytes, list[str]]] = [(index, [])]
        for document, above in indexes:  # which grows
            if len(indexes) > _INDEXES_MAX:
                raise ImageRefused("has too many indexes")
            for one in _all(_get(_parse(document), "manifests", list), dict):
                if not _is_ours(one):
                    continue
                notes = one.get("annotations") or {}
                names = above + [str(notes[key]) for key in _NAMES if key in notes]
                blob = self._blob(one)
                if "manifests" in _parse(blob):
                    indexes.append((blob, names))
                else:
                    image = self._image_of(_parse(blob))
                    image = images.setdefault(image.digest, image)
                    image.names = list(dict.fromkeys(image.names + names))
        return list(images.values())

    def _image_of(self, manifest: Any) -> ArchivedImage:
        layers = [
            ImageLayer(_blob_path(one), "", _get(one, "digest", str), _get(one, "size", int))
            for one in _all(_get(manifest, "layers", list), dict)
        ]
        return _image(self._blob(_get(manifest, "config", dict)), layers)

    def _saved(self, saved: Any) -> ArchivedImage:
        """An image in manifest.json of ``docker save``."""
        path = _get(saved, "Config", str)
        layers = [ImageLayer(one, "") for one in _all(_get(saved, "Layers", list), str)]
        image = _image(self._read_listed(path), layers)
        if any(digest != image.digest for digest in re.findall("[0-9a-f]{64}", path)):
            raise ImageRefused(f"{path}: is not what its name says")
        image.names = _all(saved.get("RepoTags") or [], str)
        return image

    def _blob(self, descriptor: Any) -> bytes:
        """The document of a descriptor."""
        path = _blob_path(descriptor)
        data = self._read_listed(path)
        digest = hashlib.sha256(data).hexdigest()
        if len(data) != _get(descriptor, "size", int) or digest != os.path.basename(path):
            raise ImageRefused(f"{path}: is not what its digest and size say")
        return data

    def _read_listed(self, path: str) -> bytes:
        try:
            return self._read(path)
        except FileNotFoundError:
            raise ImageRefused(f"{path} is missing in the archive") from None

    def _read(self, path: str) -> bytes:
        with self.open(path) as file:
            data = file.read(_DOCUMENT_MAX)
            if file.read(1):
                raise ImageRefused(f"{path}: is longer than {_DOCUMENT_MAX} bytes")
        return data


def _image(config: bytes, layers: list[ImageLayer]) -> ArchivedImage:
    root = _get(_parse(config), "rootfs", dict)
    unpacked = _all(_get(root, "diff_ids", list), str)
    if len(unpacked) != len(layers):
        raise ImageRefused(f"has {len(layers)} layers, but digests of {len(unpacked)}")
    for layer, digest in zip(layers, unpacked, strict=True):
        layer.unpacked = digest
    return ArchivedImage(hashlib.sha256(config).hexdigest(), config, layers)


def _blob_path(descriptor: Any) -> str:
    digest = _SHA256.fullmatch(_get(descriptor, "digest", str))
    if digest is None:
        raise ImageRefused(f"{descriptor['digest']!r}: is no SHA-256")
    return _BLOBS + digest[1]


def _is_ours(descriptor: dict[str, Any]) -> bool:
    """Whether it may be for this machine."""
    system = descriptor.get("platform")
    if not isinstance(system, dict):
        return True
    return (system.get("os"), system.get("architecture")) == ("linux", _machine())


def _parse(document: bytes) -> Any:
    return json.loads(document)


def _get(document: Any, key: str, kind: type[T]) -> T:
    value = document.get(key) if isinstance(document, dict) else None
    if not isinstance(value, kind):
        raise ImageRefused(f"a {key} is missing where there must be one")
    return value


def _all(values: Any, kind: type[T]) -> list[T]:
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ImageRefused("has something else where a list must be")
    return values
