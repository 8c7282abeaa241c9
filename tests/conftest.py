"""What every test gets: one thread, seeded generators; for tensor code also checked shapes and NaN-filled memory."""

import contextlib
import random
from pathlib import Path

import hypothesis
import jaxtyping
import numpy as np
import pytest
import torch

with contextlib.suppress(ModuleNotFoundError):  # Triton reads its kernels' source, so they stay as written
    import poise.ops.attention_triton_kernels  # noqa: F401

# Annotations of these packages are checked when jaxtyping is switched on, see `tensor_code_is_watched`.
jaxtyping.install_import_hook(["poise.ops", "poise.model"], "beartype.beartype")
jaxtyping.config.update("jaxtyping_disable", True)
torch.set_num_threads(1)
# A machine that stands still for a while makes no example wrong.
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("patient")

WATCHED = {"ops", "model"}


@pytest.fixture(scope="session")
def o200k_folder() -> Path:
    """A folder with ``o200k_base.tiktoken`` (as openai-harmony wants it) and ``tokenizer.json``."""
    from o200k import o200k_files

    return o200k_files()


@pytest.fixture(autouse=True)
def generators_are_seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def tensor_code_is_watched(request):
    """In tests/ops and tests/model: shapes and types are checked, and torch.empty gives NaN."""
    if Path(request.path).parent.name not in WATCHED:
        yield
        return
    jaxtyping.config.update("jaxtyping_disable", False)
    torch.use_deterministic_algorithms(True)  # on its own this fills uninitialized memory, see the next line
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def annotations_unchecked():
    """For tests of the errors that a user sees, who runs without annotation checks."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
