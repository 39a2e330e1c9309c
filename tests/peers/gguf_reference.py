"""What llama.cpp makes of a GGUF, by the package `xllamacpp`: python gguf_reference.py MODEL < JSON.

The input has `texts` to tokenize and `prompts` to continue. The output, in JSON, has the ids of each, and of
each greedy text.
"""

import json
import sys
import urllib.request

TOKENS = 24


def main() -> None:
    import xllamacpp

    asked = json.load(sys.stdin)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = sys.argv[1]
    parameters.n_ctx, parameters.n_parallel, parameters.cpuparams.n_threads = 256, 1, 1
    parameters.warmup, parameters.verbosity = False, 0
    server = xllamacpp.Server(parameters)

    def post(path, **body):
        request = urllib.request.Request(
            f"{server.listening_address}/{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def tokenize(text):
        return post("tokenize", content=text, add_special=True, parse_special=True)["tokens"]

    def complete(prompt):
        options = {"temperature": 0, "return_tokens": True, "cache_prompt": False}
        return post("completion", prompt=prompt, n_predict=TOKENS, **options)["tokens"]

    found = {
        "ids": [tokenize(text) for text in asked["texts"]],
        "completions": [complete(prompt) for prompt in asked["prompts"]],
    }
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
