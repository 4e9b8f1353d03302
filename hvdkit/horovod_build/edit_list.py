"""The edits that Horovod 0.28.1 needs: file, text to find, text to put, why, for which versions."""

from __future__ import annotations

from hvdkit.horovod_build.edits import Edit

_STANDARD = (
    "torch >= 2.1 and the absl inside TensorFlow refuse C++14, torch >= 2.14 refuses C++17; both "
    "CMake files must agree, or gloo and the extension disagree about inline constants"
)
_INCLUDES = "g++ >= 13 no longer brings this header along (horovod#3957)"
_MPIRUN = "Open MPI 5 refuses the spelling with one dash; Open MPI 4 knows both"
_SSH = (
    "Open MPI 5 renamed the ssh launcher's settings and ignores the old names without a word; "
    "Open MPI 4 ignores the new ones, so both are given"
)
_GPU_GUARD = (
    "a CPU build against a CUDA build of torch would become a CUDA build wherever nvcc is found"
)
_LIBCUDA = "the driver brings libcuda.so.1; libcuda.so is there with a toolkit's stubs only"
_GROUP = (
    "a grouped operation reported the status of its last tensor only: where another tensor's "
    "shapes differed between ranks, the result was memory that nothing had written"
)

_BUILD = (
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        "set(CMAKE_CXX_STANDARD @CXX_STANDARD@)",
        _STANDARD,
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 14)",
        "    set(CMAKE_CXX_STANDARD @CXX_STANDARD@)",
        _STANDARD,
        {"torch": ">=1.5"},
    ),
    Edit(
        "CMakeLists.txt",
        "set(CMAKE_CXX_EXTENSIONS OFF)\n",
        "set(CMAKE_CXX_EXTENSIONS OFF)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH TRUE)\n"
        'set(CMAKE_INSTALL_RPATH "$ENV{HVDKIT_RUNPATH}")\n',
        "an absolute library path makes a moved or copied environment use another MPI",
    ),
    Edit(
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        "",
        "TensorFlow moved the XLA headers; these operations are off by default",
        {"tensorflow": ">=2.16"},
    ),
    Edit(
        "setup.py",
        "setup_requires=require_list if is_build_action() else [],",
        "setup_requires=[],",
        "it would fetch packages from the network in the middle of a build",
    ),
    Edit(
        "horovod/torch/CMakeLists.txt",
        '"from distutils.sysconfig import get_python_inc; print(get_python_inc())"',
        "\"import sysconfig; print(sysconfig.get_path('include'))\"",
        "Python >= 3.12 has no distutils",
    ),
)

_CUDA = (
    Edit(
        "CMakeLists.txt",
        "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)",
        "include(CheckLanguage)\n"
        "if(DEFINED HOROVOD_GPU_OPERATIONS)\n    check_language(CUDA)\nendif()\n"
        "if(DEFINED HOROVOD_GPU_OPERATIONS AND NOT CMAKE_CUDA_COMPILER)",
        _GPU_GUARD,
    ),
    Edit(
        "CMakeLists.txt",
        "if(CMAKE_CUDA_COMPILER)\n",
        "if(DEFINED HOROVOD_GPU_OPERATIONS AND CMAKE_CUDA_COMPILER)\n",
        _GPU_GUARD,
    ),
    Edit(
        "cmake/Modules/FindPytorch.cmake",
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n',
        'string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)\n'
        "if(NOT DEFINED HOROVOD_GPU_OPERATIONS)\n    set(Pytorch_CUDA FALSE)\nendif()\n",
        _GPU_GUARD,
    ),
    Edit(
        "horovod/torch/cuda_util.cc",
        'dlopen("libcuda.so", RTLD_LAZY)',
        'dlopen("libcuda.so.1", RTLD_LAZY)',
        _LIBCUDA,
    ),
)

_HEADERS = (
    Edit(
        "horovod/common/common.h",
        "#include <functional>\n#include <memory>\n#include <string>\n",
        "#include <cstdint>\n#include <functional>\n#include <memory>\n"
        "#include <stdexcept>\n#include <string>\n",
        _INCLUDES,
    ),
    Edit(
        "horovod/common/message.h",
        "#include <string>\n#include <vector>\n",
        "#include <cstdint>\n#include <string>\n#include <vector>\n",
        _INCLUDES,
    ),
    Edit(
        "third_party/gloo/gloo/types.h",
        "#include <iostream>\n",
        "#include <cstdint>\n#include <iostream>\n",
        _INCLUDES,
    ),
    Edit(
        "third_party/gloo/gloo/common/string.h",
        "#include <sstream>\n#include <vector>\n",
        "#include <cstdint>\n#include <sstream>\n#include <string>\n#include <vector>\n",
        _INCLUDES,
    ),
    Edit(
        "third_party/gloo/gloo/common/error.h",
        "#include <exception>\n",
        "#include <exception>\n#include <stdexcept>\n#include <string>\n",
        _INCLUDES,
    ),
    Edit(
        "third_party/gloo/gloo/common/logging.h",
        "#include <limits>\n#include <vector>\n",
        "#include <cstdint>\n#include <limits>\n#include <string>\n#include <vector>\n",
        _INCLUDES,
    ),
)

_LAUNCHER = (
    Edit(
        "horovod/runner/mpi_run.py",
        "_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']",
        "_NO_BINDING_ARGS = ['--bind-to none', '--map-by slot']",
        _MPIRUN,
    ),
    Edit(
        "horovod/runner/mpi_run.py",
        "'-mca plm_rsh_args \\\"{joined_ssh_args}\\\"'",
        '\'-mca plm_rsh_args \\"{joined_ssh_args}\\" -mca plm_ssh_args \\"{joined_ssh_args}\\"\'',
        _SSH,
    ),
    Edit(
        "horovod/runner/mpi_run.py",
        "        mpi_impl_flags.append('-mca plm_rsh_no_tree_spawn true')\n",
        "        mpi_impl_flags.append('-mca plm_rsh_no_tree_spawn true')\n"
        "        mpi_impl_flags.append('-mca plm_ssh_no_tree_spawn true')\n"
        "        mpi_impl_flags.append('-mca plm_ssh_num_concurrent {}'.format(len(host_names)))\n",
        _SSH,
    ),
    Edit(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable\n",
        "from shutil import which as find_executable\n",
        "Python >= 3.12 has no distutils, and every start of horovodrun imports this file",
    ),
    Edit(
        "horovod/runner/js_run.py",
        "mpi_impl_flags, _ = _get_mpi_implementation_flags(",
        "mpi_impl_flags, _, _ = _get_mpi_implementation_flags(",
        "the function returns three values; every jsrun launch failed",
    ),
    Edit(
        "horovod/runner/js_run.py",
        "        fd.close()\n",
        "        os.close(fd)\n",
        "the descriptor is a number; every jsrun launch without a rank file of its own failed",
    ),
    Edit(
        "horovod/common/basics.py",
        "        self.MPI_LIB_CTYPES = ctypes.CDLL(full_path, mode=ctypes.RTLD_GLOBAL)\n",
        "        self.MPI_LIB_CTYPES = ctypes.CDLL(full_path, mode=ctypes.RTLD_GLOBAL)\n"
        "        from horovod.common.hvdkit_check import check_loaded_mpi\n"
        "        check_loaded_mpi(self.MPI_LIB_CTYPES)\n",
        "Open MPI 4.1 and 5.0 share one library name; the wrong one must not be used unnoticed",
    ),
)

_GROUPS = (
    Edit(
        "horovod/tensorflow/mpi_ops.cc",
        "(*callback_count)++;\n",
        "(*callback_count)++;\n        context->SetStatus(ConvertStatus(status));\n",
        _GROUP,
        times=3,
    ),
    Edit(
        "horovod/torch/mpi_ops_v2.cc",
        "(*callback_count)++;\n",
        "(*callback_count)++;\n"
        "        if (!status.ok()) {\n"
        "          handle_manager.MarkFailed(handle, status);\n"
        "        }\n",
        _GROUP,
        times=6,
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "  void MarkDone(int handle, const Status& status);\n",
        "  void MarkDone(int handle, const Status& status);\n"
        "  void MarkFailed(int handle, const Status& status);\n",
        _GROUP,
    ),
    Edit(
        "horovod/torch/handle_manager.h",
        "results_;\n",
        "results_;\n  std::unordered_map<int, Status> failures_;\n",
        _GROUP,
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "  results_[handle] = std::make_shared<Status>(status);\n}\n",
        "  auto failure = failures_.find(handle);\n"
        "  bool failed = failure != failures_.end();\n"
        "  results_[handle] = std::make_shared<Status>(failed ? failure->second : status);\n"
        "  failures_.erase(handle);\n"
        "}\n\n"
        "void HandleManager::MarkFailed(int handle, const Status& status) {\n"
        "  std::lock_guard<std::mutex> guard(mutex_);\n"
        "  failures_.emplace(handle, status);\n"
        "}\n",
        _GROUP,
    ),
    Edit(
        "horovod/torch/handle_manager.cc",
        "  results_.clear();\n",
        "  results_.clear();\n  failures_.clear();\n",
        _GROUP,
    ),
)

EDITS: tuple[Edit, ...] = (*_BUILD, *_CUDA, *_HEADERS, *_LAUNCHER, *_GROUPS)
