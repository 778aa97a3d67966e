// The end of MPI where oneCCL has started it and does not end it.
#pragma once

namespace cputrain {

// Calls MPI_Finalize, which waits for all ranks, where oneCCL's MPI has been started and not ended in this process;
// whether it has.
bool end_mpi();

}  // namespace cputrain
