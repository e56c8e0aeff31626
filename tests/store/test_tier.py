"""The shared tier on an object server, a folder and memory: stored objects are read back, changed ones are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cacheblend_store import BadBlob, ChunkManifest, StoreError, StoreFormat, StorePermission, TierError, TierUsage
from cacheblend_store.tier import open_tier
from cacheblend_store.tier.layout import ObjectLayout
from cacheblend_store.tier.objects import Tier, check_url
from object_server import ObjectServer, object_server
from small_chunks import make_chunk

SECRET = b"a secret of more than sixteen bytes\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with object_server(tmp_path_factory.mktemp("objects")) as running:
        yield running


@pytest.fixture(params=["s3", "file", "memory", "s3 with a key", "file with a key"])
def tier(request: pytest.FixtureRequest, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
    kind, _, keyed = request.param.partition(" ")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    key_file = tmp_path / "key"
    key_file.write_bytes(SECRET)
    unique = tmp_path.name.replace("[", "").replace("]", "")
    url = {"s3": f"s3://kv-test/{unique}", "file": f"file://{tmp_path}/tier", "memory": f"memory:///{unique}"}[kind]
    return open_tier(url, key_file if keyed else None)


def chunk(number: int = 0) -> tuple[ChunkManifest, list[bytes]]:
    manifest, blobs = make_chunk(number)
    return manifest, list(blobs)


@pytest.mark.parametrize("number", [0, 6], ids=["KV", "KV and a state"])
def test_what_is_put_is_read_whole_and_by_layers(tier: Tier, number: int) -> None:
    tier.check()
    manifest, blobs = chunk(number)
    assert tier.size(tier.name(manifest.collection, manifest.key)) is None
    size = tier.put_chunk(manifest, blobs)
    assert tier.size(tier.name(manifest.collection, manifest.key)) == size
    layout = tier.layout(manifest, size)
    [found] = tier.chunks()
    assert (found.name, found.size) == (tier.name(manifest.collection, manifest.key), size)
    taken, taken_blobs = tier.get_chunk(found.name, found.size)
    assert (taken.token_ids, taken_blobs) == (manifest.token_ids, blobs)
    name = tier.name(manifest.collection, manifest.key)
    head = tier.head(name, tier.read(name, 0, layout.head_bytes))
    last = range(manifest.num_blobs - 1, manifest.num_blobs)
    end = layout.span(last)[1]
    start = layout.layer(last.start).start
    assert head.layer(last.start, tier.read(name, start, end)) == blobs[-1]
    tier.delete([found.name])
    assert tier.size(tier.name(manifest.collection, manifest.key)) is None


def test_every_byte_of_an_object_is_checked(tmp_path: Path) -> None:
    for key in (None, tmp_path / "key"):
        (tmp_path / "key").write_bytes(SECRET)
        folder = tmp_path / f"tier{key is None}"
        tier = open_tier(f"file://{folder}", key)
        manifest, blobs = chunk()
        size = tier.put_chunk(manifest, blobs)
        name = tier.name(manifest.collection, manifest.key)
        whole = (folder / name).read_bytes()
        for at in range(0, size, 7):
            (folder / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(BadBlob):
                tier.get_chunk(name, size)
        for cut in (0, 1, 31, 32, 33, size // 2, size - 1):
            (folder / name).write_bytes(whole[:cut])
            with pytest.raises(StoreError):
                tier.get_chunk(name, cut)
            with pytest.raises(StoreError):
                tier.get_chunk(name, size)


def test_an_object_under_another_name_is_refused(tmp_path: Path) -> None:
    tier = open_tier(f"file://{tmp_path}/tier")
    (one, blobs), (other, _) = chunk(0), chunk(1)
    size = tier.put_chunk(one, blobs)
    (tmp_path / "tier" / tier.name(one.collection, one.key)).rename(
        tmp_path / "tier" / tier.name(other.collection, other.key)
    )
    with pytest.raises(BadBlob):
        tier.head(tier.name(other.collection, other.key), tier.read(tier.name(other.collection, other.key), 0, size))


def test_names_and_contents_are_hidden_with_a_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(SECRET)
    tier = open_tier(f"file://{tmp_path}/tier", tmp_path / "key")
    manifest, blobs = chunk()
    tier.put_chunk(manifest, blobs)
    for file in (tmp_path / "tier").rglob("*"):
        assert manifest.id not in str(file)
        assert manifest.collection not in str(file)
        if file.is_file():
            data = file.read_bytes()
            assert manifest.text.encode() not in data
            assert blobs[0][128:160] not in data


@pytest.mark.parametrize("size", [0, 31, 1 << 40])
def test_sizes_are_bounded_before_anything_is_read(size: int) -> None:
    with pytest.raises(BadBlob):
        ObjectLayout.of(chunk()[0], size, encrypted=False)


def test_requests_take_groups_of_layers_of_large_chunks() -> None:
    one = ObjectLayout(1000, tuple(range(0, 25 * (3 << 20), 3 << 20)))
    assert [len(group) for group in one.groups()] == [2] * 12
    assert one.span(range(0, 2)) == (0, 1000 + (6 << 20))
    assert one.span(range(22, 24))[1] == one.size
    assert ObjectLayout(1000, tuple(range(0, 7 << 20, 1 << 20))).groups() == [range(6)]
    uneven = ObjectLayout(1000, (0, 3 << 20, 6 << 20, 16 << 20, 17 << 20))
    assert uneven.groups() == [range(2), range(2, 3), range(3, 4)]
    assert uneven.layer(2) == slice(1000 + (6 << 20), 1000 + (16 << 20))


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "kv", "http://host/x", "", "s3://id:secret@bucket/x", "az://a/c?sig=secret"]
)
def test_a_url_that_is_not_a_tiers_is_an_error_without_what_is_secret(url: str) -> None:
    with pytest.raises(TierUsage) as caught:
        check_url(url)
    assert "secret" not in caught.value.message
    assert caught.value.exit_code == 2


def test_what_is_wrong_with_a_bucket_has_an_exit_code(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TierError) as missing:
        open_tier("s3://nothing/here").check()
    assert missing.value.exit_code == 3
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StorePermission) as refused:
        open_tier("s3://kv-test/here").check()
    assert (refused.value.exit_code, "wrong" in refused.value.message) == (4, False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(TierError) as gone:
        open_tier("s3://kv-test/here").check()
    assert gone.value.exit_code == 4


def test_a_tier_of_another_format_or_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(SECRET)
    (tmp_path / "other").write_bytes(b"another secret of enough bytes")
    url = f"file://{tmp_path}/tier"
    open_tier(url, tmp_path / "key").put_chunk(*chunk())
    open_tier(url, tmp_path / "key").check()
    for key in (None, tmp_path / "other"):
        with pytest.raises(TierUsage):
            open_tier(url, key).check()
    marker = tmp_path / "tier" / "cacheblend-tier.json"
    marker.write_text(json.dumps({"version": 7, "key": None}))
    with pytest.raises(StoreFormat):
        open_tier(url).check()
    marker.write_text("something else")
    with pytest.raises(StoreFormat):
        open_tier(url).check()


@pytest.mark.parametrize("kind", ["FIFO", "device", "link"])
def test_an_object_that_is_not_a_regular_file_is_missing(tmp_path: Path, kind: str) -> None:
    """Reading a FIFO would wait for ever, a device never ends, and a link leads elsewhere."""
    tier = open_tier(f"file://{tmp_path}/tier")
    manifest, blobs = chunk()
    size = tier.put_chunk(manifest, blobs)
    name = tier.name(manifest.collection, manifest.key)
    file = tmp_path / "tier" / name
    file.rename(tmp_path / "real")
    if kind == "FIFO":
        os.mkfifo(file)
    else:
        file.symlink_to(tmp_path / "real" if kind == "link" else "/dev/zero")
    assert tier.size(name) is None
    with pytest.raises(BadBlob, match="not a regular file"):
        tier.get_chunk(name, size)
    tier.put_chunk(manifest, blobs)  # replaces it
    assert tier.get_chunk(name, size)[1] == blobs
    marker = tmp_path / "tier" / "cacheblend-tier.json"
    marker.unlink()
    os.mkfifo(marker)
    with pytest.raises(StoreFormat, match="not a regular file"):
        open_tier(f"file://{tmp_path}/tier").check()


def test_a_key_that_is_too_short_or_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"short")
    for name in ("short", "missing"):
        with pytest.raises(TierUsage):
            open_tier(f"file://{tmp_path}/tier", tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir(mode=0o500)
    with pytest.raises(StorePermission):
        open_tier(f"file://{tmp_path}/tier").put_chunk(*chunk())
