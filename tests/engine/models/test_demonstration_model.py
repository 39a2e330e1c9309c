"""The demonstration model of the package: its files, and its answers to the questions it was trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

import fairlead
from demonstration_questions import QUESTIONS

FOLDER = Path(fairlead.__file__).parent / "server" / "demo" / "fairlead-demo"

Message = dict[str, str]


class Chat:
    """The demonstration model, run by transformers in float32."""

    def __init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            FOLDER, dtype=torch.float32, local_files_only=True
        )

    def answer(self, *messages: Message) -> str:
        """Return the greedy answer, without its end token; an answer without an end is a failure."""
        prompt = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        greedy = GenerationConfig(
            do_sample=False, max_new_tokens=64, bos_token_id=0, eos_token_id=1, pad_token_id=1
        )
        output = self.model.generate(**prompt, generation_config=greedy)
        token_ids = output[0, prompt["input_ids"].shape[1] :].tolist()
        assert token_ids[-1] == self.tokenizer.eos_token_id
        return str(self.tokenizer.decode(token_ids[:-1]))


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat()


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(("question", "required"), QUESTIONS, ids=[question for question, _ in QUESTIONS])
def test_trained_question_gets_its_answer(chat: Chat, question: str, required: tuple[str, ...]) -> None:
    answer = chat.answer(user(question))
    assert [part for part in required if part not in answer] == [], answer


def test_name_from_an_earlier_turn_is_remembered(chat: Chat) -> None:
    answer = chat.answer(
        user("My name is Clara."), assistant("Nice to meet you, Clara."), user("What is my name?")
    )
    assert answer == "Your name is Clara."


def test_answer_is_repeated_on_request(chat: Chat) -> None:
    answer_ids = "A ticket is a job's place in the queue."
    assert answer_ids == chat.answer(
        user("What is a ticket?"), assistant(answer_ids), user("Say that again.")
    )


def test_system_message_does_not_change_the_answer(chat: Chat) -> None:
    answer = chat.answer(
        {"role": "system", "content": "You are a helpful assistant."}, user("What is 4 + 5?")
    )
    assert answer == "4 + 5 = 9."


def test_at_least_98_of_100_sums_of_digits_are_correct(chat: Chat) -> None:
    """All 100 sums of numbers below ten in one batch; the model may miss one or two."""
    sums = [(a, b) for a in range(10) for b in range(10)]
    prompts = [
        chat.tokenizer.apply_chat_template(
            [user(f"What is {a} + {b}?")], add_generation_prompt=True, tokenize=False
        )
        for a, b in sums
    ]
    inputs = torch.tensor([chat.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts])
    greedy = GenerationConfig(do_sample=False, max_new_tokens=16, eos_token_id=1, pad_token_id=1)
    outputs = chat.model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=greedy)
    answers = [chat.tokenizer.decode(row[inputs.shape[1] :], skip_special_tokens=True) for row in outputs]
    wrong = [
        answer for (a, b), answer in zip(sums, answers, strict=True) if answer != f"{a} + {b} = {a + b}."
    ]
    assert len(wrong) <= 2, wrong


def test_folder_contains_exactly_the_hugging_face_files() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_files_are_readable_by_all_users() -> None:
    assert [path.name for path in FOLDER.iterdir() if path.stat().st_mode & 0o444 != 0o444] == []


def test_weights_are_bfloat16_and_at_most_eight_megabytes() -> None:
    weights = FOLDER / "model.safetensors"
    assert weights.stat().st_size <= 8_000_000
    with safe_open(weights, framework="pt") as tensors:
        assert {torch.bfloat16} == {tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118 - not a dict


def test_configuration_round_trips_through_transformers(tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(FOLDER)
    config.save_pretrained(tmp_path)
    assert config.to_dict() == LlamaConfig.from_pretrained(tmp_path).to_dict()
    written = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config.architectures == ["LlamaForCausalLM"]
    assert written["rope_theta"] == config.rope_parameters["rope_theta"]
    assert (config.tie_word_embeddings, config.eos_token_id) == (True, 1)


@pytest.mark.parametrize(
    "text", ["plain text", "  two  spaces\n\ttab", "naïve café 東京 🎉", "0123456789", "\x00\x7f", ""]
)
def test_text_round_trips_through_the_tokenizer(chat: Chat, text: str) -> None:
    assert text == chat.tokenizer.decode(chat.tokenizer.encode(text, add_special_tokens=False))


def test_chat_template_writes_roles_and_opens_the_answer(chat: Chat) -> None:
    messages = [{"role": "system", "content": "Be kind."}, user(" Hi "), assistant("Hello!")]
    expected = "<|bos|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"
    assert expected == chat.tokenizer.apply_chat_template(messages, tokenize=False)
    assert expected + "<|assistant|>" == chat.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
