"""The decisions of a response that loses nodes, one at a time."""

from __future__ import annotations

import hashlib

import pytest

from inference.errors import GenerationError
from inference.generation import Finish, GenerateRequest, TokenEvent
from mesh.forward.recovery import Recovery, SignedCut, Worker
from mesh.receipts import Part, Segment, SignedReceipt

FINISH = Finish(reason="stop", prompt_tokens=5, completion_tokens=4)
LOST = GenerationError("node_lost", "gone")


def peer(name: str) -> str:
    return "12D3KooW" + name.ljust(44, "1")


def worker(name: str) -> Worker:
    return Worker(peer(name), (Part(peer=peer(name), serial=None, stage=(0, 30), tokens=(0, 0)),))


A, B, C = worker("A"), worker("B"), worker("C")


def token(token_id: int, text: str = "", finish: Finish | None = None) -> TokenEvent:
    return TokenEvent(token_id=token_id, text=text, finish=finish)


def signed(who: Worker, tokens: tuple[int, int], text: str) -> SignedCut:
    part = who.parts[0].model_copy(update={"serial": "0" * 40, "tokens": tokens})
    segment = Segment(node=who.node, tokens=tokens, evidence="signer", parts=(part,))
    receipt = SignedReceipt(b"receipt of " + who.node.encode(), bytes(64), (b"c",))
    return SignedCut(receipt, segment, len(text.encode()))


def recovery(**request: object) -> Recovery:
    return Recovery(GenerateRequest(model="m", prompt="p", **request))  # type: ignore[arg-type]


def test_an_unbroken_response_passes_through() -> None:
    machine = recovery()
    first = machine.begin()
    assert (first.request.resume, first.text, first.segments, first.avoid) == ((), "", (), set())
    events = [token(1, "a"), token(2), token(3, "bc", FINISH)]
    assert [machine.event(1, i, event) for i, event in enumerate(events)] == events
    assert (machine.state, machine.token_ids, machine.text) == ("done", [1, 2, 3], "abc")
    assert machine.segments == ()


def test_the_next_attempt_gets_what_is_out_and_owes_the_rest() -> None:
    machine = recovery()
    machine.begin()
    machine.event(1, 0, token(1, "Grü"))
    machine.event(1, 1, token(2))
    assert machine.lost(1, A, LOST) is None
    second = machine.begin()
    assert second.request.resume == (1, 2)
    assert second.text == "Grü"
    assert second.avoid == {A.node}
    (segment,) = second.segments
    assert (segment.node, segment.tokens, segment.evidence) == (A.node, (0, 2), "lost")
    assert segment.parts[0].tokens == (0, 2)
    end = token(3, "ße", FINISH)
    assert machine.event(2, 2, end) == end
    assert machine.text == "Grüße"


def test_late_events_of_an_attempt_that_was_given_up_are_dropped() -> None:
    machine = recovery()
    machine.begin()
    machine.event(1, 0, token(1, "a"))
    machine.lost(1, A, LOST)
    assert machine.event(1, 1, token(9, "late")) is None
    machine.begin()
    assert machine.event(1, 1, token(9, "late", FINISH)) is None
    assert machine.lost(1, A, LOST) is None and machine.state == "running"
    assert machine.event(2, 1, token(2, "b", FINISH)) is not None
    assert machine.event(2, 1, token(2, "b", FINISH)) is None
    assert machine.text == "ab"


def test_an_event_that_comes_again_is_dropped_and_a_gap_is_an_error() -> None:
    machine = recovery()
    machine.begin()
    for i in (1, 2):
        machine.event(1, i - 1, token(i, "x"))
    assert machine.event(1, 0, token(1, "x")) is None
    assert machine.token_ids == [1, 2]
    with pytest.raises(GenerationError, match="token 2 is missing"):
        machine.event(1, 3, token(4))
    with pytest.raises(GenerationError, match="was another one"):
        machine.event(1, 1, token(7))


def test_when_only_the_end_is_missing_the_last_token_is_made_again() -> None:
    machine = recovery(max_tokens=3)
    machine.begin()
    for i in range(3):
        machine.event(1, i, token(i, "x"))
    assert machine.lost(1, A, LOST) is None
    second = machine.begin()
    assert second.request.resume == (0, 1)
    assert second.text == "xx"
    assert [s.tokens for s in second.segments] == [(0, 2)]
    # The new node ends with text that was held back.
    length = FINISH.model_copy(update={"reason": "length"})
    assert machine.event(2, 2, token(2, "x<", length)) == TokenEvent(
        token_id=None, text="<", finish=length
    )
    assert (machine.text, machine.token_ids) == ("xxx<", [0, 1, 2])


def test_one_token_and_its_end_lost() -> None:
    machine = recovery(max_tokens=1)
    machine.begin()
    machine.event(1, 0, token(5, "y"))
    machine.lost(1, A, LOST, signed(A, (0, 1), "y"))
    second = machine.begin()
    assert (second.request.resume, second.segments, machine.receipts) == ((), (), ())


def test_more_tokens_than_allowed_are_refused() -> None:
    machine = recovery(max_tokens=1)
    machine.begin()
    machine.event(1, 0, token(5))
    with pytest.raises(GenerationError, match="more tokens"):
        machine.event(1, 1, token(6))


def test_an_end_before_all_tokens_is_refused() -> None:
    machine = recovery()
    machine.begin()
    machine.event(1, 0, token(1, "a"))
    machine.event(1, 1, token(2, "b"))
    with pytest.raises(GenerationError, match="before all tokens"):
        machine.event(1, 1, TokenEvent(token_id=None, finish=FINISH))
    with pytest.raises(GenerationError, match="before all tokens"):
        machine.event(1, 0, token(1, "a", FINISH))
    with pytest.raises(GenerationError, match="without a token"):
        machine.event(1, 2, TokenEvent(token_id=None))


def test_a_node_that_lived_to_sign_has_its_receipt_on_record() -> None:
    machine = recovery()
    machine.begin()
    machine.event(1, 0, token(1, "é"))
    cut = signed(A, (0, 1), "é")
    machine.lost(1, A, LOST, cut)
    (segment,) = machine.begin().segments
    assert segment.evidence == "receipt"
    assert segment.receipt == hashlib.sha256(cut.receipt.receipt).digest()
    assert machine.receipts == (cut.receipt,)


@pytest.mark.parametrize(
    "cut",
    [signed(A, (0, 2), "é"), signed(B, (0, 1), "é"), signed(A, (0, 1), "e")],
    ids=["other tokens", "another node", "other text"],
)
def test_a_receipt_for_something_else_counts_as_none(cut: SignedCut) -> None:
    machine = recovery()
    machine.begin()
    machine.event(1, 0, token(1, "é"))
    machine.lost(1, A, LOST, cut)
    (segment,) = machine.begin().segments
    assert segment.evidence == "lost" and machine.receipts == ()


def test_a_node_that_made_nothing_leaves_no_segment() -> None:
    machine = recovery()
    machine.begin()
    machine.lost(1, A, LOST)
    second = machine.begin()
    assert second.segments == () and second.avoid == {A.node}


def test_what_is_the_requests_own_fault_is_not_tried_again() -> None:
    for code in ("context_length_exceeded", "invalid_value", "unsupported_parameter"):
        machine = recovery()
        machine.begin()
        error = GenerationError(code, "no", param="stop")  # type: ignore[arg-type]
        assert machine.lost(1, A, error) is error
        assert machine.state == "done"


@pytest.mark.parametrize("code", ["overloaded", "model_not_found", "engine_failed", "node_lost"])
def test_a_refusal_is_tried_elsewhere_and_reported_when_there_is_no_elsewhere(code: str) -> None:
    machine = recovery()
    machine.begin()
    error = GenerationError(code, "no", retry_after=3.0)  # type: ignore[arg-type]
    assert machine.lost(1, A, error) is None
    assert machine.begin().avoid == {A.node}
    nobody = GenerationError("model_not_found", "nobody has it")
    assert machine.no_route(2, nobody) is error


def test_nobody_to_begin_with() -> None:
    machine = recovery()
    machine.begin()
    nobody = GenerationError("model_not_found", "nobody has it")
    assert machine.no_route(1, nobody) is nobody


def test_a_response_that_broke_off_says_so() -> None:
    machine = recovery()
    machine.begin()
    machine.event(1, 0, token(1))
    # Too small a context there is that node's fault: the first one took the request.
    assert machine.lost(1, A, LOST) is None
    machine.begin()
    assert machine.lost(2, B, GenerationError("context_length_exceeded", "too long")) is None
    machine.begin()
    error = machine.no_route(3, GenerationError("overloaded", "full", retry_after=2.0))
    assert error.code == "node_lost" and "after 1 tokens" in error.message


def test_attempts_are_bounded() -> None:
    machine = recovery()
    for epoch in range(1, machine.max_attempts):
        machine.begin()
        machine.event(epoch, epoch - 1, token(epoch))
        assert machine.lost(epoch, worker("abcdefgh"[epoch]), LOST) is None
    machine.begin()
    error = machine.lost(machine.max_attempts, C, LOST)
    assert error is not None and error.code == "node_lost" and machine.state == "done"


def test_the_machine_fills_resume_itself() -> None:
    with pytest.raises(ValueError, match="from its beginning"):
        recovery(resume=(1,))
    machine = recovery()
    with pytest.raises(ValueError, match="choosing"):
        machine.begin()
        machine.begin()
