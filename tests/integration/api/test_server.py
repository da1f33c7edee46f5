"""The server around the application: clients that leave or stall, addresses, the end."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, ResponseReceived, StreamEnded
from h2.settings import SettingCodes

from inference.generation import GenerateRequest, TokenEvent
from mesh.api import AnswerEvent, BindError, Started, create_app, open_listeners, serve

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def raw_post(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data)
    )


def post_over_http2(client: H2Connection, stream_id: int, body: dict[str, Any]) -> None:
    headers = [
        (":method", "POST"),
        (":path", "/v1/chat/completions"),
        (":scheme", "http"),
        (":authority", "localhost"),
        ("content-type", "application/json"),
    ]
    client.send_headers(stream_id, headers)
    client.send_data(stream_id, json.dumps(body).encode(), end_stream=True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_stops_the_work(serving: Any, node: Any, stream: bool, n: int) -> None:
    node.script = node.say_for_ever()

    async def main() -> None:
        async with serving(node) as server:
            client = await trio.open_tcp_stream("127.0.0.1", server.port)
            await client.send_all(raw_post({**CHAT, "stream": stream, "n": n}))
            await node.until(running=n)
            if stream:
                assert (await client.receive_some()).startswith(b"HTTP/1.1 200")
            await client.aclose()
            await node.until(running=0)

    trio.run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token(serving: Any, node: Any, stream: bool) -> None:
    async def script(request: GenerateRequest, _: str) -> AsyncGenerator[AnswerEvent, None]:
        yield Started(node.peer)
        await trio.sleep_forever()

    node.script = script

    async def main() -> None:
        async with serving(node) as server:
            client = await trio.open_tcp_stream("127.0.0.1", server.port)
            await client.send_all(raw_post({**CHAT, "stream": stream}))
            await node.until(running=1)
            await client.aclose()
            await node.until(running=0)

    trio.run(main)


def test_resetting_an_http2_stream_stops_its_work_only(serving: Any, node: Any) -> None:
    node.script = node.say_for_ever()

    async def main() -> None:
        client = H2Connection()
        client.initiate_connection()
        for stream_id in (1, 3):
            post_over_http2(client, stream_id, CHAT)
        async with serving(node) as server:
            socket = await trio.open_tcp_stream("127.0.0.1", server.port)
            await socket.send_all(client.data_to_send())
            await node.until(running=2)
            client.reset_stream(1, ErrorCodes.CANCEL)
            await socket.send_all(client.data_to_send())
            await node.until(running=1)
            await socket.aclose()
            await node.until(running=0)

    trio.run(main)


def test_an_http2_stream_that_takes_nothing_is_given_up_alone(
    serving: Any, node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mesh.api.connection.STALL_SECONDS", 1.0)
    node.script = node.say_for_ever("x" * 1000, pause=0.001)

    async def main() -> None:
        client = H2Connection()
        client.initiate_connection()
        client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        for stream_id in (1, 3):
            post_over_http2(client, stream_id, {**CHAT, "stream": True})
        async with serving(node) as server, trio.open_nursery() as nursery:
            socket = await trio.open_tcp_stream("127.0.0.1", server.port)
            taken = 0

            async def take_the_second() -> None:
                nonlocal taken
                client.increment_flow_control_window(60_000, 3)
                while True:
                    await socket.send_all(client.data_to_send())
                    for event in client.receive_data(bytes(await socket.receive_some())):
                        if isinstance(event, DataReceived):
                            taken += len(event.data)
                            size = event.flow_controlled_length
                            client.acknowledge_received_data(size, event.stream_id)

            nursery.start_soon(take_the_second)
            await node.until(running=2)
            await node.until(running=1)
            seen = taken
            with trio.fail_after(10):
                while taken < seen + 50_000:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            # Of what the first one made, only a little has waited here for its reader.
            assert node.pulled * 1000 < taken + 200_000
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert not caplog.records


def test_a_slow_reader_slows_its_generation(serving: Any, node: Any) -> None:
    node.script = node.say_for_ever("x" * 8000, pause=0)

    async def main() -> None:
        async with serving(node) as server:
            client = await trio.open_tcp_stream("127.0.0.1", server.port)
            await client.send_all(raw_post({**CHAT, "stream": True}))
            # It stands still once the buffers of the kernel are full.
            seen = -1
            with trio.fail_after(60):
                while node.pulled != seen or not seen:
                    seen = node.pulled
                    await trio.sleep(0.5)
            assert node.running == 1
            # Reading moves it on.
            with trio.fail_after(60):
                while node.pulled < seen + 20:
                    await client.receive_some(1 << 20)
            await client.aclose()
            await node.until(running=0)

    trio.run(main)


def test_a_reader_that_stopped_for_good_is_dropped(
    serving: Any, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.api.connection.STALL_SECONDS", 0.5)
    node.script = node.say_for_ever("x" * 60_000, pause=0)

    async def main() -> None:
        async with serving(node) as server:
            client = await trio.open_tcp_stream("127.0.0.1", server.port)
            await client.send_all(raw_post({**CHAT, "stream": True}))
            await node.until(running=1)
            await node.until(running=0, timeout=30)
            await client.aclose()

    trio.run(main)


def test_stopping_lets_answers_finish(serving: Any, node: Any) -> None:
    node.script = node.say("a", "b", "c", pause=0.2)

    async def main() -> None:
        async with serving(node) as server, httpx.AsyncClient(timeout=20) as client:
            url = server.url + "/v1/chat/completions"
            async with client.stream("POST", url, json={**CHAT, "stream": True}) as response:
                server.stop.set()
                text = "".join([part async for part in response.aiter_text()])
            assert text.endswith("data: [DONE]\n\n")
            async with httpx.AsyncClient() as newcomer:
                with pytest.raises(httpx.ConnectError):
                    await newcomer.get(server.url + "/health")

    trio.run(main)


def test_stopping_tells_answers_that_take_too_long(
    serving: Any, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.api.server.GRACE_SECONDS", 0.3)
    node.script = node.say_for_ever()

    async def main() -> None:
        async with serving(node) as server, httpx.AsyncClient(timeout=20) as client:
            url, texts = server.url + "/v1/chat/completions", []

            async def ask(stream: bool) -> None:
                response = await client.post(url, json={**CHAT, "stream": stream})
                texts.append((response.status_code, response.text))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, True)
                nursery.start_soon(ask, False)
                await node.until(running=2)
                server.stop.set()
            assert sorted(status for status, _ in texts) == [200, 503]
            assert all("shutting_down" in text for _, text in texts)
            assert node.running == 0

    trio.run(main)


@pytest.mark.parametrize("cancel", [False, True])
def test_a_stalled_reader_does_not_hold_the_end(
    node: Any, cancel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh.api.server.GRACE_SECONDS", 0.2)
    monkeypatch.setattr("mesh.api.server.FAREWELL_SECONDS", 0.2)
    node.script = node.say_for_ever("x" * 60_000, pause=0)

    async def main() -> None:
        stop = trio.Event()
        listeners = await open_listeners(["127.0.0.1:0"], api_key=None)
        port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(serve, create_app(node), listeners, stop=stop))
            client = await trio.open_tcp_stream("127.0.0.1", port)
            await client.send_all(raw_post({**CHAT, "stream": True}))
            seen = -1
            while node.pulled != seen or not seen:
                seen = node.pulled
                await trio.sleep(0.3)
            started = trio.current_time()
            if cancel:
                nursery.cancel_scope.cancel()
            else:
                stop.set()
        assert trio.current_time() - started < 20
        assert node.running == 0

    trio.run(main)


def test_idle_connections_do_not_hold_the_end(serving: Any, node: Any) -> None:
    async def main() -> None:
        async with serving(node) as server:
            idle = await trio.open_tcp_stream("127.0.0.1", server.port)
            async with httpx.AsyncClient() as client:
                await client.get(server.url + "/health")
                server.stop.set()
                with trio.fail_after(3):
                    assert await idle.receive_some() == b""

    trio.run(main)


async def read_to_end(client: trio.SocketStream, seconds: float) -> bytes:
    with trio.fail_after(seconds):
        return b"".join([part async for part in client])


@pytest.mark.parametrize("stream", [False, True])
def test_a_connection_closes_after_its_answer_when_the_server_stops(
    serving: Any, node: Any, stream: bool
) -> None:
    node.script = node.say("a", "b", pause=0.2)

    async def main() -> None:
        async with serving(node) as server:
            client = await trio.open_tcp_stream("127.0.0.1", server.port)
            await client.send_all(raw_post({**CHAT, "stream": stream}))
            await node.until(running=1)
            server.stop.set()
            assert b"200" in await read_to_end(client, seconds=4)  # well within the grace

    trio.run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_an_idle_connection_closes_after_a_while(
    serving: Any, node: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hypercorn.config.Config.keep_alive_timeout", 0.3)

    async def main() -> None:
        async with serving(node) as server:
            client = await trio.open_tcp_stream("127.0.0.1", server.port)
            await client.send_all(raw_post({**CHAT, "stream": stream}) * 2)
            assert (await read_to_end(client, seconds=10)).count(b"HTTP/1.1 200") == 2

    trio.run(main)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x00" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 200_000 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: h2c\r\nConnection: upgrade, "
        b"http2-settings\r\nHTTP2-Settings: !!!\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_garbage_ends_its_own_connection_only(
    serving: Any, node: Any, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with serving(node) as server:
            stream = await trio.open_tcp_stream("127.0.0.1", server.port)
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(garbage)
                with trio.move_on_after(0.3):
                    async for _ in stream:
                        pass
            await stream.aclose()
            async with httpx.AsyncClient() as client:
                assert (await client.get(server.url + "/health")).status_code == 200

    with caplog.at_level(logging.CRITICAL):
        trio.run(main)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_never_takes_an_answer_over_http2_does_not_keep_the_server(
    serving: Any, node: Any, leaves: bool
) -> None:
    async def main() -> None:
        client = H2Connection()
        client.initiate_connection()
        client.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})  # headers, and no body
        names = (":method", ":path", ":scheme", ":authority")
        values = ("GET", "/health", "http", "localhost")
        client.send_headers(1, list(zip(names, values, strict=True)), end_stream=True)
        with trio.fail_after(10):
            async with serving(node) as server:
                socket = await trio.open_tcp_stream("127.0.0.1", server.port)
                await socket.send_all(client.data_to_send())
                while not any(
                    isinstance(e, ResponseReceived) for e in await receive(socket, client)
                ):
                    pass
                if leaves:
                    await socket.aclose()
                    server.stop.set()

    trio.run(main)


def test_a_failure_of_the_protocol_code_ends_its_own_connection_only(
    serving: Any, node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """hypercorn stumbles over HTTP/2 data that comes after the answer."""
    monkeypatch.setattr("mesh.api.app.DRAIN_SECONDS", 0.05)

    async def main() -> None:
        client = H2Connection()
        client.initiate_connection()
        names = (":method", ":path", ":scheme", ":authority")
        values = ("POST", "/nothing", "http", "localhost")
        client.send_headers(1, list(zip(names, values, strict=True)))
        async with serving(node) as server:
            socket = await trio.open_tcp_stream("127.0.0.1", server.port)
            await socket.send_all(client.data_to_send())
            while not any(isinstance(e, StreamEnded) for e in await receive(socket, client)):
                pass
            client.send_data(1, b"late", end_stream=True)
            await socket.send_all(client.data_to_send())
            await read_to_end(socket, seconds=5)
            async with httpx.AsyncClient() as other:
                assert (await other.get(server.url + "/health")).status_code == 200

    trio.run(main)
    assert "an HTTP connection failed" in caplog.text


async def receive(socket: trio.SocketStream, client: H2Connection) -> list[Any]:
    with trio.fail_after(5):
        return client.receive_data(bytes(await socket.receive_some()))


def test_too_many_connections(serving: Any, node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.api.server.MAX_CONNECTIONS", 2)

    async def main() -> None:
        async with serving(node) as server:
            held = [await trio.open_tcp_stream("127.0.0.1", server.port) for _ in range(2)]
            await trio.testing.wait_all_tasks_blocked(0.1)
            refused = await trio.open_tcp_stream("127.0.0.1", server.port)
            with trio.fail_after(3), contextlib.suppress(trio.BrokenResourceError):
                assert await refused.receive_some() == b""
            for stream in held:
                await stream.aclose()
            await trio.testing.wait_all_tasks_blocked(0.1)
            async with httpx.AsyncClient() as client:
                assert (await client.get(server.url + "/health")).status_code == 200

    trio.run(main)


def bind_error(*binds: str, api_key: str | None = None) -> BindError:
    async def main() -> None:
        listeners = await open_listeners(binds, api_key=api_key)
        for listener in listeners:
            listener.socket.close()

    with pytest.raises(BindError) as caught:
        trio.run(main)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:0"])
def test_beyond_loopback_only_with_a_key(bind: str) -> None:
    assert bind_error(bind).reason in ("key_required", "unusable")  # unusable: no IPv6 here
    assert bind_error("127.0.0.1:0", "0.0.0.0:0").reason == "key_required"

    async def main() -> None:
        for listener in await open_listeners(["0.0.0.0:0"], api_key="a-key-of-some-length"):
            listener.socket.close()

    trio.run(main)


@pytest.mark.parametrize(
    "bind",
    ["", "127.0.0.1", ":80", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "::1:80", "a:-1"],
)
def test_an_address_that_is_none(bind: str) -> None:
    assert bind_error(bind).reason == "malformed"


@pytest.mark.parametrize("key", ["", "  ", "schlüssel", "two\nlines"])
def test_a_key_that_no_header_can_carry(key: str) -> None:
    assert bind_error("127.0.0.1:0", api_key=key).reason == "malformed"


def test_an_address_of_another_machine() -> None:
    assert bind_error("192.0.2.1:0", api_key="a-key-of-some-length").reason == "unusable"


def test_a_taken_port_is_said_in_one_line() -> None:
    async def main() -> None:
        first = await open_listeners(["127.0.0.1:0"], api_key=None)
        port = first[0].socket.getsockname()[1]
        with pytest.raises(BindError, match="port taken") as caught:
            await open_listeners([f"127.0.0.1:{port}"], api_key=None)
        assert caught.value.reason == "port_taken"
        for listener in first:
            listener.socket.close()

    trio.run(main)


def test_a_token_is_sent_before_the_next_one_is_made(serving: Any, node: Any) -> None:
    async def main() -> None:
        release = trio.Event()

        async def script(request: GenerateRequest, _: str) -> AsyncGenerator[AnswerEvent, None]:
            yield Started(node.peer)
            yield TokenEvent(token_id=0, text="one")
            await release.wait()
            for event in node.events("two")[1:]:
                yield event

        node.script = script
        async with serving(node) as server, httpx.AsyncClient(timeout=20) as client:
            url, body = server.url + "/v1/chat/completions", {**CHAT, "stream": True}
            async with client.stream("POST", url, json=body) as response:
                lines = response.aiter_lines()
                with trio.fail_after(10):
                    while "one" not in await anext(lines):
                        pass
                release.set()
                rest = [line async for line in lines]
            assert rest[-2:] == ["data: [DONE]", ""]

    trio.run(main)
