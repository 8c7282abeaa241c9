import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("POISE_DATA", Path(__file__).parents[3] / "shared" / "data"))


def folder_with(name: str, file: str) -> Path:
    if not (DATA / name / file).is_file():
        pytest.skip(f"the data is not here: set POISE_DATA to a folder with {name}/{file}")
    return DATA / name


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    return folder_with("gsm8k", "train.jsonl")


@pytest.fixture(scope="session")
def math_folder() -> Path:
    return folder_with("math", "math500.jsonl")


@pytest.fixture(scope="session")
def ifeval_folder() -> Path:
    return folder_with("ifeval", "input_data.jsonl")
