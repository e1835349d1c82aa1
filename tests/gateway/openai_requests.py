# SPDX-License-Identifier: Apache-2.0
"""Large requests of the official library, in whichever of its versions runs this."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from typing import Any

import openai


def ask_all(base_url: str, key: str, *sizes: int) -> dict[str, tuple[int, str]]:
    """The status of each request, of which some have an image of so many bytes, and the message of its error."""
    client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
    images = {size: f"data:image/png;base64,{base64.b64encode(bytes(size)).decode()}" for size in (900_000, *sizes)}

    def chat(size: int) -> Any:
        image = {"type": "image_url", "image_url": {"url": images[size]}}
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
        return client.chat.completions.with_raw_response.create(model="worker", messages=messages)

    def respond() -> Any:
        image = {"type": "input_image", "image_url": images[900_000], "detail": "auto"}
        messages: Any = [{"role": "user", "content": [image]}]
        return client.responses.with_raw_response.create(model="worker", input=messages)

    def embed() -> Any:
        return client.embeddings.with_raw_response.create(model="worker", input=["x" * 1000] * 1500)

    requests: dict[str, Callable[[], Any]] = {f"image of {size} bytes": lambda size=size: chat(size) for size in images}
    requests |= {"responses": respond, "embeddings": embed}
    answers = {}
    for name, request in requests.items():
        try:
            answers[name] = (request().status_code, "")
        except openai.APIStatusError as error:
            answers[name] = (error.status_code, str(error))
    return answers


if __name__ == "__main__":
    print(json.dumps(ask_all(*sys.argv[1:3], 500_000, 5_000_000)))
