// Split the rows of images into chunks and share them between threads.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <vector>

// Symbols of the OpenMP runtime that torch has loaded, libgomp or libiomp5. Compiling with -fopenmp would link a second
// runtime, whose threads would compete with torch's.
extern "C" {
[[gnu::weak]] void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
[[gnu::weak]] int omp_get_thread_num();
[[gnu::weak]] int omp_get_num_threads();
}

namespace {

constexpr size_t kBlock = 64;            // rows that are summed in float before the sum is added in double
constexpr size_t kMostChunks = 256;      // maximum number of chunks
constexpr size_t kCacheBytes = 8 << 20;  // larger inputs are in memory, which is fastest to read row by row
constexpr size_t kThreadValues = 32768;  // fewer values are computed by one thread

const pid_t kProcess = getpid();

// Rows split into chunks whose size is a multiple of kBlock.
struct Chunks {
  size_t rows, size, count;

  explicit Chunks(size_t all) : rows(all) {
    size = std::max<size_t>(1, (all + kMostChunks * kBlock - 1) / (kMostChunks * kBlock)) * kBlock;
    count = (all + size - 1) / size;
  }
  size_t first(size_t chunk) const { return chunk * size; }
  size_t length(size_t chunk) const { return std::min(size, rows - first(chunk)); }
};

// Calls work(first, end) for ranges of the chunks, on the calling thread or on its OpenMP team of `threads` threads, of
// which the runtime may provide fewer. (A team of another size would make the runtime end and start threads.) A forked
// child uses one thread, because it would wait for its parent's threads.
template <typename Work>
void share(size_t chunks, size_t values, int threads, const Work& work) {
  const bool alone = threads < 2 || chunks < 2 || values < kThreadValues;
  if (alone || GOMP_parallel == nullptr || getpid() != kProcess) {
    work(size_t{0}, chunks);
    return;
  }
  struct Region {
    const Work& work;
    size_t chunks;
  } region{work, chunks};
  GOMP_parallel(
      [](void* data) {
        const Region& own = *static_cast<Region*>(data);
        const size_t thread = omp_get_thread_num(), team = omp_get_num_threads();
        own.work(own.chunks * thread / team, own.chunks * (thread + 1) / team);
      },
      &region, static_cast<unsigned>(threads), 0);
}

// Returns the number of the calling thread in its team, 0 outside a team.
inline size_t thread_number() { return omp_get_thread_num == nullptr ? 0 : static_cast<size_t>(omp_get_thread_num()); }

// Returns a thread-local buffer of at least `count` values, which is kept between calls.
template <typename Value, int kPurpose>
Value* kept(size_t count) {
  static thread_local std::vector<Value> memory;
  if (memory.size() < count) {
    memory.resize(count);
  }
  return memory.data();
}

}  // namespace
