"""`kllm capacity` as users and scripts run it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kllm.costs.hardware import HARDWARE
from kllm.costs.model_specs import MODELS

GLM_ON_B300 = ("--model", "glm-5.2", "--hardware", "b300")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kllm.cli", "capacity", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def report(*arguments: str) -> dict:
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_tensor_and_data_parallel_attention_hold_what_was_reported():
    tensor = report(*GLM_ON_B300, "--gpus", "8", "--layout", "tp8")
    data = report(*GLM_ON_B300, "--gpus", "8", "--layout", "dp8ep8")
    assert tensor["tokens"] == pytest.approx(2.9e6, rel=0.01)
    assert data["tokens"] == pytest.approx(21.2e6, rel=0.01)
    assert tensor["kv_bytes_per_token"] == data["kv_bytes_per_token"] == 53_940
    assert tensor["weight_bytes_per_gpu"] == pytest.approx(94.4e9, rel=0.005)
    assert (data["layout"], data["gpus"]) == ("dp8ep8", 8)
    assert "nic_gb_s" in data["uncertain"]["hardware"]


def test_memory_formats_and_mtp_can_be_set():
    given = ("--usable-memory-gb", "254.6", "--activation-gb", "2", "--kv-dtype", "bf16", "--mtp", "--gpus", "8")
    found = report(*GLM_ON_B300, *given)
    assert found["usable_bytes_per_gpu"] == 254_600_000_000
    assert found["activation_bytes_per_gpu"] == 2_000_000_000
    assert found["kv_bytes_per_token"] == 95_232 + 1_152 + 256
    assert found["mtp"] is True


def test_gpus_and_layout_default_to_the_smallest_that_fits():
    found = report("--model", "GLM-5.2", "--hardware", "H200")
    assert (found["gpus"], found["layout"]) == (8, "dp8ep8")


def test_the_table_says_the_same():
    result = run("--model", "deepseek-v4-flash", "--hardware", "h20", "--gpus", "4")
    assert result.returncode == 0, result.stderr
    assert "tokens" in result.stdout
    assert "15.4 MB" in result.stdout
    assert "uncertain figures of deepseek-v4-flash: attention" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "gpt-9", "--hardware", "h100"), "unknown model 'gpt-9': known are smollm2-135m"),
        (("--model", "glm-5.2", "--hardware", "abacus"), "unknown hardware 'abacus': known are h100"),
        ((*GLM_ON_B300, "--gpus", "2"), "glm-5.2 does not fit: tp2 on b300 needs 373.5 GB of weights"),
        ((*GLM_ON_B300, "--gpus", "0"), "--gpus"),
        ((*GLM_ON_B300, "--gpus", "4", "--layout", "dp8ep8"), "--gpus 4: layout dp8ep8 is one of 8 GPUs"),
        ((*GLM_ON_B300, "--layout", "tp8pp2"), "pipeline parallelism is not modelled"),
        ((*GLM_ON_B300, "--usable-memory-gb", "999"), "--usable-memory-gb: b300 has 287.8 GB"),
        ((*GLM_ON_B300, "--usable-memory-gb", "nan"), "--usable-memory-gb: not a size in GB"),
        ((*GLM_ON_B300, "--activation-gb", "-1"), "--activation-gb: not a size in GB"),
        ((*GLM_ON_B300, "--weights-dtype", "fp3"), "unknown weight format 'fp3'"),
        (("--model", "llama-70b", "--hardware", "h100", "--mtp"), "llama-70b has no MTP layer"),
        (("--hardware", "h100"), "--model"),
    ],
)
def test_errors_are_short_and_have_a_status(arguments, message):
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_help_names_every_preset():
    text = "".join(run("--help").stdout.replace("-\n", "-").split()).replace("\n", "")
    assert all(name in text for name in [*MODELS, *HARDWARE])
