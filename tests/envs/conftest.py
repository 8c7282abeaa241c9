import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    folder = Path(os.environ.get("POISE_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"
    if not (folder / "train.jsonl").is_file():
        pytest.skip("GSM8K is not here: set POISE_DATA to a folder with gsm8k/train.jsonl")
    return folder
