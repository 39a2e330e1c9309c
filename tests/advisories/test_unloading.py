"""Requests during the unloading of their model get their usual answer or a clear error."""

from concurrent.futures import ThreadPoolExecutor

from advisories.target import CHAT, COMPLETIONS, MODEL, Target, chat, completion
from advisories.tries import tries

# Each may wait until the model is loaded again; none may read memory of the unloaded model.
REQUESTS = [
    ("/tokenize", {"prompt": "The owl " * 100}),
    ("/tokenize", {"messages": chat()["messages"]}),
    ("/detokenize", {"tokens": list(range(5, 500))}),
    (COMPLETIONS, completion(logprobs=2)),
    (CHAT, chat()),
]
TIMES = 4


def response_to(server: Target, path: str, body: dict) -> object:
    """Return the answer without its varying parts; None if the model is not loaded."""
    answer = server.post(path, body)
    if answer.status_code in {404, 409}:
        return None
    assert answer.status_code == 200, answer.text
    content = answer.json()
    return content.get("choices", content)


@tries("CVE-2026-43631", "CVE-2026-43632")
def test_requests_during_an_unload_get_their_usual_answer_or_a_clear_error(server: Target):
    expected = [response_to(server, *request) for request in REQUESTS]
    with ThreadPoolExecutor(2 * len(REQUESTS)) as threads:
        running = [
            threads.submit(response_to, server, *request) for request in REQUESTS for _ in range(TIMES)
        ]
        unloaded = threads.submit(server.post, "/models/unload", {"model": MODEL})
        running += [
            threads.submit(response_to, server, *request) for request in REQUESTS for _ in range(TIMES)
        ]
        assert unloaded.result().status_code in {200, 409}
        for index, answer in enumerate(running):
            assert answer.result() in (None, expected[index // TIMES % len(REQUESTS)])
    assert [response_to(server, *request) for request in REQUESTS] == expected
