"""Prompts that continue an earlier one find the node that answered it."""

from __future__ import annotations

import random
from dataclasses import replace

from inference.generation import GenerateRequest
from mesh.routing import Affinity, InFlight, Mark, choose, facts_of, marks_of
from mesh.routing.affinity import KEPT, MAX_MARKS, MAX_REMEMBERED

TURNS = tuple(
    {"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i} " * 40} for i in range(9)
)


def chat(turns, model="m"):
    return GenerateRequest(model=model, messages=TURNS[:turns])


def test_a_conversation_keeps_its_marks_as_it_grows():
    assert marks_of(chat(5))[:3] == marks_of(chat(3))
    assert marks_of(chat(3))[-1].tokens < marks_of(chat(5))[-1].tokens
    assert marks_of(chat(3)) != marks_of(chat(3, model="n"))


def test_texts_and_token_lists_have_marks_too():
    text = "word " * 2000
    longer = GenerateRequest(model="m", prompt=text + "more")
    shared = set(marks_of(GenerateRequest(model="m", prompt=text))) & set(marks_of(longer))
    assert max(m.tokens for m in shared) > 2000
    ids = tuple(range(5000))
    marks = marks_of(GenerateRequest(model="m", prompt_tokens=ids))
    assert marks[-1].tokens == 5000
    huge = marks_of(GenerateRequest(model="m", prompt="x" * 1_000_000))
    assert len(huge) == MAX_MARKS
    assert huge[-1].tokens == 250_000


def test_the_next_turn_goes_back(make_view):
    view = make_view("E", A=[{"active": 1}], B=[{"active": 1}], C=[{}])
    affinity, in_flight = Affinity(), InFlight()
    request = chat(7)
    for seed in range(20):
        cached = affinity.cached(marks_of(request), sorted(view.nodes), 101.0)
        facts = replace(facts_of(request), cached=cached)
        chosen = choose(view, facts, rng=random.Random(seed), in_flight=in_flight)
        assert chosen.peer == "C"
    longer = GenerateRequest(model="m", messages=TURNS, max_tokens=16)
    route = choose(
        make_view("E", A=[{}]), facts_of(request), rng=random.Random(0), in_flight=in_flight
    )
    affinity.remember(marks_of(request), route, 101.0)
    cached = affinity.cached(marks_of(longer), sorted(view.nodes), 102.0)
    assert cached == {"A": marks_of(request)[-1].tokens}
    facts = replace(facts_of(longer), cached=cached)
    assert choose(view, facts, rng=random.Random(0), in_flight=in_flight).peer == "A"
    assert affinity.cached(marks_of(longer), sorted(view.nodes), 102.0 + KEPT) == {}


def test_memory_is_bounded(make_view):
    affinity = Affinity()
    route = choose(
        make_view("E", A=[{}]), facts_of(chat(1)), rng=random.Random(0), in_flight=InFlight()
    )
    for i in range(MAX_REMEMBERED + 500):
        affinity.remember([Mark(str(i).encode(), 1)], route, 1.0)
    assert affinity.cached([Mark(b"0", 1)], ["A"], 1.0) == {}
    assert affinity.cached([Mark(str(MAX_REMEMBERED + 499).encode(), 1)], ["A"], 1.0) == {"A": 1}


def test_resumed_tokens_are_prefilled_and_no_longer_owed():
    request = chat(3).model_copy(update={"max_tokens": 100, "resume": tuple(range(30))})
    facts = facts_of(request)
    assert facts.prompt_tokens == marks_of(request)[-1].tokens + 30
    assert facts.max_tokens == 70
