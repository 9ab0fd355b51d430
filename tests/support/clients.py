"""Clients of OpenAI and Anthropic, imported with the first that is made: theirs are large packages of types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI


def openai_client(served: Any, **options: Any) -> OpenAI:
    """Returns OpenAI's client of a server. options: of the client."""
    import openai

    return openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, **options)


def anthropic_client(served: Any, key: str | None = "none", **options: Any) -> Anthropic:
    """Returns Anthropic's client of a server. key: sent in x-api-key. options: of the client."""
    import anthropic

    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0, **options)
