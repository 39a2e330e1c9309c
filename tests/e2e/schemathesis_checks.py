"""What our own check adds to schemathesis, which loads this file."""

import schemathesis


@schemathesis.check
def types_and_ranges_are_documented(_context, response, case):
    """Fail if a body that the document allows is refused for the type, the range or the lack of a value.

    Those are the words of the parser, which refuses before anything else is looked at.
    """
    if response.status_code != 400 or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    message = response.json()["error"]["message"]
    refused_by_the_parser = "expected `" in message.lower() or message.endswith("is missing")
    assert not refused_by_the_parser, message
