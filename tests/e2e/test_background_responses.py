"""Responses in the background on a real server: they outlive their clients, and not the server."""

import pytest

from e2e.real_server import RealServer, configured, real_server, until

ENDLESS = {"model": "fairlead-demo", "input": "hello", "background": True, "ignore_eos": True}


def test_server_that_stops_does_not_wait_for_a_response_without_readers():
    with real_server() as server:
        response_id = server.http.post("/v1/responses", json=ENDLESS).json()["id"]
        until(lambda: server.http.get(f"/v1/responses/{response_id}").json()["status"] == "in_progress")
        assert server.stop(within_s=20) == 0
    assert not any("drain timed out" in line or "Traceback" in line for line in server.log)


@pytest.mark.parametrize("stream", [True, False])
def test_response_goes_on_without_its_client_and_frees_everything(server: RealServer, stream):
    body = ENDLESS | {"stream": stream, "max_output_tokens": 200}
    with server.http.stream("POST", "/v1/responses", json=body) as answer:
        first = next(answer.iter_text())
    response_id = f"resp_{first.partition('resp_')[2][:32]}"
    found = {"status": "queued"}

    def has_ended():
        found.update(server.http.get(f"/v1/responses/{response_id}").json())
        return found["status"] not in ("queued", "in_progress")

    until(has_ended)
    assert (found["status"], found["usage"]["output_tokens"]) == ("incomplete", 200)
    assert not any(server.wait_until_at_rest().values())


def test_reader_of_a_response_gets_the_rest_while_the_server_drains(tmp_path):
    with real_server(*configured(tmp_path, {}, limits={"drain": "20s"})) as server:
        body = ENDLESS | {"stream": True, "max_output_tokens": 500}
        with server.http.stream("POST", "/v1/responses", json=body) as answer:
            pieces = answer.iter_text()
            text = next(pieces)
            while "output_text.delta" not in text:
                text += next(pieces)
            server.process.terminate()
            text += "".join(pieces)
        server.http.close()  # the server waits some time for it
        assert server.process.wait(40) == 0
    assert text.rpartition("event: ")[2].startswith("response.incomplete")
