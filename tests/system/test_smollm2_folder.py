"""SmolLM2 as `find_model` makes it: the weights, tokenizer and template that were measured elsewhere."""

import json

import pytest

pytestmark = pytest.mark.system


def test_parameters_and_bytes(smollm2):
    from llmq.profiles.checkpoint import read_checkpoint
    from llmq.profiles.kv_spec import KVCacheLayout
    from llmq.profiles.weight_size import weight_size

    checkpoint = read_checkpoint(smollm2)
    assert sum(tensor.num_elements for tensor in checkpoint.tensors.values()) == 134_515_008
    assert checkpoint.total_bytes == weight_size(smollm2).num_bytes == weight_size(smollm2, "bf16").num_bytes
    assert KVCacheLayout.of(checkpoint.architecture, "bf16").bytes_per_token == 23_040


def test_the_tokenizer_is_the_shared_one(smollm2, shared):
    from transformers import AutoTokenizer

    reference = shared / "data" / "tokenizers" / "smollm2-135m-instruct"
    ours, expected = AutoTokenizer.from_pretrained(smollm2), AutoTokenizer.from_pretrained(reference)
    texts = (shared / "data" / "text").glob("wiki*")
    samples = [line for path in texts for line in path.read_text(encoding="utf-8").splitlines()[:400] if line]
    samples += ["🦙🙂 日本語 한국어", "  two  spaces\t\n\n", "1234567 3.14", "<|im_start|>user", "é\u0301 ﬁ"]
    assert len(samples) > 100
    assert [ours(text).input_ids for text in samples] == [expected(text).input_ids for text in samples]


def test_chat_and_special_tokens(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "Hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert len(ids) == 31
    assert ids[:4] == [1, 9690, 198, 2683]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("Hi").input_ids[0] != 1
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == 2


def test_log_probabilities_measured_on_the_gguf(smollm2):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ids = torch.tensor([[504, 3575, 282, 4649, 314, 7042]])  # The capital of France is Paris
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
    measured = logprobs.gather(1, ids[0, 1:, None]).squeeze()
    expected = torch.tensor([-11.5393, -0.3376, -2.4387, -0.4509, -0.2581])
    # The reference is of the dequantized float32 weights; bf16 rounding moves it in the third decimal.
    torch.testing.assert_close(measured, expected, atol=0.02, rtol=0)
