// Ends MPI if oneCCL has initialized it and does not finalize it.
#pragma once

namespace cputrain {

// Calls MPI_Finalize, which waits for all ranks, if oneCCL's MPI is initialized and not finalized in this process;
// returns whether it was called and succeeded.
bool end_mpi();

// Calls MPI_Abort in the same case: the launcher ends the other ranks and returns this status. Usually does not return.
void abort_mpi(int status);

}  // namespace cputrain
