"""Rows of `check` about GPUs: installed versions, and those for which Horovod was built."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

from tfposeidon.commands import cuda


class GpuError(RuntimeError):
    """Error of incompatible CUDA components; the message names the remedy."""


def rows(gpus: int) -> list[tuple[str, str]]:
    """Returns table rows about GPUs; raises `GpuError` if the driver is too old."""
    # Horovod and TensorFlow must be loaded before this call. `gpus` is the number that TensorFlow
    # sees.
    tensorflow_cuda = cuda.tensorflow_cuda()
    horovod_cuda = _horovod_cuda()
    if not (gpus or cuda.driver_present() or horovod_cuda or tensorflow_cuda):
        return [("GPUs", "none, and no NVIDIA driver")]
    if gpus:
        _check_driver({"Horovod": horovod_cuda, "TensorFlow": tensorflow_cuda})
    return [
        ("GPUs", _gpus(gpus, tensorflow_cuda)),
        ("NVIDIA driver", _driver()),
        (
            "CUDA",
            f"TensorFlow for {tensorflow_cuda or 'CPUs'}, Horovod for {_built_for(horovod_cuda)}",
        ),
        ("cuDNN", _cudnn() or "not found"),
        ("NCCL", _nccl()),
        ("native ops", _native_ops(gpus)),
    ]


def _gpus(gpus: int, tensorflow_cuda: str | None) -> str:
    if gpus or not cuda.driver_present():
        return str(gpus)
    if tensorflow_cuda is None:
        return (
            "0 for TensorFlow, which is built for CPUs; python -m tfposeidon install --cuda prints "
            "the remedy"
        )
    problem = cuda.problem_with_driver(_numbers(tensorflow_cuda))
    if problem:
        return f"0 for TensorFlow. {problem}"
    # TensorFlow logs the libraries that it did not find, but not at our log level.
    return (
        "0 for TensorFlow, although a driver is loaded. TF_CPP_MIN_LOG_LEVEL=0 python -c 'import "
        'tensorflow as tf; tf.config.list_physical_devices("GPU")\' logs the cause. Usually CUDA '
        "libraries are missing: pip install 'tensorflow[and-cuda]', in the installed version"
    )


def _driver() -> str:
    version = cuda.driver_version()
    if version is None:
        return "none"
    return f"{cuda.driver_release() or ''} for CUDA up to {cuda.dotted(version)}".strip()


def _check_driver(built_for: dict[str, str | None]) -> None:
    for what, version in built_for.items():
        problem = cuda.problem_with_driver(_numbers(version or "0.0"))
        if problem:
            raise GpuError(f"{what} was built for CUDA {version}. {problem}")


def _numbers(version: str) -> cuda.Version:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _horovod_cuda() -> str | None:
    """Returns the version of CUDA that Horovod's build recorded in its metadata."""
    import horovod

    path = Path(horovod.__file__).with_name("metadata.json")
    return json.loads(path.read_text()).get("cuda") if path.exists() else None


def _built_for(horovod_cuda: str | None) -> str:
    import horovod.tensorflow as hvd

    # Only builds by `install` record the version.
    return horovod_cuda or ("an unknown version of CUDA" if hvd.cuda_built() else "CPUs")


def _cudnn() -> str | None:
    # Load the library by its name: if TensorFlow has loaded one, this returns the same.
    library = _loaded("libcudnn.so.9", "cudnn/lib")
    if library is None:
        return None
    library.cudnnGetVersion.restype = ctypes.c_size_t
    version = library.cudnnGetVersion()
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"


def _nccl() -> str:
    import horovod.tensorflow as hvd

    library = _loaded("libnccl.so.2", "nccl/lib")
    number = ctypes.c_int()
    if library is None or library.ncclGetVersion(ctypes.byref(number)):
        return "not found"
    seen, built = number.value, hvd.nccl_built()
    text = f"{_dotted(seen)}{f', Horovod for {_dotted(built)}' if built else ''}"
    if built > seen:
        # An older NCCL passed all tests on an H200, but NVIDIA does not guarantee it.
        text += f"; if collectives fail: pip install 'nvidia-nccl-cu12>={_dotted(built)}'"
    return text


def _dotted(code: int) -> str:
    """Returns an NCCL version code as text: 22707 is 2.27.7."""
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def _loaded(name: str, place: str) -> ctypes.CDLL | None:
    for path in (name, *(str(folder / place / name) for folder in cuda.wheels())):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _native_ops(gpus: int) -> str:
    from tfposeidon import native

    if native.has_gpu_kernels():
        if gpus:
            _check_native_ops()
        return "on CPUs and GPUs"
    if not gpus:
        return "on CPUs"
    return (
        "on CPUs only, so TensorFlow copies GPU tensors to host memory. Install nvcc, then run in "
        "tfposeidon's folder: pip install --force-reinstall --no-deps ."
    )


def _check_native_ops() -> None:
    import tensorflow as tf

    from tfposeidon import ops

    try:
        with tf.device("/GPU:0"):
            ops.l2_norms([tf.ones([1])])
    except tf.errors.InternalError as error:
        raise GpuError(
            "The native ops must be compiled for the architecture of this GPU. Received: "
            f"{error.message}. In tfposeidon's folder, name the architecture in setup.cfg "
            "([build_ext] gpus=70 for a V100, 60 for a P100) and run: pip install "
            "--force-reinstall --no-deps . These two need nvcc 12: set HOROVOD_CUDA_HOME to it."
        ) from error
