// Submits, drives and finishes the operations in flight. One lock guards every call into oneCCL.
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

// The collective in flight ("" if none), and its start and deadline by awake_now. `waited` is how long the main thread
// has waited: in a call that waits for other ranks, or idle, as while it waits for a future. It counts from the last time
// when an operation began or ended, because a rank that computes, or continues with other operations, does not wait.
struct CurrentCollective {
  std::string collective;
  Place place;
  Clock::time_point started;
  Clock::time_point deadline;
  std::chrono::duration<double> waited{};
};

// The last collective of a group, and the last ones whose numbers are multiples of kMarks, so that ranks that report at
// different times have some numbers in common. Each is a multiple of the one before: ranks that are d collectives apart
// when they report have a number in common after about 4 d collectives.
constexpr uint64_t kMarks[] = {64, 256, 1024, 4096, 16384, 65536, 262144};
struct Progress {
  Place last;
  Place marks[std::size(kMarks)];
  std::vector<int> ranks;  // global ranks
};

// Measures for how long this process's main thread has been idle.
class MainThread {
 public:
  // Returns the time since when it has been idle, `now` if it is not. Call it about twice a second.
  Clock::time_point idle_since(Clock::time_point now);

 private:
  Clock::time_point looked_, idle_since_;
  int64_t ran_ = 0, queued_ = 0;
};

// Drives all operations of this process. A waiting caller drives them itself; otherwise the engine's thread does, with
// increasing sleeps while none ends. The driving thread also runs the callbacks of futures. These may wait for other
// operations; another thread (a reliever) then drives.
class Engine {
 public:
  // Recursive, because oneCCL's libraries may fork while a communicator is created, and our fork handler locks again.
  using Mutex = std::recursive_timed_mutex;
  using Lock = std::unique_lock<Mutex>;
  using Operations = std::list<c10::intrusive_ptr<Operation>>;

  static Engine& instance();

  // Submits an operation: `start` calls oneCCL and returns a poll for the end; `finish` runs once, after the end.
  void submit(
      const c10::intrusive_ptr<Operation>& operation,
      std::function<Poll()> start,
      std::function<void()> finish,
      std::function<int()> source = nullptr);

  // Polls all operations in flight once; returns false if another thread is driving.
  bool drive();

  // Fails all operations in flight and all later ones, with the first reason given.
  void abort(const std::string& reason);
  std::string reason();

  // Fails all operations because ranks of a group are in different collectives; the watchdog reads the disagreement.
  void disagree(const std::string& what);
  std::string disagreement();

  // oneCCL's error, "" if none. A watchdog, if any, aborts with this and the state of the ranks, within kExplained.
  std::string failure();
  void set_watched(bool watched) { watched_ = watched; }

  // Sets the text about ranks that have not joined a collective, for the message of its timeout.
  void set_absent_ranks(std::string collective, std::string absent);
  std::string absent_ranks(const std::string& collective);

  // Adds a group with the ledger of its ranks on this host; its collectives are numbered from 1. The key is the same on
  // all ranks of the group and unique, unlike torch's names, which are reused, for example in the next world.
  Progress& add_group(const std::string& key, std::vector<int> ranks, const std::shared_ptr<Ledger>& ledger);
  void end_group(const std::string& key);
  // Counts a collective of a group; returns the digest of all its agreements so far.
  uint64_t count(Progress& group, uint64_t number, uint64_t digest, uint64_t balance);
  // Returns, by group key, number, digest and balance of the last collective and of the last marks; includes recently
  // destroyed groups.
  std::map<std::string, std::vector<std::array<uint64_t, 3>>> groups();
  // Returns the ranks of one of these groups, none if the key is unknown.
  std::vector<int> ranks_of(const std::string& key);

  // Locks oneCCL for calls other than operations: creating and destroying communicators.
  Lock enter() { return Lock(mutex_); }

  // Returns the operation in flight with the earliest deadline, or the creation or destruction of a communicator. Never
  // blocks.
  CurrentCollective current();
  // Publishes the creation or destruction of a communicator; an empty value ends it.
  void publish_communicator(CurrentCollective current);

  // Adds to the number of this process's communicators, which includes leaked ones.
  void count_communicators(int change) { communicators_ += change; }

  // Returns whether oneCCL has no operation in flight and may still be called.
  bool idle();

  // Throws in a process that was forked after oneCCL's start, which shares oneCCL's and MPI's memory with its parent.
  void refuse_in_child(const std::string& what);
  bool is_child() const { return forked_; }
  // Throws after an abort, and while the process exits.
  void refuse_after_end(std::string_view what);

  // Registers handlers for forks and the process's exit. Call it after oneCCL has registered its exit handler, so that
  // ours runs first.
  void guard_process();

  // While it exists, its thread is in a call that waits for other ranks; only the main thread is recorded.
  class Waiting {
   public:
    explicit Waiting(Engine& engine);
    ~Waiting();

   private:
    Engine& engine_;
    const Clock::time_point outer_;  // the start of the call around this one, if a callback waits
  };

 private:
  friend class Operation;

  Engine();
  void run();
  void publish_current();  // needs the engine's lock
  // Marks ended operations; throws the error of a failed one. Needs the engine's lock.
  void poll_pending();
  // Removes the oldest marked operation from pending_ and returns it, nullptr if none. Needs the engine's lock.
  c10::intrusive_ptr<Operation> take_ended();
  void finish(Operation& ended);  // the caller has incremented finishing_ under the engine's lock
  void fail_pending();
  bool finishes_elsewhere() const;
  void relieve_callback();  // called if a callback submits an operation, for which it may wait; needs the engine's lock
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
  Operations failing_;  // operations that an abort still has to fail
  std::string aborted_;
  std::string failure_;
  Clock::time_point failed_;
  bool exiting_ = false;
  uint64_t polls_ = 0;
  std::mutex published_mutex_;  // locked only briefly; may be locked while mutex_ is locked
  std::string absent_from_, absent_;
  std::string disagreement_;
  std::map<std::string, Progress> groups_;
  std::deque<std::string> ended_groups_;  // keys in groups_, oldest first
  std::map<std::string, std::weak_ptr<Ledger>> ledgers_;
  CurrentCollective published_;
  CurrentCollective communicator_;
  MainThread main_thread_;  // needs published_mutex_
  std::atomic<int> waiting_callers_{0};  // callers that drive operations themselves
  std::atomic<int> free_relievers_{0};  // relievers that are not in a callback
  std::atomic<Clock::time_point> changed_{};  // time by awake_now when an operation last began or ended
  std::atomic<Clock::time_point> waits_since_{kNever};  // time by awake_now of the main thread's call
  std::atomic<int> finishing_{0};  // running calls of finish()
  std::atomic<int> communicators_{0};
  std::atomic<bool> watched_{false};  // whether this process has a watchdog
  std::atomic<bool> leaving_{false};  // the process is exiting, and no thread drives
  std::atomic<bool> forked_{false};
};

}  // namespace cputrain
