// Shared-memory record of the collectives of a group's ranks on one host. Each rank writes its collective before it
// calls oneCCL, then reads the other ranks' entries, so that at least one of two differing ranks detects it before
// their data can be mixed up.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "agreement.hpp"

namespace cputrain {

class Ledger {
 public:
  // Maps the file of this name, which the ranks on a host share; every rank of the group must construct it.
  // `names`: the global rank of each rank of the group.
  Ledger(const std::string& file, std::string group, int rank, std::vector<int> names);
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // Unlinks the file. Call it when all ranks have mapped it.
  void unlink() const;

  // Returns whether all ranks of the group are on this host. Valid after all ranks on this host have constructed it.
  bool has_all() const;

  // Records this rank's collective `number`. Returns an error message if another rank has recorded a different
  // collective of that number, else ""; the other ranks then get the message by disagreement(). `several_threads`:
  // whether more than one thread of this rank calls the group's collectives.
  std::string enter(uint64_t number, const Agreement& agreement, const std::string& description, bool several_threads);

  // Returns the error message of any rank on this host, "" if none.
  std::string disagreement() const;

 private:
  struct File {
    int descriptor = -1;
    ~File();
  };
  struct Header;
  struct Entry;
  static const size_t kEntryBytes;  // size of all entries of a rank

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
