#include "mpi_end.hpp"

#include <cstdlib>

#include <dlfcn.h>

namespace cputrain {

namespace {

constexpr int kCommWorld = 0x44000000;  // MPI_COMM_WORLD in the ABI of MPICH 3 and Intel MPI

// Returns a function of oneCCL's MPI; null if that is not initialized or is finalized. Uses dlsym instead of MPI's
// headers, which nothing else needs; oneCCL has loaded the library if it uses MPI.
template <typename Function>
Function of_live_mpi(const char* name) {
  const char* path = std::getenv("CCL_MPI_LIBRARY_PATH");
  void* library = path == nullptr ? nullptr : dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return nullptr;
  }
  const auto is = [library](const char* state) {
    const auto call = reinterpret_cast<int (*)(int*)>(dlsym(library, state));
    int flag = 0;
    return call != nullptr && call(&flag) == 0 && flag != 0;
  };
  return is("MPI_Initialized") && !is("MPI_Finalized") ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

}  // namespace

bool end_mpi() {
  const auto finalize = of_live_mpi<int (*)()>("MPI_Finalize");
  return finalize != nullptr && finalize() == 0;
}

void abort_mpi(int status) {
  if (const auto abort = of_live_mpi<int (*)(int, int)>("MPI_Abort"); abort != nullptr) {
    abort(kCommWorld, status);
  }
}

}  // namespace cputrain
