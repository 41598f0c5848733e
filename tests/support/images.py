"""Container images: layers from lists of entries, as OCI layouts and as archives of ``docker
save``."""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import zstandard

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
PACKERS: Mapping[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar+gzip": gzip.compress,
    "tar+zstd": zstandard.ZstdCompressor().compress,
}

Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, data: bytes = b"", **fields: Any) -> Entry:
    """A file of mode 0644, of 2001; ``fields`` are those of TarInfo."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), 10**9
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def directory(name: str, **fields: Any) -> Entry:
    return entry(name, **{"type": tarfile.DIRTYPE, "mode": 0o755, **fields})


def link(name: str, target: str, **fields: Any) -> Entry:
    """A hard link."""
    return entry(name, type=tarfile.LNKTYPE, linkname=target, **fields)


def symlink(name: str, target: str, **fields: Any) -> Entry:
    return entry(name, type=tarfile.SYMTYPE, linkname=target, **fields)


def layer(*entries: Entry) -> bytes:
    """The archive."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config_of(layers: Sequence[bytes]) -> bytes:
    unpacked = [f"sha256:{digest_of(one)}" for one in layers]
    return json.dumps(
        {
            "architecture": MACHINE,
            "os": "linux",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": unpacked},
        }
    ).encode()


def oci_layout(
    path: Path, layers: Sequence[bytes], packing: Sequence[str] = (), name: str = "latest"
) -> str:
    """Make the directory; returns the image's ID. ``packing``: of each layer (gzip)."""
    blobs = path / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def describe(data: bytes, kind: str) -> dict[str, Any]:
        (blobs / digest_of(data)).write_bytes(data)
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest_of(data)}", "size": len(data)}

    config = config_of(layers)
    packed = [
        describe(PACKERS[kind](one), f"layer.v1.{kind}")
        for one, kind in zip(layers, packing or ["tar+gzip"] * len(layers), strict=True)
    ]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": describe(config, "config.v1+json"),
        "layers": packed,
    }
    descriptor = describe(json.dumps(manifest).encode(), "manifest.v1+json")
    descriptor["annotations"] = {"org.opencontainers.image.ref.name": name}
    index = {"schemaVersion": 2, "manifests": [descriptor]}
    (path / "index.json").write_text(json.dumps(index))
    (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return digest_of(config)


def docker_archive(path: Path, layers: Sequence[bytes], name: str = "train:1") -> str:
    """Make the file, as ``docker save`` did before it wrote OCI layouts; returns the image's ID."""
    config = config_of(layers)
    paths = [f"{digest_of(one)}/layer.tar" for one in layers]
    saved = [{"Config": f"{digest_of(config)}.json", "RepoTags": [name], "Layers": paths}]
    files = {
        f"{digest_of(config)}.json": config,
        **dict(zip(paths, layers, strict=True)),
        "manifest.json": json.dumps(saved).encode(),
    }
    path.write_bytes(layer(*(entry(name, data) for name, data in files.items())))
    return digest_of(config)


def typical() -> list[bytes]:
    """Layers with all that layers may have."""
    return [
        layer(
            directory("./", mode=0o755),
            *map(directory, ("bin", "data", "dev", "run", "usr")),
            entry("bin/run", b"#!/bin/sh\necho started\n", mode=0o755),
            entry("bin/suid", b"binary", mode=0o4755, uid=7, gid=8),
            symlink("bin/sh", "/bin/run"),
            symlink("lib", "usr/lib"),
            directory("usr/lib/python", mtime=10**9 + 7),
            link("usr/lib/linked", "bin/run"),
            directory("etc"),
            entry("etc/hidden", b"hidden"),
            entry("etc/replaced", b"old"),
            directory("opaque"),
            entry("opaque/gone", b"gone"),
            directory("opaque/gone-directory"),
            entry("opaque/gone-directory/file", b"gone"),
            directory("becomes-file"),
            entry("becomes-file/below", b"gone"),
            entry("becomes-directory", b"gone"),
            directory("tmp", mode=0o1777),
            entry("dev/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
            entry("run/fifo", type=tarfile.FIFOTYPE),
            entry("data/large", bytes(range(256)) * 12345),
            entry("data/fraction", b"x", pax_headers={"mtime": "1000000000.123456789"}),
            entry(
                "data/attributes",
                b"x",
                pax_headers={"SCHILY.xattr.user.note": "kept", "SCHILY.xattr.security.x": "no"},
            ),
            entry("data/\udcff", b"a name that is no UTF-8"),
            entry("data/" + "long" * 60, b"long"),
        ),
        layer(
            entry("etc/.wh.hidden"),
            entry("etc/replaced", b"new"),
            directory("opaque"),
            entry("opaque/kept", b"kept"),
            entry("opaque/.wh..wh..opq"),
            entry("becomes-file", b"file"),
            directory("becomes-directory"),
            entry("becomes-directory/below", b"below"),
            link("etc/again", "bin/suid"),
            entry("missing/.wh.nothing"),
        ),
        layer(entry("etc/hidden", b"is back"), entry("usr/.wh.lib"), directory("usr/lib64")),
    ]
