"""Commonsense170K's rows are rebuilt in LLM-Adapters' wording from the package's questions."""

import pytest
from scripts import loaded


@pytest.fixture(scope="module")
def script():
    return loaded("benchmarks/commonsense_data.py")


@pytest.mark.parametrize(
    ("name", "query", "gold", "instruction", "answer"),
    [
        (
            "piqa",
            "Goal: When butter boils, you can\n A. Pour it onto a plate\n B. Pour it into a jar\nAnswer:",
            1,
            "Please choose the correct solution to the question: When butter boils, you can\n\n"
            "Solution1: Pour it onto a plate\n\nSolution2: Pour it into a jar\n\nAnswer format: solution1/solution2",
            "solution2",
        ),
        (
            "winogrande",
            "Fill in the blank: Ian ate Dennis's menudo because ___ despised eating intestine.\n A. Ian\n B. Dennis\n"
            "Answer:",
            1,
            "Please choose the correct answer to fill in the blank to complete the given sentence: Ian ate Dennis's "
            "menudo because _ despised eating intestine.\n\nOption1: Ian Option2: Dennis\n\nAnswer format: "
            "option1/option2",
            "option2",
        ),
        (
            "openbookqa",
            "Question: The sun is responsible for\n A. puppies\n B. children\n C. flowers\n D. plants\nAnswer:",
            3,
            "Please choose the correct answer to the question: The sun is responsible for\n\nAnswer1: puppies Answer2: "
            "children Answer3: flowers Answer4: plants\n\nAnswer format: answer1/answer2/answer3/answer4",
            "answer4",
        ),
        (
            "hellaswag",
            "Removing ice: Then, he writes. Then\nChoose the best continuation:\n A. , one.\n B. , two.\n C. , three."
            "\n D. , four.\nAnswer:",
            0,
            "Please choose the correct ending to complete the given sentence: Removing ice: Then, he writes. Then\n\n"
            "Ending1: , one. Ending2: , two. Ending3: , three. Ending4: , four.\n\nAnswer format: "
            "ending1/ending2/ending3/ending4",
            "ending1",
        ),
        (
            "boolq",
            "Persian -- Persian is a language.\nQuestion: do they speak the same language?\n A. yes\n B. no\nAnswer:",
            0,
            "Please answer the following question with true or false, question: do they speak the same language?\n\n"
            "Answer format: true/false",
            "true",
        ),
    ],
)
def test_a_question_is_worded_as_llm_adapters_words_it(script, name, query, gold, instruction, answer):
    row = script.example(name, query, gold)
    assert row == {
        "instruction": instruction,
        "input": "",
        "output": f"the correct answer is {answer}",
        "benchmark": name,
    }
