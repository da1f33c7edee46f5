"""What was published is there after a restart; files that are broken harm nothing."""

from __future__ import annotations

import pytest

from mesh.config import parse_size
from mesh.gossip.advert import MAX_WANTS, Wanted
from mesh.wants import OwnWants

NOW = 1_800_000_000.0


def wanted(name="m", **changes):
    fields = {
        "name": name,
        "digest": "ab" * 32,
        "version": 1,
        "publisher": "P",
        "layers": 4,
        "layer_bytes": 10,
        "embedding_bytes": 1,
        "head_bytes": 1,
        "shared_bytes": 0,
        "kv_bytes": 1,
        "hidden": 8,
        "context_length": 64,
    }
    return Wanted(**{**fields, **changes})


def test_they_are_kept(tmp_path):
    path = tmp_path / "wants.json"
    own = OwnWants(path, NOW)
    own.put(wanted())
    own.put(wanted("n", replicas=2))
    own.put(wanted(version=2, replicas=0))
    assert [(w.name, w.version) for w in OwnWants(path, NOW)] == [("m", 2), ("n", 1)]
    for broken in ("", "[", "[{}]", '{"a": 1}', "7"):
        path.write_text(broken)
        assert list(OwnWants(path, NOW)) == []


def test_what_a_wrong_clock_has_dated_is_dated_anew(tmp_path):
    OwnWants(tmp_path / "wants.json", NOW).put(wanted(version=int(2 * NOW * 1000)))
    again = OwnWants(tmp_path / "wants.json", NOW)
    assert [w.version for w in again] == [NOW * 1000]


def test_there_is_room_for_some_and_withdrawn_ones_make_room(tmp_path):
    own = OwnWants(tmp_path / "wants.json", NOW)
    for number in range(MAX_WANTS):
        own.put(wanted(f"m{number}"))
    with pytest.raises(ValueError, match="not more"):
        own.put(wanted("one-more"))
    own.put(wanted("m3", version=2, replicas=0))
    own.put(wanted("one-more"))
    assert "m3" not in {w.name for w in own}


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("512MiB", 512 << 20), ("1.5G", 1_500_000_000), ("0", 0), ("7 kb", 7000)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1TB", "1e9", "nan", "8 G B"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)
