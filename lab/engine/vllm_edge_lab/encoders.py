# SPDX-License-Identifier: Apache-2.0
"""What a real Gemma 4 leaves out where --limit-mm-per-prompt allows no image, no video and no audio.

vLLM then loads no encoder (model_executor/models/interfaces.py, _mark_tower_model), and its profiling run holds no
encoder's output beside that of the language model (v1/worker/gpu/model_runner.py, profile_run).
"""

from __future__ import annotations

import json
from dataclasses import replace

from vllm_edge_lab import physics

MODALITIES = ("image", "video", "audio")
# Google's model card: vision 150M or 550M, audio 305M where there is one. They are in bf16 in every published
# precision, and every rank has them whole.
ENCODER_PARAMETERS = {"31B": 550e6, "26B-A4B": 550e6, "E4B": 455e6, "E2B": 455e6}
HIDDEN_SIZE = {"31B": 5376, "26B-A4B": 2816, "E4B": 2560, "E2B": 1536}
VIDEO_TOKENS = 2496


def takes_text_only(limits: str | None) -> bool:
    """Whether the value of --limit-mm-per-prompt allows nothing but text; a modality that it does not name has 999."""
    allowed = json.loads(limits or "{}")
    counts = [allowed.get(modality, 999) for modality in MODALITIES]
    return not any(count.get("count", 999) if isinstance(count, dict) else count for count in counts)


def leave_out(need: physics.Need, repository: str, *, has_share: bool) -> physics.Need:
    """The need of the same engine for text only; with a share of the GPU, what is saved goes to the KV cache."""
    family = physics.model_of(repository).family
    weights = int(2 * ENCODER_PARAMETERS[family])
    outputs = VIDEO_TOKENS * HIDDEN_SIZE[family] * 2
    return replace(
        need,
        weights=need.weights - weights,
        profile=need.profile - outputs,
        kv_cache=need.kv_cache + (weights + outputs if has_share else 0),
    )
