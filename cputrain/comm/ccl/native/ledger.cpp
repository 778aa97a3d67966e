#include "ledger.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace cputrain {

namespace {

constexpr uint64_t kEntries = 128;  // collectives by which a rank can be ahead of another and still be compared
constexpr size_t kTextBytes = 236;
constexpr uint32_t kTensors = 48;  // tensors of a collective that are recorded, to report the first different one
constexpr size_t kNamed = 8;
constexpr auto kSeveralThreads =
    "; more than one thread of a rank calls them: give the other thread, such as dcp.async_save's, a separate group "
    "(process_group=torch.distributed.new_group())";
constexpr size_t kPageBytes = 4096;

constexpr size_t whole_pages(size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

std::string named(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (size_t i = 0; i < std::min(ranks.size(), kNamed); i++) {
    text += c10::str(" ", ranks[i]);
  }
  return text + (ranks.size() > kNamed ? " and more" : "");
}

void copy_text(char* to, size_t room, const std::string& text) {
  const auto length = std::min(text.size(), room - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

}  // namespace

struct Ledger::Header {
  std::atomic<int> present;  // number of ranks on this host
  std::atomic<int> found;  // 1: a rank is writing the disagreement to `wrong`, 2: it is written
  char wrong[1024];
  std::atomic<int> ranks[1];  // rank + 1 of each rank on this host, 0 while it is being written
};

// A rank's collective of one number; `number` is written last.
struct Ledger::Entry {
  std::atomic<uint64_t> number;
  std::atomic<uint64_t> digest;
  uint32_t tensors;
  bool several_threads;
  char text[kTextBytes];
  uint64_t listed[kTensors];  // as in Agreement
};

const size_t Ledger::kEntryBytes = whole_pages(kEntries * sizeof(Entry));

Ledger::Ledger(const std::string& file, std::string group, int rank, std::vector<int> names)
    : path_("/dev/shm/cputrain_" + file), group_(std::move(group)), rank_(rank), size_(names.size()), names_(std::move(names)) {
  CPUTRAIN_REQUIRE(
      file.size() == 32 && file.find_first_not_of("0123456789abcdef") == std::string::npos, "ccl: group ", group_,
      " finds another job's value in the job's store: set MASTER_PORT to a free port");
  const auto header_bytes = whole_pages(sizeof(Header) + size_ * sizeof(std::atomic<int>));
  rank_bytes_ = kEntryBytes + whole_pages(kEntries * list_words() * sizeof(uint64_t));
  total_bytes_ = header_bytes + rank_bytes_ * size_;
  file_.descriptor = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file_.descriptor < 0 || ftruncate(file_.descriptor, static_cast<off_t>(total_bytes_)) != 0) {
    fail(errno);
  }
  void* mapped = mmap(nullptr, total_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.descriptor, 0);
  if (mapped == MAP_FAILED) {
    fail(errno);
  }
  base_ = static_cast<char*>(mapped);
  allocate(0, header_bytes);
  allocate(header_bytes + rank_bytes_ * rank_, kEntryBytes);
  auto& header = *reinterpret_cast<Header*>(base_);
  header.ranks[header.present++] = rank_ + 1;
}

Ledger::~Ledger() {
  munmap(base_, total_bytes_);
}

Ledger::File::~File() {
  if (descriptor >= 0) {
    close(descriptor);
  }
}

// Reserves memory before it is written, because writing to a full /dev/shm would end the process by SIGBUS.
void Ledger::allocate(size_t start, size_t bytes) {
  if (int error = posix_fallocate(file_.descriptor, static_cast<off_t>(start), static_cast<off_t>(bytes))) {
    fail(error);
  }
}

void Ledger::fail(int error) {
  unlink();
  refuse(
      "ccl: group ", group_, " cannot share memory in /dev/shm, ", std::strerror(error),
      error == ENOSPC ? ": enlarge it (docker --shm-size=2g), or remove files from it"
                      : ": give this user write permission for it");
}

bool Ledger::has_all() const {
  return reinterpret_cast<const Header*>(base_)->present == size_;
}

void Ledger::unlink() const {
  ::unlink(path_.c_str());
}

Ledger::Entry& Ledger::entry_of(int rank, uint64_t number) const {
  auto* entries = reinterpret_cast<Entry*>(base_ + total_bytes_ - rank_bytes_ * (size_ - rank));
  return entries[number % kEntries];
}

// Returns the bytes that a rank gives to each rank in collective `number`, followed by the bytes that it receives.
std::atomic<uint64_t>* Ledger::bytes_of(int rank, uint64_t number) const {
  auto* lists = reinterpret_cast<char*>(&entry_of(rank, 0)) + kEntryBytes;
  return reinterpret_cast<std::atomic<uint64_t>*>(lists) + number % kEntries * list_words();
}

void Ledger::write(
    uint64_t number, const Agreement& agreement, const std::string& description, bool several_threads) {
  auto& entry = entry_of(rank_, number);
  entry.number = 0;
  entry.digest = agreement.digest;
  entry.several_threads = several_threads;
  copy_text(entry.text, kTextBytes, description);
  entry.tensors = agreement.tensors.size();
  std::copy_n(agreement.tensors.begin(), std::min<size_t>(entry.tensors, kTensors), entry.listed);
  if (!agreement.give.empty()) {
    auto* bytes = bytes_of(rank_, number);
    if (!has_lists_) {  // allocated on demand, because most groups do not need them
      allocate(reinterpret_cast<char*>(bytes_of(rank_, 0)) - base_, kEntries * list_words() * sizeof(uint64_t));
      has_lists_ = true;
    }
    std::ranges::copy(agreement.give, bytes);
    std::ranges::copy(agreement.receive, bytes + size_);
  }
  entry.number = number;  // sequentially consistent like the reads in enter(), so one of two ranks sees the other
}

std::string Ledger::enter(
    uint64_t number, const Agreement& agreement, const std::string& description, bool several_threads) {
  write(number, agreement, description, several_threads);
  const auto& header = *reinterpret_cast<const Header*>(base_);
  const int present = header.present;
  for (int i = 0; i < present; i++) {
    const int other = header.ranks[i] - 1;
    if (other < 0 || other == rank_) {
      continue;
    }
    const auto& entry = entry_of(other, number);
    const bool there = entry.number == number;
    const bool same = there && entry.digest == agreement.digest, has_lists = same && !agreement.give.empty();
    const auto* bytes = bytes_of(other, number);
    const size_t sent = has_lists ? bytes[rank_].load() : 0;
    const size_t expected = has_lists ? bytes[size_ + rank_].load() : 0;
    if (!there || entry.number != number) {
      continue;  // not called yet, or the rank is so far ahead that it has overwritten, or is overwriting, this entry
    }
    if (!same) {
      return wrong(number, "");
    }
    if (has_lists && (agreement.give[other] != expected || agreement.receive[other] != sent)) {
      return wrong(
          number, c10::str(
                      "; rank ", names_[rank_], " sends ", agreement.give[other], " bytes to rank ", names_[other],
                      ", which expects ", expected, ", and expects ", agreement.receive[other],
                      " bytes from it, which sends ", sent));
    }
  }
  return {};
}

// Describes which ranks are in which collective; the first description is stored for all ranks.
std::string Ledger::wrong(uint64_t number, const std::string& bytes) {
  auto& header = *reinterpret_cast<Header*>(base_);
  struct Called {
    const Entry* entry;
    std::vector<int> ranks;
  };
  std::vector<Called> all;  // different collectives, each with its ranks
  bool several_threads = false;
  for (int rank = 0; rank < size_; rank++) {
    const bool here = std::ranges::any_of(
        header.ranks, header.ranks + header.present, [rank](const auto& each) { return each == rank + 1; });
    if (here && entry_of(rank, number).number == number) {
      const auto& entry = entry_of(rank, number);
      several_threads = several_threads || entry.several_threads;
      const auto same = std::ranges::find_if(all, [&entry](const auto& called) {
        return called.entry->digest == entry.digest && std::string_view(called.entry->text) == entry.text;
      });
      if (same == all.end()) {
        all.push_back({&entry, {names_[rank]}});
      } else {
        same->ranks.push_back(names_[rank]);
      }
    }
  }
  std::string text;
  for (const auto& [entry, ranks] : all) {
    text += c10::str(text.empty() ? "" : ", ", named(ranks), " in ", entry->text);
  }
  // Find the first different tensor, unless it is among the tensors shown in the texts.
  const auto& first = *all.front().entry;
  auto count = std::min(first.tensors, kTensors), different = count;
  for (const auto& [entry, _] : all) {
    count = std::min(count, entry->tensors);
    const auto [here, there] = std::mismatch(first.listed, first.listed + count, entry->listed);
    different = std::min<uint32_t>(different, here - first.listed);
  }
  if (different >= kShown && different < count) {
    text += c10::str("; of these, tensor ", different + 1, " is ");
    for (const auto& [entry, ranks] : all) {
      const auto tensor = entry->listed[different];
      text += c10::str(
          entry == &first ? "" : ", ", c10::toString(static_cast<at::ScalarType>(tensor >> kTypeShift)), "[",
          tensor << (64 - kTypeShift) >> (64 - kTypeShift), "] on ", named(ranks));
    }
  } else if (first.tensors > kShown) {
    text += different == count && count == kTensors ? c10::str("; the first ", kTensors, " tensors are the same") : "";
  }
  text = c10::str(
      "ccl: the ranks of group ", group_, " differ: ", text, bytes,
      ": all ranks of a group must call the same collectives in the same order, with the same sizes, types and options",
      several_threads ? kSeveralThreads : "");
  int nobody = 0;
  if (header.found.compare_exchange_strong(nobody, 1)) {
    copy_text(header.wrong, sizeof(header.wrong), text);
    header.found = 2;
  }
  return text;
}

std::string Ledger::disagreement() const {
  const auto& header = *reinterpret_cast<const Header*>(base_);
  return header.found == 2 ? header.wrong : "";
}

}  // namespace cputrain
