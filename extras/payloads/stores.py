"""Where large values are: a folder that clients and workers share, or a bucket of any service that speaks S3."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from msgspec import Struct

DIGEST = re.compile(r"[0-9a-f]{64}")
UNFINISHED = re.compile(r"[0-9a-f]{64}\.[0-9a-z-]+\.new")      # what a writer that was killed leaves in a folder


class NotInStore(LookupError):
    """The store has nothing there, or the address is of another place, which nobody reads for a stranger."""


class KeptValue(Struct):
    """What a store keeps under one name."""

    name: str
    changed_at: float


class FolderStore:
    """A folder, such as one that all machines mount."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).resolve()

    def put(self, name: str, content: bytes) -> str:
        """Keep content: whole or not at all, also if this process or the machine stops."""
        path = self._place(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{name}.{uuid.uuid4().hex}.new")
        try:
            with fresh.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            sync_folder(path.parent)
        finally:
            fresh.unlink(missing_ok=True)
        return path.as_uri()

    def get(self, uri: str, most: int) -> bytes:
        """Return the content; a URI that leads out of the folder is refused."""
        path = Path(unquote(urlsplit(uri).path))
        if urlsplit(uri).scheme != "file" or not DIGEST.fullmatch(path.name) or path != self._place(path.name):
            raise NotInStore(f"{uri} is not in the store {self.folder}")
        try:
            with path.open("rb") as file:
                return file.read(most + 1)
        except FileNotFoundError:
            raise NotInStore(f"{uri} is gone") from None

    def list(self) -> Iterator[KeptValue]:
        """Yield what is kept; also what a writer that was killed has left, which nothing names.  Raises NotInStore."""
        if not self.folder.is_dir():
            raise NotInStore(f"there is no folder {self.folder}")
        for path in self.folder.glob("??/*"):
            if DIGEST.fullmatch(path.name) or UNFINISHED.fullmatch(path.name):
                with contextlib.suppress(FileNotFoundError):        # a writer has just finished it
                    yield KeptValue(path.name, path.stat().st_mtime)

    def delete(self, name: str, unless_since: float) -> bool:
        """Delete what is kept under a name, unless it was kept anew since a time."""
        path = self._place(name)
        if not path.exists() or path.stat().st_mtime > unless_since:
            return False
        path.unlink(missing_ok=True)
        return True

    def _place(self, name: str) -> Path:
        return self.folder / name[:2] / name


def sync_folder(folder: Path) -> None:
    """Let what was renamed in a folder outlive a power cut, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class S3Store:
    """A bucket, with the library boto3; `client` is one of its clients, else it is made from the environment."""

    def __init__(self, bucket: str, prefix: str = "", client: Any = None) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.client = make_client() if client is None else client

    def put(self, name: str, content: bytes) -> str:
        """Keep content; S3 itself checks that it has arrived whole."""
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + name, Body=content, ChecksumAlgorithm="SHA256",
                               ContentType="application/json")
        return f"s3://{self.bucket}/{quote(self.prefix)}{name}"

    def get(self, uri: str, most: int) -> bytes:
        """Return the content; a URI of another bucket or prefix is refused."""
        parts, name = urlsplit(uri), uri.rpartition("/")[2][-64:]
        key = unquote(parts.path).removeprefix("/")
        mine = (parts.scheme, parts.netloc) == ("s3", self.bucket) and key == self.prefix + name
        if not mine or not DIGEST.fullmatch(name):
            raise NotInStore(f"{uri} is not in the store s3://{self.bucket}/{self.prefix}")
        try:
            with self.client.get_object(Bucket=self.bucket, Key=key)["Body"] as body:
                content: bytes = body.read(most + 1)
                return content
        except self.client.exceptions.NoSuchKey:
            raise NotInStore(f"{uri} is gone") from None

    def list(self) -> Iterator[KeptValue]:
        """Yield what is kept.  Raises NotInStore if there is no such bucket, or this credential may not list it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix)
        try:
            for page in pages:
                for row in page.get("Contents", ()):
                    if DIGEST.fullmatch(name := row["Key"].removeprefix(self.prefix)):
                        yield KeptValue(name, row["LastModified"].timestamp())
        except self.client.exceptions.ClientError as refusal:
            raise NotInStore(f"s3://{self.bucket}/{self.prefix} cannot be listed: {refusal}") from None

    def delete(self, name: str, unless_since: float) -> bool:
        """Delete what is kept under a name, unless it was kept anew since a time."""
        try:
            head = self.client.head_object(Bucket=self.bucket, Key=self.prefix + name)
        except self.client.exceptions.ClientError:
            return False
        if head["LastModified"].timestamp() > unless_since:
            return False
        self.client.delete_object(Bucket=self.bucket, Key=self.prefix + name)
        return True


def make_client() -> Any:
    """Return a client of S3 for the environment's credentials and AWS_ENDPOINT_URL."""
    try:
        boto3 = import_module("boto3")       # which says nothing of its types
    except ImportError:
        raise ImportError("S3Store needs boto3: pip install 'asyncgate[s3]'") from None
    return boto3.client("s3")


def open_store(url: str) -> FolderStore | S3Store:
    """Open the store that a URL names: file:///srv/payloads, or s3://bucket/prefix."""
    parts = urlsplit(url)
    if parts.scheme == "s3" and parts.netloc:
        prefix = parts.path.strip("/")
        return S3Store(parts.netloc, f"{prefix}/" if prefix else "")
    if parts.scheme == "file" and parts.path:
        return FolderStore(unquote(parts.path))
    raise ValueError(f"a store is file:///FOLDER or s3://BUCKET/PREFIX, not {url}")
