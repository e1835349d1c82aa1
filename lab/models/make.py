# SPDX-License-Identifier: Apache-2.0
"""Runs inside the engine image: writes the tiny random checkpoints under /out, the same bytes on every run.

The architecture is the real one (Gemma 4 decoder, sliding and full layers, its tokens and chat markup), the sizes are
not: 4 layers of width 64 and a tokenizer of 2,048 entries trained on Python's own documentation.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

# Before the libraries are imported: threads would make the training of the tokenizer depend on timing.
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedTokenizerFast

VOCABULARY = 2048
SEED = 4
SPECIAL = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>",
    "<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", "<|think|>", '<|"|>',
]  # fmt: skip
# Checkpoints by the max_position_embeddings of the real ones: everything else about the tiny ones is the same.
REPOSITORIES = {
    "google/gemma-4-E2B-it": 131072,
    "google/gemma-4-E4B-it": 131072,
    "google/gemma-4-31B-it": 262144,
    "google/gemma-4-31B-it-qat-w4a16-ct": 262144,
    "RedHatAI/gemma-4-31B-it-FP8-dynamic": 262144,
    "nvidia/Gemma-4-31B-IT-NVFP4": 262144,
    "RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic": 262144,
    "nvidia/Gemma-4-26B-A4B-NVFP4": 262144,
}
CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# {repository}, the lab's stand-in

A tiny random Gemma 4 that answers nonsense. It has the architecture, the markup and the maximum context of the
checkpoint it is named after, and none of its knowledge. It is dense, also under the name of a mixture of experts.
"""


def tokenizer(context: int) -> PreTrainedTokenizerFast:
    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokens.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[token for token in SPECIAL[4:] if token not in ("<|tool_call>", "<tool_call|>")],
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def text_config(context: int) -> Gemma4TextConfig:
    return Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=64,
        hidden_size_per_layer_input=0,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        # Four of each: tensor parallelism over four ranks leaves one to each.
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        global_head_dim=128,
        sliding_window=128,
        max_position_embeddings=context,
        # Wider, and every answer is one token repeated; narrower, and all tokens are equally likely.
        initializer_range=0.08,
        pad_token_id=0,
        eos_token_id=[1, SPECIAL.index("<turn|>")],
        bos_token_id=2,
        dtype=torch.bfloat16,
    )


def make(context: int, target: Path, template: str) -> None:
    torch.manual_seed(SEED)
    model = Gemma4ForCausalLM(text_config(context)).to(torch.bfloat16).eval()
    model.generation_config.update(bos_token_id=2, eos_token_id=[1, SPECIAL.index("<turn|>")], pad_token_id=0)
    model.save_pretrained(target)
    tokenizer(context).save_pretrained(target)
    (target / "chat_template.jinja").write_text(template)


def name_it(repository: str, source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    # What the engine's wrapper reads: whose memory this checkpoint is to take.
    config["_name_or_path"] = repository
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (target / "README.md").write_text(CARD.format(repository=repository))
    for path in target.iterdir():
        # safetensors writes files that only their owner can read; the hub runs as somebody else.
        path.chmod(0o644)


def main() -> None:
    out, template = Path("/out"), Path(sys.argv[1]).read_text()
    made: dict[int, Path] = {}
    for repository, context in REPOSITORIES.items():
        if context not in made:
            made[context] = Path("/tmp") / f"context-{context}"
            make(context, made[context], template)
        name_it(repository, made[context], out / repository)


if __name__ == "__main__":
    main()
