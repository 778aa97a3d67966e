// Finalizes MPI if oneCCL has initialized it and does not finalize it.
#pragma once

namespace cputrain {

// Calls MPI_Finalize, which waits for all ranks, if oneCCL's MPI is initialized and not finalized in this process;
// returns whether it was called and succeeded.
bool end_mpi();

}  // namespace cputrain
