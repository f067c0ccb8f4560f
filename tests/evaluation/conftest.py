import json
import random

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import lamina
from lamina.data.tokenizers import load_tokenizer

WORDS = ["the", "norm", "sits", "before", "after", "and", "between", "every", "layer", "of", "a", "deep", "model"]


def saved_model(folder, placement="keel", vocab_size=257, positions=256):
    """A tiny model over bytes, with random weights, beside its tokenizer."""
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=positions, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
    model = lamina.build(config, placement, init="normal")
    for parameter in model.parameters():  # far from uniform predictions, so that an error shows
        parameter.data.mul_(3.0)
    model.save_pretrained(folder)
    load_tokenizer("bytes").save_pretrained(folder)
    return folder


def loaded(folder):
    """A saved model and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("models") / "keel")


def quiz_rows(count=20):
    draw, rows = random.Random(5), []
    for _ in range(count):
        row = {"question": " ".join(draw.choices(WORDS, k=draw.randint(3, 9))), "choices": draw.sample(WORDS, 4)}
        rows.append({**row, "answer": draw.randrange(4)})
    return rows


QUIZ = {
    "task": "quiz", "dataset_path": "toy/quiz", "output_type": "multiple_choice", "training_split": "train",
    "test_split": "test", "doc_to_text": "{{question}}\nAnswer:", "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


@pytest.fixture
def data_dir(tmp_path):
    """A folder with one data set and one task on it."""
    folder = tmp_path / "data"
    (folder / "toy/quiz/default").mkdir(parents=True)
    for split, count in (("train", 6), ("test", 20)):
        lines = "".join(json.dumps(row) + "\n" for row in quiz_rows(count))
        (folder / f"toy/quiz/default/{split}.jsonl").write_text(lines)
    (folder / "tasks").mkdir()
    (folder / "tasks/quiz.yaml").write_text(yaml.safe_dump(QUIZ))
    return folder
