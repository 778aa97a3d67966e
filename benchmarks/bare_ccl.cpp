// oneCCL without Python or PyTorch: medians of an all-reduce of float32, one JSON line from rank 0.
//   bare_ccl RANK SIZE ADDRESS_FILE ROUNDS BYTES...
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <oneapi/ccl.hpp>
#include <string>
#include <thread>
#include <vector>

int main(int argc, char** argv) {
  const int rank = std::stoi(argv[1]), size = std::stoi(argv[2]), rounds = std::stoi(argv[4]);
  const std::string file = argv[3];
  ccl::init();
  ccl::shared_ptr_class<ccl::kvs> kvs;
  if (rank == 0) {
    kvs = ccl::create_main_kvs();
    const auto address = kvs->get_address();
    std::ofstream(file + ".partial", std::ios::binary).write(address.data(), address.size());
    std::rename((file + ".partial").c_str(), file.c_str());
  } else {
    while (!std::ifstream(file)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    ccl::kvs::address_type address;
    std::ifstream(file, std::ios::binary).read(address.data(), address.size());
    kvs = ccl::create_kvs(address);
  }
  const auto comm = ccl::create_communicator(size, rank, kvs);
  for (int i = 5; i < argc; i++) {
    const size_t count = std::stoul(argv[i]) / 4;
    std::vector<float> values(count, 1.0f);
    std::vector<double> seconds;
    for (int round = 0; round < rounds; round++) {
      char token = 0;
      ccl::allreduce(&token, &token, 1, ccl::datatype::uint8, ccl::reduction::max, comm).wait();
      const auto start = std::chrono::steady_clock::now();
      ccl::allreduce(values.data(), values.data(), count, ccl::datatype::float32, ccl::reduction::sum, comm).wait();
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(seconds.begin(), seconds.end());
    if (rank == 0) {
      std::printf("{\"bytes\": %zu, \"seconds\": %.9f}\n", count * 4, seconds[rounds / 2]);
      std::fflush(stdout);
    }
  }
}
