// What the ranks of a group on one host are in. Each writes its collective down before it calls oneCCL, and then reads
// what the others have written: of two ranks that differ, one sees it before their data can be mixed up.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "agreement.hpp"

namespace cputrain {

class Ledger {
 public:
  // Maps the file of this name, which the ranks of a host share; every rank of the group has to construct it.
  // `names`: the number of each rank of the group as people know it.
  Ledger(const std::string& file, std::string group, int rank, std::vector<int> names);
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // Removes the file's name, once all ranks have mapped it.
  void unlink() const;

  // Whether all ranks of the group are of this host; once all of this host's have constructed it.
  bool has_all() const;

  // Writes down this rank's collective of that number. Returns what is wrong, "" if nothing is, where another rank has
  // written down another collective of that number; the other ranks then learn it too. `several_threads`: whether
  // more than one thread of this rank calls the group's collectives.
  std::string enter(uint64_t number, const Agreement& agreement, const std::string& description, bool several_threads);

  // What a rank of this host has found to be wrong; "" if nothing.
  std::string disagreement() const;

 private:
  struct File {
    int descriptor = -1;
    ~File();
  };
  struct Header;
  struct Entry;
  static const size_t kEntryBytes;  // of all entries of a rank

  Entry& entry_of(int rank, uint64_t number) const;
  std::atomic<uint64_t>* bytes_of(int rank, uint64_t number) const;
  size_t list_words() const { return 2 * size_; }
  void allocate(size_t start, size_t bytes);
  [[noreturn]] void fail(int error);
  void write(uint64_t number, const Agreement& agreement, const std::string& description, bool several_threads);
  std::string wrong(uint64_t number, const std::string& bytes);

  const std::string path_, group_;
  const int rank_, size_;
  const std::vector<int> names_;
  size_t rank_bytes_ = 0, total_bytes_ = 0;
  File file_;
  bool has_lists_ = false;
  char* base_ = nullptr;
};

}  // namespace cputrain
