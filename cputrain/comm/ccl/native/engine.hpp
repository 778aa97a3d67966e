// Operations in flight: their submission, progress and end. One lock guards every call into oneCCL.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ledger.hpp"
#include "operation.hpp"

namespace cputrain {

// The collective that this process waits in, "" for none, and the end of its timeout by awake_now.
struct CurrentCollective {
  std::string collective;
  Place place;
  Clock::time_point deadline;
};

// The last collective of a group, and the last ones whose numbers are multiples of kMarks: ranks that report at different
// moments report some of the same number.
constexpr uint64_t kMarks[] = {64, 4096, 262144};
struct Progress {
  Place last;
  Place marks[std::size(kMarks)];
  std::vector<int> ranks;  // as people number them
};

// Drives all operations of this process. A waiting caller drives them itself; the engine's thread drives those that no
// caller waits for, and sleeps longer and longer while none ends. Who drives also runs the callbacks of futures, which
// may wait for other operations: another thread then relieves it.
class Engine {
 public:
  // A thread that creates a communicator may fork inside oneCCL's libraries, so its own fork handler locks again.
  using Mutex = std::recursive_timed_mutex;
  using Lock = std::unique_lock<Mutex>;
  using Operations = std::list<c10::intrusive_ptr<Operation>>;

  static Engine& instance();

  // Submits an operation: `start` calls oneCCL and returns how its end is seen; `finish` runs once, after the end.
  void submit(
      const c10::intrusive_ptr<Operation>& operation,
      std::function<Poll()> start,
      std::function<void()> finish,
      std::function<int()> source = nullptr);

  // Polls all operations in flight once; false where another thread does so at the moment.
  bool drive();

  // Fails all operations in flight and all later ones. The first reason is kept.
  void abort(const std::string& reason);
  std::string reason();

  // Fails them as ranks of a group are in different collectives, which the watchdog then reads.
  void disagree(const std::string& what);
  std::string disagreement();

  // oneCCL's own error, "" for none. A watchdog aborts with what it knows about the ranks, in kExplained at the latest.
  std::string failure();
  void set_watched(bool watched) { watched_ = watched; }

  // Sets the text about ranks that have not joined a collective, which the message of its timeout includes.
  void set_absent_ranks(std::string collective, std::string absent);
  std::string absent_ranks(const std::string& collective);

  // A group whose ledger other ranks of this host write to; its collectives are numbered from 1 on. Its key is the same
  // on all its ranks and on no other group's: torch uses a name again, in the next world at the latest.
  Progress& add_group(const std::string& key, std::vector<int> ranks, const std::shared_ptr<Ledger>& ledger);
  void end_group(const std::string& key);
  // Counts a collective of a group; the digest of all its agreements so far.
  uint64_t count(Progress& group, uint64_t number, uint64_t digest, uint64_t balance);
  // Of each group by its key, the last ones that have been destroyed too, the number, digest and balance of its last
  // collective, and of those before it whose numbers are marks.
  std::map<std::string, std::vector<std::array<uint64_t, 3>>> groups();
  // The ranks of one of these, none for another one.
  std::vector<int> ranks_of(const std::string& key);

  // Locks oneCCL for calls that are no operations: creating and destroying communicators.
  Lock enter() { return Lock(mutex_); }

  // The operation in flight that times out first; without one, the creation or destruction of a communicator. Never blocks.
  CurrentCollective current();
  // Says that a communicator is being created or destroyed, until it is called with nothing.
  void publish_communicator(CurrentCollective current);

  // Counts this process's communicators, those that are leaked among them: by 1, or by -1 for one that is destroyed.
  void count_communicators(int change) { communicators_ += change; }

  // Whether oneCCL has no operation in flight and may still be called.
  bool idle();

  // Refuses in a process that was forked after oneCCL's start: it shares oneCCL's and MPI's memory with its parent.
  void refuse_in_child(const std::string& what);
  bool is_child() const { return forked_; }
  // Refuses after an abort, and while the process exits.
  void refuse_after_end(std::string_view what);

  // Guards forks and the process's exit. Must be called after oneCCL has registered its own exit handler, so that
  // ours runs first.
  void guard_process();

 private:
  friend class Operation;

  Engine();
  void run();
  void publish_current();  // needs the engine's lock
  // Marks those that have ended; throws the error of one that fails. Needs the engine's lock.
  void poll_pending();
  // Takes the oldest that is marked out of pending_; none: nullptr. Needs the engine's lock.
  c10::intrusive_ptr<Operation> take_ended();
  void finish(Operation& ended);  // it was counted in finishing_ under the engine's lock
  void fail_pending();
  bool finishes_elsewhere() const;
  void relieve_callback();  // that has submitted an operation, and may wait for it; needs the engine's lock
  void start_reliever();  // needs the engine's lock
  void relieve();
  void look_for_unpolled();
  void look_for_disagreement();
  void fail(const std::string& error);
  void time_out(const Operation& operation);
  void time_out_late();
  bool end_operations(Clock::time_point deadline);
  void on_process_exit(int status);

  Mutex mutex_;
  std::condition_variable_any work_;
  Operations pending_;
  Operations failing_;  // those of pending_ that an abort has still to fail
  std::string aborted_;
  std::string failure_;
  Clock::time_point failed_;
  bool exiting_ = false;
  uint64_t polls_ = 0;
  std::mutex published_mutex_;  // held briefly; may be locked while mutex_ is
  std::string absent_from_, absent_;
  std::string disagreement_;
  std::map<std::string, Progress> groups_;
  std::deque<std::string> ended_groups_;  // of groups_, the oldest first
  std::map<std::string, std::weak_ptr<Ledger>> ledgers_;
  CurrentCollective published_;
  CurrentCollective communicator_;
  std::atomic<int> waiting_callers_{0};  // these drive operations themselves
  std::atomic<int> free_relievers_{0};  // that no callback keeps
  std::atomic<Clock::time_point> changed_{};  // when an operation last began or ended
  std::atomic<int> finishing_{0};  // calls of finish() under way
  std::atomic<int> communicators_{0};
  std::atomic<bool> watched_{false};  // by a watchdog of this process
  std::atomic<bool> leaving_{false};  // the process exits: no thread drives any more
  std::atomic<bool> forked_{false};
};

}  // namespace cputrain
