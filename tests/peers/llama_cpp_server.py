"""llama.cpp's own HTTP server, from the package `xllamacpp`, as a command, and a tiny model for it.

python llama_cpp_server.py MODEL.gguf PORT SLOTS [KEY]
"""

import json
import os
import signal
import sys
from pathlib import Path

SIZE, FEED_FORWARD, LAYERS, HEADS = 256, 1024, 4, 4
CONTEXT = 16_384  # of each slot: an answer without an end lasts for seconds


def write_tiny_llama(file: Path, tokenizer: Path) -> None:
    """Write a Llama with random weights, and the tokenizer and chat template of a folder."""
    import gguf
    import numpy as np

    words = json.loads((tokenizer / "tokenizer.json").read_text())
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    vocabulary = sorted(words["model"]["vocab"], key=words["model"]["vocab"].get)
    special = {token["content"] for token in words["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in words["model"]["merges"]]

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(SIZE // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if word in special else gguf.TokenType.NORMAL for word in vocabulary]
    )
    writer.add_token_merges(merges)
    writer.add_bos_token_id(vocabulary.index("<|bos|>"))
    writer.add_eos_token_id(vocabulary.index("<|end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])

    random = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.05, shape).astype(np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(name, np.ones(SIZE, np.float32))

    add("token_embd.weight", len(vocabulary), SIZE)
    add("output.weight", len(vocabulary), SIZE)
    add_norm("output_norm.weight")
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            add_norm(f"blk.{layer}.{name}.weight")
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{name}.weight", SIZE, SIZE)
        for name, shape in (
            ("ffn_gate", (FEED_FORWARD, SIZE)),
            ("ffn_up", (FEED_FORWARD, SIZE)),
            ("ffn_down", (SIZE, FEED_FORWARD)),
        ):
            add(f"blk.{layer}.{name}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(model: str, port: str, slots: str, *keys: str) -> None:
    """Serve until SIGTERM."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path = model
    settings.model_alias = {"tiny"}
    settings.hostnames = ["127.0.0.1"]
    settings.port = int(port)
    settings.n_parallel = int(slots)
    settings.n_ctx = CONTEXT * int(slots)
    settings.cpuparams.n_threads = 1
    settings.use_jinja = True  # as in llama-server; without it, tools are ignored
    settings.endpoint_slots = True
    settings.api_keys = list(keys)
    settings.warmup = False
    server = xllamacpp.Server(settings)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    os._exit(0)  # its destructor waits for running requests


if __name__ == "__main__":
    main(*sys.argv[1:])
