"""The adapters of LoRA runs, as peft reads them."""

import torch
from posttraining.tiny import preferences, write_rows
from transformers import AutoModelForSequenceClassification

from lamina.posttraining.reward import reward


def test_the_adapter_of_a_reward_model_has_its_score_as_peft_reads_it(base, tmp_path):
    from peft import PeftModel

    pairs = write_rows(tmp_path / "pairs.jsonl", preferences(12))
    given = {"from_model": str(base), "data": str(pairs), "output": str(tmp_path / "run"), "eval_fraction": 0.25}
    reward({**given, "steps": 2, "batch_size": 4, "lora_rank": 2, "learning_rate": 1e-2}, bar=False)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    torch.manual_seed(1)  # the score that peft is to replace
    original = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, pad_token_id=256)
    wrapped = PeftModel.from_pretrained(original, tmp_path / "run" / "adapter").eval()
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        scores = wrapped(input_ids=ids).logits
        torch.testing.assert_close(scores, merged(input_ids=ids).logits, atol=1e-6, rtol=1e-5)
    assert wrapped.peft_config["default"].task_type == "SEQ_CLS"
