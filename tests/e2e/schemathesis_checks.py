"""An additional check for schemathesis, which loads this file."""

import schemathesis


@schemathesis.check
def types_and_ranges_are_documented(_context, response, case):
    """Fail if a body that the document allows is refused for the type, range or absence of a value.

    The parser, which runs before all other checks, reports these faults in its own wording.
    """
    if response.status_code != 400 or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if case.path == "/invocations":  # its fields are documented with the dialects that it chooses
        return
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]  # a text is Ollama's form
    refused_by_the_parser = "expected `" in message.lower() or message.endswith("is missing")
    assert not refused_by_the_parser, message
