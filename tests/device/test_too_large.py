"""What people are told of a model that does not fit: both sizes, a smaller model, and what the machine allows."""

import pytest

from mlx_backend.device.machine import Machine
from mlx_backend.device.memory import room_for_weights, too_large
from mlx_backend.models.spec import RECOMMENDED_MODELS

GB = 1 << 30
GPT_OSS = "mlx-community/gpt-oss-20b-MXFP4-Q8"
GPT_OSS_BYTES = 12_100_000_000
SMALLER = [each[:2] for each in RECOMMENDED_MODELS[::-1]]


def mac(gigabytes: int) -> Machine:
    return Machine(system="Darwin", processor="arm64", macos=15, memory=gigabytes * GB)


def recommended_limit(gigabytes: int) -> int:
    """What models may use by default on a Mac that recommends two thirds of its memory for the GPU."""
    return int(gigabytes * GB * 2 / 3 * 0.9)


def test_gpt_oss_20b_on_a_mac_with_16_gb() -> None:
    limit = recommended_limit(16)
    assert room_for_weights(limit) < GPT_OSS_BYTES
    said = too_large(GPT_OSS, GPT_OSS_BYTES, limit, is_given=False, smaller=SMALLER, machine=mac(16))
    assert said == (
        "The model 'mlx-community/gpt-oss-20b-MXFP4-Q8' needs 11.3 GB of memory for its weights alone, and models may "
        "use 9.12 GB of the 16 GB here. A smaller one that fits: mlx-community/Qwen3.5-9B-4bit "
        "(5.57 GB). `sudo sysctl iogpu.wired_limit_mb=13824` lets models use enough until the next restart of the "
        "Mac, and leaves 2.50 GB for everything else. --memory-gb 12 loads it regardless; the Mac may then swap, and "
        "answer very slowly."
    )


def test_what_is_advised_would_help() -> None:
    after_sysctl = int((13824 << 20) * 0.9)
    assert room_for_weights(after_sysctl) >= GPT_OSS_BYTES
    assert room_for_weights(12 * GB) >= GPT_OSS_BYTES


def test_gpt_oss_20b_fits_a_mac_with_24_gb() -> None:
    assert room_for_weights(recommended_limit(24)) > GPT_OSS_BYTES


def test_a_mac_that_cannot_spare_the_memory_is_not_told_to() -> None:
    said = too_large(
        "m/x", 15_500_000_000, recommended_limit(16), is_given=False, smaller=SMALLER, machine=mac(16)
    )
    assert "sysctl" not in said
    assert "--memory-gb 16" in said
    huge = too_large("m/x", 60 * GB, recommended_limit(16), is_given=False, smaller=SMALLER, machine=mac(16))
    assert "--memory-gb" not in huge
    assert huge.endswith("A smaller one that fits: mlx-community/Qwen3.5-9B-4bit (5.57 GB).")


def test_no_smaller_model_is_named_where_none_fits() -> None:
    said = too_large("m/x", 6 * GB, 2 * GB, is_given=False, smaller=SMALLER, machine=mac(4))
    assert "smaller" not in said


def test_linux_has_no_sysctl_for_it() -> None:
    machine = Machine(system="Linux", memory=16 * GB)
    assert too_large(GPT_OSS, GPT_OSS_BYTES, 10 * GB, is_given=False, machine=machine) == (
        f"The model '{GPT_OSS}' needs 11.3 GB of memory for its weights alone, and models may use 9.50 GB here. "
        "If there is more memory, --memory-gb 12 raises the limit."
    )


@pytest.mark.parametrize("gigabytes", [16, 64])
def test_a_limit_that_was_given_is_the_one_to_raise(gigabytes: int) -> None:
    said = too_large(GPT_OSS, GPT_OSS_BYTES, 8 * GB, is_given=True, machine=mac(gigabytes))
    assert said == (
        f"The model '{GPT_OSS}' needs 11.3 GB of memory for its weights alone, and --memory-gb 8 leaves 7.60 GB for "
        "weights. If there is more memory, --memory-gb 12 raises the limit."
    )
