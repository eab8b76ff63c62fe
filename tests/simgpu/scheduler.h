// Queues of the pretended device. An operation is queued on its stream; when it runs, the schedule decides.
#pragma once
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace simgpu {

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kBits = 16;  // a queue's number is device << kBits | stream

// All that a stream has been given so far.
struct Mark {
  int64_t stream = 0;
  uint64_t number = 0;
};

struct Task {
  std::function<void()> run;  // starts it, or does it
  std::vector<Mark> waits;
  std::function<bool()> has_ended;  // of a collective: polled, never waited for
  bool has_started = false;
};

struct Queue {
  std::deque<Task> tasks;
  uint64_t given = 0, done = 0;
  bool is_group = false;  // its tasks are collectives
};

// Gives Python's lock away, if this thread has it: what runs meanwhile may need it, and gloo's threads do.
class WithoutPython {
 public:
  WithoutPython() {
    if (PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

// Locks without holding Python's lock while it waits: the owner may need that to finish.
class Lock {
 public:
  explicit Lock(std::recursive_mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    WithoutPython waiting;
    mutex_.lock();
  }
  ~Lock() { mutex_.unlock(); }

 private:
  std::recursive_mutex& mutex_;
};

enum Schedule {
  NOW,     // as soon as possible: the control
  LAG,     // a queue moves only as far as something waits for it
  RUSH,    // the side streams run as early as they may, the default stream as late
  RANDOM,  // seeded
};

class Scheduler {
 public:
  std::recursive_mutex mutex;

  void choose(int schedule, unsigned seed) {
    Lock lock(mutex);
    schedule_ = schedule;
    random_.seed(seed);
  }

  void push(int64_t id, Task task) {
    WithoutPython running;
    {
      Lock lock(mutex);
      queues_[id].tasks.push_back(std::move(task));
      queues_[id].given++;
      if (schedule_ != NOW) return let_some_run();
    }
    // What reads a collective's result too early must read the right values here, or the control had the same fault.
    // Not for long: another rank may wait for what this one does next.
    for (int tries = 0; !let_run() && tries < 20'000; tries++) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  Mark tail(int64_t id) {
    Lock lock(mutex);
    return {id, queues_[id].given};
  }

  bool is_done(Mark mark) {
    Lock lock(mutex);
    return queues_[mark.stream].done >= mark.number;
  }

  // Runs what the mark needs and nothing else. False: a collective on the way waits for another rank.
  bool reach(Mark mark) {
    Queue& queue = queues_[mark.stream];
    while (queue.done < mark.number) {
      for (Mark wait : queue.tasks.front().waits) if (!reach(wait)) return false;
      if (!step(queue)) return false;
    }
    return true;
  }

  // Runs everything that can run. Is nothing left?
  bool let_run(bool only_groups = false) {
    WithoutPython running;
    Lock lock(mutex);
    bool all = true;
    for (auto& [id, queue] : queues_) if (queue.is_group || !only_groups) all = reach({id, queue.given}) && all;
    return all;
  }

  // Blocks the host. The other ranks' collectives go on meanwhile, as on a device.
  void wait_for(const std::vector<Mark>& marks) {
    WithoutPython running;
    while (true) {
      {
        Lock lock(mutex);
        bool all = true;
        for (Mark mark : marks) all = reach(mark) && all;
        if (all) return;
        let_run(true);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  std::vector<Mark> tails(int device) {
    Lock lock(mutex);
    std::vector<Mark> found;
    for (auto& [id, queue] : queues_) if (id >> kBits == device) found.push_back({id, queue.given});
    return found;
  }

  void is_of_group(int64_t id) {
    Lock lock(mutex);
    queues_[id].is_group = true;
  }

 private:
  void let_some_run() {
    for (auto& [id, queue] : queues_) {
      if (schedule_ == RUSH && id % (1 << kBits)) while (may_step(queue) && step(queue)) {}
      if (schedule_ == RANDOM) while (random_() % 3 == 0 && may_step(queue) && step(queue)) {}
    }
  }

  bool may_step(Queue& queue) {
    if (queue.tasks.empty()) return false;
    for (Mark wait : queue.tasks.front().waits) if (!is_done(wait)) return false;
    return true;
  }

  bool step(Queue& queue) {
    Task& task = queue.tasks.front();
    if (task.run && !task.has_started) {
      task.has_started = true;
      task.run();
    }
    if (task.has_ended && !task.has_ended()) return false;
    queue.tasks.pop_front();
    queue.done++;
    return true;
  }

  std::map<int64_t, Queue> queues_;
  int schedule_ = NOW;
  std::mt19937 random_;
};

inline Scheduler& scheduler() {
  static auto* only = new Scheduler;
  return *only;
}

// ---- the ledger of host waits

inline py::object& ledger() {
  static auto* function = new py::object;
  return *function;
}

inline void note(const char* kind, const std::string& detail = "") {
  py::gil_scoped_acquire held;
  if (ledger()) ledger()(kind, detail);
}

inline void host_waits(const std::vector<Mark>& marks, const char* kind, const std::string& detail = "") {
  note(kind, detail);
  scheduler().wait_for(marks);
}

// ---- devices, streams and events

inline thread_local int current_device = 0;
inline thread_local std::map<int, int64_t> current_stream;
inline int device_count = 1;

inline int64_t default_stream(int device) { return int64_t(device) << kBits; }

inline int64_t stream_of(int device) {
  auto found = current_stream.find(device);
  return found == current_stream.end() ? default_stream(device) : found->second;
}

inline int64_t here() { return stream_of(current_device); }
inline Mark now_here(int device) { return scheduler().tail(stream_of(device)); }

inline c10::Stream as_stream(int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, id >> kBits), id % (1 << kBits));
}

inline int64_t id_of(const c10::Stream& stream) { return default_stream(stream.device_index()) | stream.id(); }

inline int64_t new_stream(int device) {
  static std::atomic<int> made{0};
  return default_stream(device) | ++made;
}

void record_on(void* block, int64_t stream);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device getDevice() const override { return c10::Device(kSim, current_device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count, "simgpu: no device ", device);
    current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }

  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  c10::Stream getStream(c10::Device device) const override { return as_stream(stream_of(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_stream(default_stream(index(device))); }
  c10::Stream getNewStream(c10::Device device, int) const override { return as_stream(new_stream(index(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = id_of(stream);
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override { return scheduler().is_done(scheduler().tail(id_of(stream))); }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits({scheduler().tail(id_of(stream))}, "stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    host_waits(scheduler().tails(device < 0 ? current_device : device), "device.synchronize");
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = scheduler().tail(id_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) scheduler().push(id_of(stream), {{}, {*static_cast<Mark*>(event)}});
  }
  bool queryEvent(void* event) const override { return !event || scheduler().is_done(*static_cast<Mark*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits({*static_cast<Mark*>(event)}, "event.synchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_on(data.get_context(), id_of(stream));
  }
};

}  // namespace simgpu
