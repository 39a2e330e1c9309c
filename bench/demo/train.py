"""Train the demonstration model that ships with Fairlead, from scratch, on two processor cores.

    OMP_WAIT_POLICY=PASSIVE python bench/demo/train.py [--output src/fairlead/server/demo/fairlead-demo]

On a busy machine passive waiting makes a step ten times as fast; on an idle one it makes little difference.

Generates the corpus (corpus.py), trains a byte-level BPE tokenizer on a part of it, then trains a small Llama
in two passes, without repeating a conversation. Writes a directory in Hugging Face layout. Seeds are fixed,
but rounding on other machines may give slightly different weights. Needs the extra `test`.
"""

import argparse
import json
import math
import shutil
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from corpus import Corpus, Message
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

BOS, END = "<|bos|>", "<|end|>"
SPECIAL = [BOS, END, "<|system|>", "<|user|>", "<|assistant|>"]  # their token ids are 0 to 4
VOCABULARY = 1536
CONTEXT = 1024  # positions in the configuration
LONGEST = 513  # tokens of the longest conversation in training
BATCH_TOKENS = 3072
# Weight of the user's tokens in the loss; the assistant's have 1.
USER_WEIGHT = 0.1

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant.') }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
GENERATION_CONFIG = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "do_sample": True,
    "temperature": 0.3,
    "top_p": 0.9,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": END,
    "pad_token": END,
    "model_max_length": CONTEXT,
    "clean_up_tokenization_spaces": False,
    "chat_template": CHAT_TEMPLATE,
}


class Pass(NamedTuple):
    """One training run, from a warm-up to a learning rate of 0."""

    steps: int
    noisy: bool
    muon_rate: float
    adamw_rate: float


# The second pass continues with the bfloat16 weights of the first one, with questions as people type them.
PASSES = [
    Pass(steps=2400, noisy=False, muon_rate=8e-3, adamw_rate=3e-3),
    Pass(steps=700, noisy=True, muon_rate=4e-3, adamw_rate=1.5e-3),
]


class Example(NamedTuple):
    """Token ids and their weights in the loss."""

    token_ids: list[int]
    weights: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("src/fairlead/server/demo/fairlead-demo"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(Corpus(Random(options.seed)))
    tokenizer.save(str(options.output / "tokenizer.json"))
    for name, content in [
        ("config", CONFIG),
        ("generation_config", GENERATION_CONFIG),
        ("tokenizer_config", TOKENIZER_CONFIG),
    ]:
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (options.output / f"{name}.json").write_text(text, encoding="utf-8")
    shutil.copyfile(Path(__file__).parent / "CARD.md", options.output / "README.md")

    for number, training in enumerate(PASSES, start=1):
        # For such short sequences torch's fused attention is slower than plain matrix products.
        if number == 1:
            model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager")).float()
        else:
            model = LlamaForCausalLM.from_pretrained(
                options.output, dtype=torch.float32, attn_implementation="eager"
            )
        corpus = Corpus(Random(options.seed + number), noisy=training.noisy)
        batches = batches_of(examples(corpus, tokenizer), Random(options.seed))
        train(model, batches, training, output=options.output)


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Return a byte-level BPE tokenizer in which every digit is one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (message["content"] for _ in range(30_000) for message in corpus.conversation())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return tokenizer


def examples(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[Example]:
    """Yield conversations in the format of the chat template, and occasionally plain texts."""
    turn = Random(0)
    while True:
        if turn.random() < 0.05:
            token_ids = [*tokenizer.encode(corpus.document()).ids, SPECIAL.index(END)]
            example = Example(token_ids, [0.5] * len(token_ids))
        else:
            example = encode_conversation(corpus.conversation(), tokenizer)
        yield Example(example.token_ids[:LONGEST], example.weights[:LONGEST])


def encode_conversation(messages: list[Message], tokenizer: Tokenizer) -> Example:
    """Return the conversation's token ids and weights."""
    token_ids, weights = [SPECIAL.index(BOS)], [0.0]
    for message in messages:
        text = tokenizer.encode(message["content"], add_special_tokens=False).ids
        token_ids += [SPECIAL.index(f"<|{message['role']}|>"), *text, SPECIAL.index(END)]
        weight = 1.0 if message["role"] == "assistant" else USER_WEIGHT
        weights += [0.0, *[weight] * (len(text) + 1)]
    return Example(token_ids, weights)


def batches_of(stream: Iterator[Example], random: Random) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (token_ids, weights), both [B, T], of examples of similar length, padded on the right."""
    while True:
        pool = sorted((next(stream) for _ in range(4096)), key=lambda example: len(example.token_ids))
        batches: list[list[Example]] = [[]]
        for example in pool:
            if len(example.token_ids) * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(example)
        random.shuffle(batches)
        for batch in batches:
            # Few widths, because torch prepares each one separately. The last token is only a target.
            width = -(-(len(batch[-1].token_ids) - 1) // 16) * 16 + 1
            padding = [width - len(example.token_ids) for example in batch]
            yield (
                torch.tensor([e.token_ids + [1] * p for e, p in zip(batch, padding, strict=True)]),
                torch.tensor([e.weights + [0.0] * p for e, p in zip(batch, padding, strict=True)]),
            )


def train(
    model: LlamaForCausalLM,
    batches: Iterator[tuple[torch.Tensor, torch.Tensor]],
    training: Pass,
    *,
    output: Path,
) -> None:
    """Train for one pass: Muon for the matrices inside the layers, AdamW for the rest.

    Prints the loss of the assistant's tokens, in nats, over the last 100 steps.
    """
    steps = training.steps
    inner = {name: p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name}
    others = [p for name, p in model.named_parameters() if name not in inner]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            inner.values(), lr=training.muon_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=training.adamw_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate_at, steps=steps))
        for optimizer in optimizers
    ]
    started, tokens, losses = time.monotonic(), 0, list[float]()
    model.train()
    for step, (token_ids, weights) in zip(range(1, steps + 1), batches, strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
        each = cross_entropy(logits.float().flatten(0, 1), token_ids[:, 1:].flatten(), reduction="none")
        weight = weights[:, 1:].flatten()
        loss = (each * weight).sum() / weight.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()
        tokens += token_ids.numel()
        losses.append(each.detach()[weight == 1].mean().item())
        if step % 100 == 0:
            recent, elapsed_s = losses[-100:], time.monotonic() - started
            print(
                f"step {step} of {steps}: loss of answers {statistics.fmean(recent):.4f}, "
                f"{tokens / elapsed_s:.0f} tokens/s, {elapsed_s:.0f} s",
                flush=True,
            )
        if step % 500 == 0 or step == steps:
            save(model, output)


def rate_at(step: int, *, steps: int) -> float:
    """Return the fraction of the full learning rate: a short warm-up, then a cosine decay to 0."""
    return min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def save(model: LlamaForCausalLM, output: Path) -> None:
    """Write the weights in bfloat16. The file is replaced atomically."""
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    unfinished = output / "model.safetensors.partial"
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(output / "model.safetensors")


if __name__ == "__main__":
    main()
