"""The real vocabulary, and openai-harmony as the oracle."""

import os

import pytest

from poise.harmony import HarmonyTokenizer, Renderer, byte_tokenizer


@pytest.fixture(scope="session")
def o200k(o200k_folder) -> HarmonyTokenizer:
    return HarmonyTokenizer.load(o200k_folder)


@pytest.fixture(scope="session")
def o200k_renderer(o200k) -> Renderer:
    return Renderer(o200k)


@pytest.fixture(scope="session")
def tiny() -> HarmonyTokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session", params=["tiny", "o200k"])
def tokenizer(request) -> HarmonyTokenizer:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def harmony(o200k_folder):
    """openai-harmony's encoding, reading its vocabulary from disk."""
    import openai_harmony

    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(o200k_folder)
    return openai_harmony.load_harmony_encoding("HarmonyGptOss")
