"""Lists the patches that `install` applies to Horovod's last release before building it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tfposeidon.commands.versions import InstallError

HOROVOD_VERSION = "0.28.1"
CORRECTED_MARK = "+tfposeidon.3"


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Patch that replaces one passage in `file`, a path relative to Horovod's source."""

    file: str
    wrong: str
    right: str

    def apply(self, source: Path) -> None:
        """Patches the file; raises `InstallError` unless `wrong` occurs exactly once."""
        path = source / self.file
        text = path.read_text()
        if text.count(self.wrong) != 1:
            raise InstallError(
                f"A patch must match Horovod's source exactly once. Received: "
                f"{text.count(self.wrong)} matches in {self.file}. "
                f"Only horovod=={HOROVOD_VERSION} is supported."
            )
        path.write_text(text.replace(self.wrong, self.right))


CORRECTIONS = (
    # The XLA bridge uses headers that TensorFlow 2.16 removed.
    Correction(
        file="horovod/tensorflow/CMakeLists.txt",
        wrong='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        right="",
    ),
    # TensorFlow 2.21 does not export AsGpuStreamValue, so Horovod with NCCL would not load. The
    # header that Horovod includes has moved as well.
    Correction(
        file="horovod/tensorflow/mpi_ops.cc",
        wrong="""// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#else
#include "tensorflow/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
""",
        right="""#include "xla/stream_executor/stream.h"
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
""",
    ),
    # Record the CUDA version for `check`, and link the CUDA runtime before TensorFlow. TensorFlow
    # exports stubs of the runtime that load TensorFlow's version, and code of another nvcc would
    # call them. Set a path to NCCL relative to Horovod, because other environments install the same
    # wheel.
    Correction(
        file="horovod/tensorflow/CMakeLists.txt",
        wrong="target_link_libraries(${TF_TARGET_LIB} ${LINKER_LIBS} ${TF_LINKER_LIBS})\n",
        right="""if(HAVE_CUDA)
    file(APPEND "${CMAKE_LIBRARY_OUTPUT_DIRECTORY_ROOT}/metadata.json"
         "\\"cuda\\": \\"${CMAKE_CUDA_COMPILER_VERSION}\\",\\n")
    target_link_libraries(${TF_TARGET_LIB}
        "-Wl,--whole-archive,${CUDA_cudart_static_LIBRARY},--no-whole-archive")
    set_target_properties(${TF_TARGET_LIB} PROPERTIES
        BUILD_WITH_INSTALL_RPATH TRUE INSTALL_RPATH "$ENV{HOROVOD_NCCL_RPATH}"
        INSTALL_RPATH_USE_LINK_PATH "${HAVE_MPI}")
endif()
target_link_libraries(${TF_TARGET_LIB} ${LINKER_LIBS} ${TF_LINKER_LIBS})
""",
    ),
    # Process sets ignore the chosen network interface and bind to 127.0.1.1 on Debian.
    Correction(
        file="horovod/common/gloo/gloo_context.cc",
        wrong="  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx",
        right="  device_attr.iface = global_context.gloo_iface_;\n"
        "  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx",
    ),
    # Under Gloo, the stall inspector never reports a missing rank, because its list of ranks is
    # empty.
    Correction(
        file="horovod/common/gloo/gloo_controller.cc",
        wrong="global_ranks_.reserve(size_);",
        right="global_ranks_.resize(size_);",
    ),
    # With process sets, the end of one rank aborts all others, which can then neither save their
    # state nor report the cause.
    Correction(
        file="horovod/common/process_set.cc",
        wrong="""      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      if (ProcessSetHasJustBeenRemoved()) {
        break;
""",
        right="""      try {
        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);
      } catch (const std::exception& ex) {
        // A peer is gone: there is nobody left to agree with.
        id_to_process_set_[id].Finalize(status);
        DeregisterProcessSet(id);
        id_to_be_removed_ = NO_PENDING_REMOVAL;
        break;
      }
      if (ProcessSetHasJustBeenRemoved()) {
        break;
""",
    ),
    # Gloo announces a receive over the connection on which it also sends. If a large send comes
    # first, it delays the announcement and thus the other direction, and two ranks that exchange
    # messages use only half of their link's bandwidth. The next patch has the same reason.
    Correction(
        file="third_party/gloo/gloo/alltoallv.cc",
        wrong="""    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }
""",
        right="""    out->recv(
        recvRank, slot, outOffsetPerRank[recvRank], outLengthPerRank[recvRank]);
  }
  for (int i = 1; i < worldSize; i++) {
    int sendRank = (myRank + i) % worldSize;
    in->send(
        sendRank, slot, inOffsetPerRank[sendRank], inLengthPerRank[sendRank]);
  }
""",
    ),
    Correction(
        file="third_party/gloo/gloo/allgatherv.cc",
        wrong="""      out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);
      out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);
      continue;
""",
        right="""      out->recv(recvRank, slot, byteOffsets[recvIndex], byteCounts[recvIndex]);
      out->send(sendRank, slot, byteOffsets[sendIndex], byteCounts[sendIndex]);
      continue;
""",
    ),
    # `python -m tfposeidon check` recognizes a patched build by this mark.
    Correction(
        file="horovod/__init__.py",
        wrong=f"__version__ = '{HOROVOD_VERSION}'",
        right=f"__version__ = '{HOROVOD_VERSION}{CORRECTED_MARK}'",
    ),
)
