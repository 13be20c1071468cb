#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace llmq {

// Threads that share loops with the thread that calls. A worker spins for a while after a loop, then parks.
//
// Nobody waits for a worker that has not begun: the caller takes tasks too, and when none is left it closes the loop to
// late comers and waits only for those inside. On a machine whose cores are taken, a loop so costs what the caller alone
// would need, not a time slice of the scheduler for each worker.
class ThreadPool {
 public:
  // num_threads counts the caller: 1 makes no worker.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  // Waits for a loop that is running, ends its workers and starts others.
  void resize(int num_threads);

  // Calls body(begin, end, thread) until [0, num_tasks) is covered, `grain` tasks at a time, each exactly once, and
  // returns when all are done. thread is in [0, num_threads()), and the same for all calls of one thread in one loop.
  // A loop inside a loop, or beside one that another thread has running, is its caller's alone, as thread 0: scratch
  // memory that outlives a loop has to be thread_local. body must not throw.
  template <class Body>
  void parallel_for(int64_t num_tasks, int64_t grain, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    if (num_tasks <= 0) return;
    if (num_threads() == 1 || num_tasks <= grain || !begin_loop()) {
      body(int64_t{0}, num_tasks, 0);
      return;
    }
    run({num_tasks, grain < 1 ? 1 : grain, const_cast<void*>(static_cast<const void*>(&body)),
         [](void* callable, int64_t begin, int64_t end, int thread) {
           (*static_cast<Callable*>(callable))(begin, end, thread);
         }});
  }

  // Calls body(task, end) for each of [0, num_tasks) once, as parallel_for does, but threads do not take turns: each
  // goes along a run of its own, task after task up to `end`, so that it may fetch the next one's memory meanwhile.
  // Who has come to the end of its run helps with what is left of others.
  // What enter() returns is a thread's own: made before its first task, destroyed behind its last.
  template <class Body, class Enter>
  void parallel_runs(int64_t num_tasks, const Body& body, const Enter& enter) {
    struct alignas(64) Run {
      std::atomic<int64_t> next;
      int64_t end;
    };
    Run runs[kMaxRuns];
    const int64_t threads = num_threads() < kMaxRuns ? num_threads() : kMaxRuns;
    const int64_t num_runs = threads < num_tasks ? threads : num_tasks;
    for (int64_t run = 0; run < num_runs; run++) {
      runs[run].next.store(num_tasks * run / num_runs, std::memory_order_relaxed);
      runs[run].end = num_tasks * (run + 1) / num_runs;
    }
    parallel_for(num_runs, 1, [&](int64_t begin, int64_t, int) {
      [[maybe_unused]] const auto entered = enter();
      for (int64_t turn = 0; turn < num_runs; turn++) {
        Run& run = runs[(begin + turn) % num_runs];
        while (run.next.load(std::memory_order_relaxed) < run.end) {
          const int64_t task = run.next.fetch_add(1, std::memory_order_relaxed);
          if (task < run.end) body(task, run.end);
        }
      }
    });
  }
  template <class Body>
  void parallel_runs(int64_t num_tasks, const Body& body) {
    parallel_runs(num_tasks, body, [] { return 0; });
  }

 private:
  static constexpr int64_t kMaxRuns = 64;

  struct Loop {
    int64_t num_tasks, grain;
    void* body;
    void (*call)(void* body, int64_t begin, int64_t end, int thread);
  };

  // True where the caller may open a loop: none is open, and it is not inside one.
  bool begin_loop();
  void start_workers(int num_threads);
  void stop_workers();
  void run(const Loop& loop);
  void take_tasks(int thread);
  void work(int thread);
  bool wait_for_loop(uint32_t seen);  // false: the worker is to end

  // loop number << 32 | kOpen | workers inside. Written by the caller, who opens and closes; workers come and go.
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<int> num_parked_{0};
  std::atomic<bool> stop_{false};
  Loop loop_{};  // written while no worker is inside, read by those that came in
  std::atomic<int> num_threads_{1};
  std::mutex caller_;  // held by who has a loop open
  std::mutex parking_;
  std::condition_variable unpark_;
  std::vector<std::thread> workers_;
};

// The pool of this process, of one thread until it is resized. A child made by fork gets its own, as large as its
// parent's was.
ThreadPool& thread_pool();

}  // namespace llmq
