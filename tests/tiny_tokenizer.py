# SPDX-License-Identifier: BSD-3-Clause
"""Make small tokenizers, with chat templates, as a model's folder has them."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
LINES = ("What is the capital of France?", "Paris is the capital of France.", "How are you today? I am fine.")
CHATML = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As CHATML, and marks answers
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's, thoughts are only in the last answer
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Its prompt for an answer is not how an answer begins
UNRELATED = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}ANSWER:{% endif %}"
)


def save(folder: Path, template: str | None = None, *, bos: bool = False, eos: bool = True, metaspace: bool = False):
    """Train a BPE of a few tokens, and save it as a model's tokenizer.

    Args:
        folder: where to.
        template: the chat template.
        bos: whether a text begins with a BOS token.
        eos: whether there is an EOS token.
        metaspace: whether it is like SentencePiece's, instead of byte-level.
    """
    tokenizer = Tokenizer(models.BPE(byte_fallback=metaspace, unk_token="<s>" if metaspace else None))
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Metaspace() if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    tokenizer.decoder = decoders.Metaspace() if metaspace else decoders.ByteLevel()
    alphabet = [] if metaspace else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    elif not metaspace:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if bos else None,
        eos_token="</s>" if eos else None,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast
