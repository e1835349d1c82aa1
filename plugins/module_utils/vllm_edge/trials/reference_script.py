# SPDX-License-Identifier: Apache-2.0
"""Computes reference answers. Its text runs as a program in a container of the engine's image, by plain transformers.

It needs the standard library, torch and transformers. It reads /job/request.json and writes /job/out/answers.json: for
each prompt the token ids of the rendered prompt, and the tokens that the model generates greedily with the log
probabilities of the likeliest ones. Prompts are computed one after another, each within a time limit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

JOB = Path("/job")


def choose_device(wanted: str, has_cuda: bool, gpus: int) -> str:
    """Return `cpu`, `cuda:0` or `auto` (several GPUs). Raises SystemExit with the reason if there is no such device."""
    if wanted == "cpu" or (wanted == "either" and not (has_cuda and gpus)):
        return "cpu"
    if not has_cuda:
        raise SystemExit("PyTorch of the image finds no CUDA device; --device cpu computes on the CPU.")
    return "cuda:0" if gpus == 1 else "auto"


def name_finish(tokens: Sequence[int], ends: Sequence[int], most: int) -> str:
    if tokens and tokens[-1] in ends:
        return "stop"
    return "length" if len(tokens) >= most else "time"


def list_ends(configured: int | Sequence[int] | None) -> list[int]:
    if configured is None:
        return []
    return [configured] if isinstance(configured, int) else list(configured)


def load_model(directory: str, device: str) -> Any:
    """Load the checkpoint as it is stored, without code of its own."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    options: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "trust_remote_code": False}
    if device != "cpu":
        options["device_map"] = device
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, **options)
    except ValueError:  # the class of the checkpoint is in the table of multimodal models alone
        model = AutoModelForImageTextToText.from_pretrained(directory, **options)
    return model.eval()


def answer(model: Any, tokenizer: Any, case: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    text = tokenizer.apply_chat_template(
        case["messages"],
        tokenize=False,
        add_generation_prompt=True,
        chat_template=request["chat_template"],
        **request["template_arguments"],
    )
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    inputs = torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        made = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            max_new_tokens=request["tokens"],
            max_time=request["timeout_s"],
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = made.sequences[0, len(prompt) :].tolist()
    tops = []
    for at, (token, logits) in enumerate(zip(tokens, made.logits, strict=False)):
        rated = torch.log_softmax(logits[0].float(), dim=-1)
        likeliest = torch.topk(rated, request["top"]).indices.tolist()
        # Up to the first difference the history is the same, so the engine's token can be rated, too.
        others = [number for number in case["engine_tokens"][at : at + 1] if number < len(rated)]
        tops.append({number: float(rated[number]) for number in dict.fromkeys([token, *others, *likeliest])})
    return {
        "case": case["case"],
        "prompt_ids": prompt,
        "token_ids": tokens,
        "logprobs": tops,
        "text": tokenizer.decode(tokens),
        "finish": name_finish(tokens, list_ends(model.generation_config.eos_token_id), request["tokens"]),
    }


def main() -> None:
    request = json.loads((JOB / "request.json").read_text(encoding="utf-8"))
    os.nice(10)  # the engines come first

    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = choose_device(request["device"], torch.cuda.is_available(), torch.cuda.device_count())
    begin = time.monotonic()
    print("loads the checkpoint", flush=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(request["model"], local_files_only=True)
    if not (request["chat_template"] or tokenizer.chat_template):
        raise SystemExit("The checkpoint has no chat template, and the engine has none of its own.")
    model = load_model(request["model"], device)
    load_s = time.monotonic() - begin
    answers = []
    for number, case in enumerate(request["cases"], 1):
        begin = time.monotonic()
        print(f"computes prompt {number} of {len(request['cases'])}, {case['case']}", flush=True)
        answers.append({**answer(model, tokenizer, case, request), "seconds": round(time.monotonic() - begin, 3)})
    document = {
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "load_seconds": round(load_s, 3),
        "answers": answers,
    }
    (JOB / "out" / "answers.json").write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
