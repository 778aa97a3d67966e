#include "mpi_end.hpp"

#include <cstdlib>

#include <dlfcn.h>

namespace cputrain {

// Uses dlsym instead of MPI's headers, which nothing else needs; oneCCL has loaded the library if it uses MPI.
bool end_mpi() {
  const char* path = std::getenv("CCL_MPI_LIBRARY_PATH");
  void* library = path == nullptr ? nullptr : dlopen(path, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return false;
  }
  const auto is = [library](const char* name) {
    const auto call = reinterpret_cast<int (*)(int*)>(dlsym(library, name));
    int flag = 0;
    return call != nullptr && call(&flag) == 0 && flag != 0;
  };
  const auto finalize = reinterpret_cast<int (*)()>(dlsym(library, "MPI_Finalize"));
  return finalize != nullptr && is("MPI_Initialized") && !is("MPI_Finalized") && finalize() == 0;
}

}  // namespace cputrain
