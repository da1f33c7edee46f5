"""Whatever is lost, comes late or comes twice: the client gets the response, once."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, TokenEvent
from mesh.forward.recovery import Recovery, SignedCut, Worker
from mesh.receipts import Part, Segment, SignedReceipt


def worker(index: int) -> Worker:
    peer = "12D3KooW" + "ABCDEFGH"[index] * 44
    return Worker(peer, (Part(peer=peer, serial=None, stage=(0, 9), tokens=(0, 0)),))


@dataclass(frozen=True)
class Truth:
    """What an unbroken run gives. Some engines end with the last token, some in an event more."""

    tokens: tuple[tuple[int, str], ...]
    rest: str  # text held back until the end
    reason: str

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.tokens) + self.rest

    def events(self, resume: int, end_apart: bool) -> list[tuple[int, TokenEvent]]:
        finish = Finish(
            reason=self.reason,  # type: ignore[arg-type]
            prompt_tokens=3,
            completion_tokens=len(self.tokens),
        )
        events = [
            (i, TokenEvent(token_id=token_id, text=text))
            for i, (token_id, text) in enumerate(self.tokens)
        ][resume:]
        if end_apart or not events:
            last = TokenEvent(token_id=None, text=self.rest, finish=finish)
            return [*events, (len(self.tokens), last)]
        position, event = events[-1]
        whole = event.model_copy(update={"text": event.text + self.rest, "finish": finish})
        return [*events[:-1], (position, whole)]


truths = st.builds(
    Truth,
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "é", "xyz"])),
        min_size=1,
        max_size=12,
    ).map(tuple),
    st.sampled_from(["", "<", "end"]),
    st.sampled_from(["stop", "length"]),
)


def signed_cut(who: Worker, recovery: Recovery, first: int) -> SignedCut:
    tokens = (first, len(recovery.token_ids))
    part = who.parts[0].model_copy(update={"serial": "0" * 40, "tokens": tokens})
    return SignedCut(
        SignedReceipt(f"{who.node} {tokens}".encode(), bytes(64), (b"c",)),
        Segment(node=who.node, tokens=tokens, evidence="signer", parts=(part,)),
        len(recovery.text.encode()),
    )


@given(truths, st.booleans(), st.data())
def test_random_losses_late_and_doubled_events(
    truth: Truth, bounded: bool, data: st.DataObject
) -> None:
    """``bounded``: max_tokens is exactly reached, so that only the end can be missing."""
    count = len(truth.tokens)
    request = GenerateRequest(
        model="m", prompt="p", max_tokens=count if bounded else None, stop=("<",)
    )
    recovery = Recovery(request, max_attempts=8)
    got: list[TokenEvent] = []
    old: list[tuple[int, int, TokenEvent]] = []  # what may still come late
    while recovery.state != "done":
        continuation = recovery.begin()
        epoch = continuation.epoch
        resume = len(continuation.request.resume)
        assert continuation.request.resume == tuple(t for t, _ in truth.tokens[:resume])
        assert continuation.text == "".join(text for _, text in truth.tokens[:resume])
        covered = 0
        for segment in continuation.segments:
            assert segment.tokens[0] == covered
            covered = segment.tokens[1]
        assert covered == resume
        pending = truth.events(resume, data.draw(st.booleans(), "end apart"))
        done: list[tuple[int, TokenEvent]] = []
        while recovery.state == "running":
            kinds = ["next"] * 4
            if epoch < 8:
                kinds.append("loss")
            if old:
                kinds.append("late")
            if done:
                kinds.append("again")
            match data.draw(st.sampled_from(kinds)):
                case "next":
                    position, event = pending.pop(0)
                    done.append((position, event))
                    fresh = recovery.event(epoch, position, event)
                    if fresh is not None:
                        got.append(fresh)
                case "again":
                    again = data.draw(st.sampled_from(done))
                    assert recovery.event(epoch, *again) is None
                case "late":
                    assert recovery.event(*data.draw(st.sampled_from(old))) is None
                case "loss":
                    who = worker(epoch - 1)
                    cut = (
                        signed_cut(who, recovery, resume)
                        if data.draw(st.booleans(), "lived to sign")
                        else None
                    )
                    error = GenerationError("node_lost", "gone")
                    assert recovery.lost(epoch, who, error, cut) is None
        old += [(epoch, position, event) for position, event in (*done, *pending)]
    assert [event.token_id for event in got if event.token_id is not None] == [
        token_id for token_id, _ in truth.tokens
    ]
    assert "".join(event.text for event in got) == truth.text == recovery.text
    assert [event.finish is not None for event in got] == [False] * (len(got) - 1) + [True]
    assert got[-1].finish is not None
    assert got[-1].finish.completion_tokens == count
    assert len(recovery.receipts) == sum(s.evidence == "receipt" for s in recovery.segments)
    for late in old:
        assert recovery.event(*late) is None
