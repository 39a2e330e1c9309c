"""Models on two ranks, connected by NCCL: the texts and logits of one process on the same GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.models.cuda_models import FAMILIES, on_cuda, outputs_of
from engine.models.tiny import save
from fairlead.base.errors import LoadFailed
from fairlead.engine.devices import find_device
from fairlead.engine.models.parallel import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
PROGRAM = Path(__file__).with_name("ranks_on_cuda.py")
NATIVE = FAMILIES.keys() - {"granite"}


def run_on_two_ranks(directories, file, dtype="float32"):
    """Return what the program has found for each folder."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "RANKS_DTYPE": dtype,
    }
    command = [sys.executable, str(PROGRAM), str(file), *map(str, directories)]
    subprocess.run(command, env=environment, check=True, timeout=200)
    return torch.load(file, weights_only=False)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp(name) for name in FAMILIES if name in NATIVE}
    for name, directory in made.items():
        save(FAMILIES[name], directory)
    return made


def test_two_ranks_compute_the_texts_and_logits_of_one_process(directories, tmp_path):
    found = run_on_two_ranks(directories.values(), tmp_path / "found")
    for (name, directory), (kernel, (texts, logits), texts_ahead) in zip(
        directories.items(), found, strict=True
    ):
        expected_texts, expected = outputs_of(on_cuda(directory))
        assert kernel == "triton × 2", name
        assert expected_texts == texts, name
        assert expected_texts == texts_ahead, name
        for ours, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max() or 1))


def test_two_ranks_in_bfloat16_are_near_one_process_in_float32(directories, tmp_path):
    ((_, (_, logits), _),) = run_on_two_ranks([directories["qwen3"]], tmp_path / "found", "bfloat16")
    _, (expected, *_) = outputs_of(on_cuda(directories["qwen3"]))
    assert (logits[0] - expected).norm() / expected.norm() < 0.06


def test_more_ranks_than_gpus_are_refused():
    count = torch.cuda.device_count() + 1
    with pytest.raises(LoadFailed, match=f"{count} CUDA devices from cuda:0 on are needed"):
        find_device("cuda", Ranks(0, count))
