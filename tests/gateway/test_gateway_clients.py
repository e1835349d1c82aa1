# SPDX-License-Identifier: Apache-2.0
"""Large requests of the official library: with the role in the path, and by `model`, which must come early."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import openai
import pytest
from gateway_world import KEYS, Gateway

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("path", ["/roles/worker/v1", "/v1"])
def test_large_requests_of_the_official_library(gateway: Gateway, path: str) -> None:
    image = f"data:image/png;base64,{base64.b64encode(bytes(900_000)).decode()}"
    picture: Any = [{"type": "image_url", "image_url": {"url": image}}]
    input_image: Any = [{"type": "input_image", "image_url": image, "detail": "auto"}]
    with openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}{path}", api_key=KEYS["all"], max_retries=0) as client:
        requests: dict[str, Callable[[], Any]] = {
            "chat": lambda: client.chat.completions.with_raw_response.create(
                model="worker", messages=[{"role": "user", "content": picture}]
            ),
            "responses": lambda: client.responses.with_raw_response.create(
                model="worker", input=[{"role": "user", "content": input_image}]
            ),
            "embeddings": lambda: client.embeddings.with_raw_response.create(model="worker", input=["x" * 1000] * 1500),
        }
        for name, request in requests.items():
            try:
                assert request().status_code == 200, name
            except openai.BadRequestError as error:
                assert path == "/v1" and "/roles/worker/v1" in str(error), name
