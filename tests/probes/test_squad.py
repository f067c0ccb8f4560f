"""Layers dropped from an encoder with a question-answering head, by SQuAD's F1 on a local file."""

import copy
import itertools
import json
from collections import Counter

import pytest
import torch
from small_models import stir
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForQuestionAnswering, PreTrainedTokenizerFast

import lamina
from lamina.errors import UserError
from lamina.evaluation.squad import Question, answer, f1, read_questions
from lamina.probes.layer_drop import LayerDrop

CONTEXT = "the norm sits before the branch and a second norm sits behind it , so that the stream keeps its size . " * 3
WORDS = sorted(set(CONTEXT.split()) | {"where", "what", "?"})


@pytest.fixture
def tokenizer():
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *WORDS])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, [("[CLS]", 1), ("[SEP]", 2)])
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    tokens = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=inputs, **tokens)


@pytest.fixture
def model():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    made = stir(BertForQuestionAnswering(BertConfig(vocab_size=len(WORDS) + 4, max_position_embeddings=64, **sizes)))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.5)
    return made.eval()


@pytest.fixture
def squad(tmp_path):
    pairs = [("where sits the norm ?", ["before the branch"]), ("what keeps its size ?", ["the stream", "stream"])]
    answered = [(question, [{"text": text, "answer_start": 0} for text in texts]) for question, texts in pairs]
    asked = [{"id": str(i), "question": one, "answers": texts} for i, (one, texts) in enumerate(answered)]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": [{"context": CONTEXT, "qas": asked}]}]}))
    return path


def naive_f1(found, true):
    """By removing shared words one by one."""
    drop = [",", ".", "?"]
    words = ("".join(c for c in text.lower() if c not in drop).split() for text in (found, true))
    found, true = ([w for w in text if w not in ("a", "an", "the")] for text in words)
    same, left = 0, list(true)
    for word in found:
        if word in left:
            left.remove(word)
            same += 1
    return 0.0 if same == 0 else 2 * (same / len(found)) * (same / len(true)) / (same / len(found) + same / len(true))


@torch.no_grad()
def naive_answer(model, tokenizer, question, size=64, shared=16):
    """All windows and all spans of at most 30 tokens, one by one."""
    asked = tokenizer(question.text)["input_ids"]
    text = tokenizer(question.context, add_special_tokens=False, return_offsets_mapping=True)
    room, best, start = size - len(asked) - 1, (-1e9, 0, 0), 0
    while True:
        part = text["input_ids"][start : start + room]
        ids = [*asked, *part, tokenizer.sep_token_id]
        kinds = [0] * len(asked) + [1] * (len(part) + 1)
        output = model(input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([kinds]))
        for i, j in itertools.combinations_with_replacement(range(len(part)), 2):
            score = float(output.start_logits[0, len(asked) + i] + output.end_logits[0, len(asked) + j])
            if j - i < 30 and score > best[0]:
                best = (score, text["offset_mapping"][start + i][0], text["offset_mapping"][start + j][1])
        if start + room >= len(text["input_ids"]):
            return question.context[best[1] : best[2]]
        start += room - shared


def test_the_answer_is_the_best_span_of_all_windows(model, tokenizer, squad):
    questions = read_questions(squad)
    assert [q.text for q in questions] == ["where sits the norm ?", "what keeps its size ?"]
    assert len(tokenizer(CONTEXT)["input_ids"]) > 64  # more than one window
    for question in questions:
        assert answer(model, tokenizer, question) == naive_answer(model, tokenizer, question) != ""


@pytest.mark.parametrize(
    ("found", "true"),
    [("The Stream!", "stream"), ("a stream of it", "the stream"), ("norm norm", "norm"), ("so", "norm"), ("", "a b")],
)
def test_f1_is_squads(found, true):
    assert f1(found, true) == pytest.approx(naive_f1(found.replace("!", ""), true))


def test_each_layers_drop_is_the_f1_lost_without_it(model, tokenizer, squad):
    frame = lamina.probe(model, f"layer_drop(squad={squad})", torch.randint(4, 20, (2, 8)), tokenizer)["layer_drop"]
    questions = read_questions(squad)

    def score(model):
        found = [naive_answer(model, tokenizer, question) for question in questions]
        return sum(max(naive_f1(text, t) for t in q.answers) for text, q in zip(found, questions, strict=True)) / 2

    whole = score(model)
    assert frame.loc[frame.layer == -1, ["metric", "value"]].to_numpy().tolist() == [["f1", pytest.approx(whole)]]
    drops = Counter()
    for layer in range(3):
        other = copy.deepcopy(model)
        del other.bert.encoder.layer[layer]
        rows = frame[(frame.layer == layer) & (frame.meaning == "remove") & (frame.metric == "f1_drop")]
        assert rows.value.item() == pytest.approx(whole - score(other), abs=1e-6)
        drops[layer] = whole - score(other)
    assert len(set(drops.values())) > 1


def test_what_it_cannot_score_it_says(model, tokenizer, squad, tmp_path):
    (tmp_path / "other.json").write_text('{"data": [{"title": "x"}]}')
    (tmp_path / "empty.json").write_text('{"data": []}')
    for name, words in {"other": "format: KeyError", "none": "no such file", "empty": "without an answer"}.items():
        with pytest.raises(UserError, match=words):
            LayerDrop(squad=str(tmp_path / f"{name}.json"))
    with pytest.raises(UserError, match="score, squad and task are alternatives"):
        LayerDrop(squad=str(squad), task="piqa")
    assert len(LayerDrop(squad=str(squad), limit=1).task.questions) == 1
    ids = torch.randint(4, 20, (2, 8))
    with pytest.raises(UserError, match="no fast tokenizer"):
        lamina.probe(model, f"layer_drop(squad={squad})", ids)
    with pytest.raises(UserError, match="no question-answering head"):
        lamina.probe(model.bert, f"layer_drop(squad={squad})", ids, tokenizer)
    assert answer(model, tokenizer, Question("what ?", "norm", ("norm",))) == "norm"
