// Every task once, whoever calls: loops inside loops, loops of several threads, resizing, parking, forks.

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "pool.h"

using llmq::ThreadPool;

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Plain integers: two threads on one task would be a data race as well as a wrong count.
void loop(ThreadPool& pool, int num_tasks, int grain) {
  std::vector<int> times(num_tasks);
  pool.parallel_for(num_tasks, grain, [&](int64_t begin, int64_t end, int thread) {
    check(thread >= 0 && thread < pool.num_threads(), "a thread of the pool");
    for (int64_t task = begin; task < end; task++) times[task]++;
  });
  for (int count : times) check(count == 1, "each task once");
}

void runs(ThreadPool& pool, int num_tasks) {
  std::vector<int> times(num_tasks);
  pool.parallel_runs(num_tasks, [&](int64_t task, int64_t end) {
    check(task < end && end <= num_tasks, "a task of a run");
    times[task]++;
  });
  for (int count : times) check(count == 1, "each task of the runs once");
}

void loops(ThreadPool& pool, int count, unsigned seed) {
  for (int i = 0; i < count; i++) {
    seed = seed * 1664525 + 1013904223;
    loop(pool, seed >> 26, 1 + (seed >> 10) % 7);
    runs(pool, seed >> 26);
    if (seed % 97 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // workers park
  }
}

}  // namespace

int main() {
  for (int num_threads : {1, 2, 4, 9}) {
    ThreadPool pool(num_threads);
    loops(pool, 3000, num_threads);
    pool.parallel_for(20, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t task = begin; task < end; task++) {
        loop(pool, 50, 3);  // inside: the caller's alone
        runs(pool, 50);
      }
    });
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; caller++) callers.emplace_back([&, caller] { loops(pool, 1000, caller); });
    for (int size : {3, 1, 5, 2}) pool.resize(size);
    for (auto& caller : callers) caller.join();
  }
  llmq::thread_pool().resize(3);
  loops(llmq::thread_pool(), 200, 1);
#if !defined(__SANITIZE_THREAD__)  // which does not follow a child of several threads
  const pid_t child = fork();
  if (child == 0) {
    check(llmq::thread_pool().num_threads() == 3, "a child's pool is as large");
    loops(llmq::thread_pool(), 200, 2);
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  check(status == 0, "the child");
#endif
  std::puts("ok");
}
