"""Weights from peers over real links: exact, resumed, and never from one that sends the wrong."""

from __future__ import annotations

import random
import shutil
import time
from contextlib import AsyncExitStack

import pytest
import trio

from inference.store.errors import StoreError
from inference.store.manifest import ModelFile, ModelManifest, digest_of, write_manifest
from inference.store.store import ModelStore, describe
from mesh.identity import TrustStore
from mesh.models.fetching import PeerFetch
from mesh.models.offer import CHUNK, CHUNK_KIND, OFFER_KIND
from mesh.models.serving import ModelServer
from mesh.models.shelf import Shelf
from mesh.transport import Message, Transport, TransportConfig

LAYERS = 4
SIZES = {
    "openvino_model.xml": 3000,
    "openvino_model.bin": 5 * CHUNK + 77,
    "openvino_tokenizer.xml": 100,
    "openvino_tokenizer.bin": CHUNK,
    "openvino_detokenizer.bin": CHUNK + 9,
    ".stages/1-3/openvino_model.xml": 2000,
    ".stages/1-3/openvino_model.bin": 3 * CHUNK + 1,
}

GRAPH = b'<net name="m" version="11"><layers /></net>'


def put_model(root, seed=1, name="made-up"):
    """A model in a store, as far as its files matter here."""
    rng = random.Random(seed)
    folder = root / name
    for path, size in SIZES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(GRAPH.ljust(size) if "xml" in path else rng.randbytes(size))
    files: tuple[ModelFile, ...] = tuple(
        describe(folder, path) for path in SIZES if not path.startswith(".")
    )
    manifest = ModelManifest(
        name=name,
        digest=digest_of(files),
        architecture="llama",
        layers=LAYERS,
        context_length=64,
        hidden_size=8,
        vocabulary_size=16,
        kv_elements=16,
        eos_token_ids=(2,),
        chat_template=None,
        files=files,
        path=folder,
    )
    write_manifest(manifest)
    return manifest


class Mesh:
    """One node that fetches and some that give, each with a store of its own."""

    def __init__(self, tmp_path, authority, stack):
        self.folder, self.authority, self.stack = tmp_path, authority, stack
        self.shelves = {}

    async def node(self, name):
        authority = self.authority
        transport = await self.stack.enter_async_context(
            Transport.open(
                TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",)),
                authority.identity(name),
                TrustStore(authority.network, [authority.root], self.folder / f"{name}-crl"),
            )
        )
        self.shelves[name] = Shelf(ModelStore(self.folder / name))
        return transport

    async def giver(self, name, seed=1):
        put_model(self.folder / name, seed)
        transport = await self.node(name)
        ModelServer(self.shelves[name]).serve(transport)
        return transport


def run(tmp_path, authority, main):
    async def outer():
        with trio.fail_after(60):
            async with AsyncExitStack() as stack:
                await main(Mesh(tmp_path, authority, stack))

    trio.run(outer)


@pytest.fixture
def authority(make_authority):
    return make_authority("testnet", time.time() - 86_400)


async def links(transport, *givers):
    return [await transport.connect(giver.addresses[0]) for giver in givers]


def same(folder, other, *paths):
    return all((folder / path).read_bytes() == (other / path).read_bytes() for path in paths)


def test_a_stage_comes_with_what_belongs_to_it_and_nothing_else(tmp_path, authority):
    async def main(mesh):
        giver, taker = await mesh.giver("giver"), await mesh.node("taker")
        digest = put_model(tmp_path / "giver").digest
        seen, sent = [], []
        fetch = PeerFetch(mesh.shelves["taker"], transferred=lambda *facts: sent.append(facts))
        manifest = await fetch.fetch(
            digest, (1, 3), await links(taker, giver), lambda *s: seen.append(s)
        )
        assert manifest.digest == digest and manifest.layers == LAYERS
        here = {
            str(path.relative_to(manifest.path))
            for path in manifest.path.rglob("*")
            if path.is_file() and not path.name.startswith(".complete")
        }
        stage = {path for path in SIZES if path.startswith(".stages")}
        small = {path for path in SIZES if "tokenizer" in path}
        assert here == stage | small | {"manifest.json"}
        assert same(tmp_path / "giver" / "made-up", manifest.path, *stage, *small)
        assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == sum(s for _, s, _ in sent)
        # It is here now: nobody is asked.
        again = await fetch.fetch(digest, (1, 3), [])
        assert again == manifest
        # And whoever got it can give it on.
        third = await mesh.node("third")
        ModelServer(mesh.shelves["taker"]).serve(taker)
        passed_on = await PeerFetch(mesh.shelves["third"]).fetch(
            digest, (1, 3), await links(third, taker)
        )
        assert same(manifest.path, passed_on.path, *stage)

    run(tmp_path, authority, main)


def test_a_peer_that_sends_other_bytes_is_dropped_and_another_one_asked(tmp_path, authority):
    async def main(mesh):
        bad, good = await mesh.giver("bad"), await mesh.giver("good")
        taker = await mesh.node("taker")
        digest = put_model(tmp_path / "good").digest
        # The offer is made before the bytes change.
        mesh.shelves["bad"].offer(digest, 0, LAYERS)
        path = tmp_path / "bad" / "made-up" / "openvino_model.bin"
        path.write_bytes(bytes(SIZES["openvino_model.bin"]))
        fetched = await PeerFetch(mesh.shelves["taker"]).fetch(
            digest, (0, LAYERS), await links(taker, bad, good)
        )
        assert same(tmp_path / "good" / "made-up", fetched.path, "openvino_model.bin")
        alone = await mesh.node("alone")
        with pytest.raises(StoreError, match="no peer is left"):
            await PeerFetch(mesh.shelves["alone"]).fetch(
                digest, (0, LAYERS), await links(alone, bad)
            )
        assert mesh.shelves["alone"].find(digest, 0, LAYERS) is None

    run(tmp_path, authority, main)


def test_what_most_peers_offer_is_taken_and_another_model_is_refused(tmp_path, authority):
    async def main(mesh):
        digest = put_model(tmp_path / "a").digest
        one, two, liar = await mesh.giver("a"), await mesh.giver("b"), await mesh.node("liar")
        put_model(tmp_path / "liar", seed=2)
        _, other = mesh.shelves["liar"].offer(
            put_model(tmp_path / "liar", seed=2).digest, 0, LAYERS
        )

        async def lie(request):
            return Message(other.body.model_dump(mode="json"), other.payload())

        liar.serve(OFFER_KIND, lie)
        taker = await mesh.node("taker")
        every = await links(taker, liar, one, two)
        fetched = await PeerFetch(mesh.shelves["taker"]).fetch(digest, (0, LAYERS), every)
        assert fetched.digest == digest
        alone = await mesh.node("alone")
        with pytest.raises(StoreError, match="another model"):
            await PeerFetch(mesh.shelves["alone"]).fetch(
                digest, (0, LAYERS), await links(alone, liar)
            )

    run(tmp_path, authority, main)


def test_a_broken_off_fetch_goes_on_where_it_stopped(tmp_path, authority):
    async def main(mesh):
        giver, taker = await mesh.giver("giver"), await mesh.node("taker")
        digest = put_model(tmp_path / "giver").digest
        (link,) = await links(taker, giver)
        fetch = PeerFetch(mesh.shelves["taker"])
        with trio.CancelScope() as scope:
            await fetch.fetch(
                digest, (0, LAYERS), [link], lambda done, _: done > 2 * CHUNK and scope.cancel()
            )
        assert scope.cancelled_caught
        assert mesh.shelves["taker"].find(digest, 0, LAYERS) is None
        seen = []
        await fetch.fetch(digest, (0, LAYERS), [link], lambda *s: seen.append(s))
        assert seen[0][0] > 2 * CHUNK and seen[-1][0] == seen[-1][1]
        assert mesh.shelves["taker"].find(digest, 0, LAYERS) is not None

    run(tmp_path, authority, main)


class Held:
    """A link over which chunks come when they are ``let``."""

    def __init__(self, link):
        self.peer, self.link = link.peer, link
        self.asked, self.let = trio.Event(), trio.Event()

    async def request(self, kind, *arguments, **options):
        if kind == CHUNK_KIND:
            self.asked.set()
            await self.let.wait()
        return await self.link.request(kind, *arguments, **options)


def test_two_ranges_of_one_model_are_fetched_at_once(tmp_path, authority):
    """Both bring the tokenizer, and the one that is done first gives the files their names."""

    async def main(mesh):
        giver, taker = await mesh.giver("giver"), await mesh.node("taker")
        digest = put_model(tmp_path / "giver").digest
        (link,) = await links(taker, giver)
        fetch, slow = PeerFetch(mesh.shelves["taker"]), Held(link)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch.fetch, digest, (1, 3), [slow])
            await slow.asked.wait()
            await fetch.fetch(digest, (0, LAYERS), [link])
            slow.let.set()
        for layers in ((1, 3), (0, LAYERS)):
            here = mesh.shelves["taker"].find(digest, *layers)
            assert here is not None
        assert same(tmp_path / "giver" / "made-up", here.path, *SIZES)
        assert not list(here.path.rglob("*.part"))

    run(tmp_path, authority, main)


def test_a_disk_that_does_not_take_a_chunk_ends_the_fetch(tmp_path, authority):
    async def main(mesh):
        giver, taker = await mesh.giver("giver"), await mesh.node("taker")
        digest = put_model(tmp_path / "giver").digest
        folder = mesh.shelves["taker"].folder(digest)

        def clear(done, total):
            shutil.rmtree(folder)  # once the files are made

        with pytest.raises(StoreError, match="cannot write"):
            await PeerFetch(mesh.shelves["taker"]).fetch(
                digest, (0, LAYERS), await links(taker, giver), clear
            )

    run(tmp_path, authority, main)


def test_only_nodes_that_may_serve_get_weights_and_nonsense_is_answered(tmp_path, authority):
    from ca.naming import Role
    from mesh.transport import RemoteError

    async def main(mesh):
        giver, taker = await mesh.giver("giver"), await mesh.node("taker")
        digest = put_model(tmp_path / "giver").digest
        (link,) = await links(taker, giver)
        whole = {"version": 1, "digest": digest, "first": 0, "last": LAYERS}
        for kind, body, code in (
            (OFFER_KIND, {**whole, "last": 99}, "not_here"),
            (OFFER_KIND, {**whole, "digest": "00" * 32}, "not_here"),
            (OFFER_KIND, {**whole, "digest": "../../etc"}, "malformed"),
            (OFFER_KIND, None, "malformed"),
            (CHUNK_KIND, {**whole, "file": 0, "index": 999}, "malformed"),
            (CHUNK_KIND, {**whole, "file": 70, "index": 0}, "malformed"),
            (CHUNK_KIND, {**whole, "file": -1, "index": 0}, "malformed"),
        ):
            with pytest.raises(RemoteError) as caught:
                await link.request(kind, body)
            assert caught.value.code == code
        guest = await mesh.stack.enter_async_context(
            Transport.open(
                TransportConfig(listen=("/ip4/127.0.0.1/udp/0/quic-v1",)),
                authority.identity("guest", (Role.USE,)),
                TrustStore(authority.network, [authority.root], tmp_path / "guest-crl"),
            )
        )
        (poor,) = await links(guest, giver)
        with pytest.raises(RemoteError) as caught:
            await poor.request(OFFER_KIND, whole)
        assert caught.value.code == "forbidden"

    run(tmp_path, authority, main)


def test_a_peer_that_offers_other_files_under_the_models_name_is_not_believed(tmp_path, authority):
    """It has the manifest, and hashes that fit what it sends: the digest does not."""

    async def main(mesh):
        digest = put_model(tmp_path / "good").digest
        good = await mesh.giver("good")
        for number, path in enumerate(
            ("openvino_tokenizer.bin", "openvino_model.bin", ".stages/1-3/openvino_model.xml")
        ):
            layers = (1, 3) if path.startswith(".") else (0, LAYERS)
            liar = await mesh.giver(f"liar-{number}")
            graph = GRAPH.replace(b"<net", b"<!DOCTYPE net><net")
            lie = graph.ljust(SIZES[path]) if "xml" in path else bytes(SIZES[path])
            (tmp_path / f"liar-{number}" / "made-up" / path).write_bytes(lie)
            alone = await mesh.node(f"alone-{number}")
            with pytest.raises(StoreError, match=r"not the one of the model|document type"):
                await PeerFetch(mesh.shelves[f"alone-{number}"]).fetch(
                    digest, layers, await links(alone, liar)
                )
            assert mesh.shelves[f"alone-{number}"].find(digest, *layers) is None
            taker = await mesh.node(f"taker-{number}")
            fetched = await PeerFetch(mesh.shelves[f"taker-{number}"]).fetch(
                digest, layers, await links(taker, liar, good)
            )
            assert same(tmp_path / "good" / "made-up", fetched.path, path)

    run(tmp_path, authority, main)


def test_an_offer_of_layers_that_were_removed_is_not_made_again(tmp_path):
    manifest = put_model(tmp_path)
    shelf = Shelf(ModelStore(tmp_path))
    shelf.offer(manifest.digest, 1, 3)
    assert shelf.made(manifest.digest, 1, 3) is not None
    shutil.rmtree(manifest.path / ".stages")
    assert shelf.made(manifest.digest, 1, 3) is None
    with pytest.raises(StoreError):  # they would be cut again, if this were a real model
        shelf.offer(manifest.digest, 1, 3)


def test_a_lie_about_a_file_that_is_here_costs_the_layers_that_share_it_nothing(
    tmp_path, authority
):
    async def main(mesh):
        digest = put_model(tmp_path / "good").digest
        good, liar = await mesh.giver("good"), await mesh.giver("liar")
        path = "openvino_detokenizer.bin"
        (tmp_path / "liar" / "made-up" / path).write_bytes(bytes(SIZES[path]))
        taker = await mesh.node("taker")
        fetch = PeerFetch(mesh.shelves["taker"])
        here = await fetch.fetch(digest, (1, 3), await links(taker, good))
        with pytest.raises(StoreError, match="not the one of the model"):
            await fetch.fetch(digest, (0, LAYERS), await links(taker, liar))
        assert same(tmp_path / "good" / "made-up", here.path, path)
        whole = await fetch.fetch(digest, (0, LAYERS), await links(taker, liar, good))
        assert same(tmp_path / "good" / "made-up", whole.path, *SIZES)

    run(tmp_path, authority, main)
