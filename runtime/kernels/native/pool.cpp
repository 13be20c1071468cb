#include "pool.h"

#include <chrono>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmq {
namespace {

// Long enough to stay awake between two operations of a step, short enough to leave the core to others after it.
constexpr auto kSpin = std::chrono::microseconds(100);

thread_local bool inside_loop = false;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) { start_workers(num_threads); }

ThreadPool::~ThreadPool() { stop_workers(); }

void ThreadPool::resize(int num_threads) {
  std::lock_guard<std::mutex> lock(caller_);
  stop_workers();
  start_workers(num_threads);
}

void ThreadPool::start_workers(int num_threads) {
  num_threads_.store(num_threads < 1 ? 1 : num_threads);
  for (int thread = 1; thread < num_threads; thread++) workers_.emplace_back([this, thread] { work(thread); });
}

void ThreadPool::stop_workers() {
  {
    std::lock_guard<std::mutex> lock(parking_);
    stop_.store(true);
  }
  unpark_.notify_all();
  for (auto& worker : workers_) worker.join();
  workers_.clear();
  stop_.store(false);
}

bool ThreadPool::begin_loop() { return !inside_loop && caller_.try_lock(); }

void ThreadPool::run(const Loop& loop) {
  loop_ = loop;
  next_task_.store(0, std::memory_order_relaxed);
  const uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
  // Sequentially consistent, as is a worker's last look before it parks: one of the two sees the other.
  state_.store(number << 32 | kOpen);
  if (num_parked_.load() > 0) {
    { std::lock_guard<std::mutex> lock(parking_); }  // who is about to sleep is asleep, or has seen the loop
    unpark_.notify_all();
  }
  take_tasks(0);
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  for (int turn = 1; state_.load(std::memory_order_acquire) & (kOpen - 1); turn++) {
    // A worker inside may have lost its core to somebody: this one may be what it waits for.
    turn % 1024 ? pause() : std::this_thread::yield();
  }
  caller_.unlock();
}

void ThreadPool::take_tasks(int thread) {
  inside_loop = true;
  for (;;) {
    const int64_t begin = next_task_.fetch_add(loop_.grain, std::memory_order_relaxed);
    if (begin >= loop_.num_tasks) break;
    const int64_t end = begin + loop_.grain < loop_.num_tasks ? begin + loop_.grain : loop_.num_tasks;
    loop_.call(loop_.body, begin, end, thread);
  }
  inside_loop = false;
}

void ThreadPool::work(int thread) {
  uint32_t seen = 0;
  while (wait_for_loop(seen)) {
    uint64_t state = state_.load(std::memory_order_acquire);
    while ((state & kOpen) && !state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
    }
    seen = static_cast<uint32_t>(state >> 32);
    if (!(state & kOpen)) continue;
    take_tasks(thread);
    state_.fetch_sub(1, std::memory_order_release);
  }
}

bool ThreadPool::wait_for_loop(uint32_t seen) {
  const auto is_next = [&] { return static_cast<uint32_t>(state_.load() >> 32) != seen || stop_.load(); };
  const auto start = std::chrono::steady_clock::now();
  for (int turn = 1; !is_next(); turn++) {
    pause();
    if (turn % 64 == 0 && std::chrono::steady_clock::now() - start > kSpin) {
      std::unique_lock<std::mutex> lock(parking_);
      num_parked_.fetch_add(1);
      unpark_.wait(lock, is_next);
      num_parked_.fetch_sub(1);
    }
  }
  return !stop_.load();
}

namespace {

// Never destroyed: at exit its workers sleep or spin on memory that stays, and end with the process.
std::atomic<ThreadPool*> the_pool{nullptr};
std::atomic<int> size_after_fork{1};

ThreadPool* make_pool() {
#if defined(__unix__) || defined(__APPLE__)
  // A child has this memory and none of these threads: it leaves the pool alone and makes another when it needs one.
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    inside_loop = false;
    if (const ThreadPool* parents = the_pool.exchange(nullptr)) size_after_fork.store(parents->num_threads());
  });
  (void)registered;
#endif
  return new ThreadPool(size_after_fork.load());
}

}  // namespace

ThreadPool& thread_pool() {
  ThreadPool* pool = the_pool.load(std::memory_order_acquire);
  if (pool) return *pool;
  ThreadPool* made = make_pool();
  if (the_pool.compare_exchange_strong(pool, made)) return *made;
  delete made;
  return *pool;
}

}  // namespace llmq
