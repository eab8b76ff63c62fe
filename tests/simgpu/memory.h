// Memory of the device, and page-locked memory of the host, by the rules of torch's caching allocators.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>

#include "scheduler.h"

namespace simgpu {

constexpr int kGarbage = 0xff;  // NaN in every floating-point format

// What was freed since the last allocation. A lock of its own: gloo's threads free tensors while they hold gloo's lock,
// which the owner of the scheduler's lock may wait for.
template <class T>
class Returned {
 public:
  void add(T* item) {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(item);
  }
  std::vector<T*> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(items_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<T*> items_;
};

struct Block {
  void* data;
  size_t size;
  int64_t stream;
  std::set<int64_t> used_on;  // record_stream
};

// Freed memory belongs to its stream again. From the stream's next allocation on, its kernels may write there: torch
// splits and joins blocks. Not before: the product may drop a tensor and make a stream wait right after.
class Memory final : public c10::Allocator {
 public:
  size_t limit = SIZE_MAX;
  std::map<int, size_t> allocated, peak;

  c10::DataPtr allocate(size_t wanted) override {
    Lock lock(scheduler().mutex);
    int device = current_device;
    auto* block = new Block{nullptr, (std::max<size_t>(wanted, 1) + 511) / 512 * 512, here(), {}};
    for (Block* returned : returned_.take()) note_freed(returned);
    overwrite_freed(block->stream);
    auto& free = free_[{block->stream, block->size}];
    if (!free.empty()) {
      block->data = free.back();
      free.pop_back();
    }
    TORCH_CHECK_WITH(OutOfMemoryError, allocated[device] + block->size <= limit, "simgpu: out of memory");
    if (!block->data) {
      block->data = aligned_alloc(512, block->size);
      memset(block->data, kGarbage, block->size);
    }
    allocated[device] += block->size;
    peak[device] = std::max(peak[device], allocated[device]);
    return {block->data, block, &Memory::release, c10::Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Memory::release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }

 private:
  struct Freed {
    void* data;
    size_t size;
    std::vector<Mark> used_until;
  };

  static void release(void* context);

  void note_freed(Block* block) {
    std::vector<Mark> used_until;
    for (int64_t id : block->used_on) if (id != block->stream) used_until.push_back(scheduler().tail(id));
    allocated[block->stream >> kBits] -= block->size;
    freed_[block->stream].push_back({block->data, block->size, used_until});
    delete block;
  }

  void overwrite_freed(int64_t stream) {
    auto& freed = freed_[stream];
    for (auto it = freed.begin(); it != freed.end();) {
      bool is_used = false;
      for (Mark mark : it->used_until) is_used |= !scheduler().is_done(mark);
      if (is_used) {
        ++it;
        continue;
      }
      scheduler().push(stream, {[to = it->data, size = it->size] { memset(to, kGarbage, size); }});
      free_[{stream, it->size}].push_back(it->data);
      it = freed.erase(it);
    }
  }

  Returned<Block> returned_;
  std::map<int64_t, std::vector<Freed>> freed_;                      // by stream
  std::map<std::pair<int64_t, size_t>, std::vector<void*>> free_;  // by stream and size
};

inline Memory& memory() {
  static auto* only = new Memory;
  return *only;
}

inline void Memory::release(void* context) { memory().returned_.add(static_cast<Block*>(context)); }

inline void record_on(void* block, int64_t stream) {
  Lock lock(scheduler().mutex);
  if (block) static_cast<Block*>(block)->used_on.insert(stream);
}

// ---- page-locked memory

struct Pinned {
  void* data;
  size_t size;
  std::vector<Mark> copies;    // that a freed buffer waits for before it is used again
  bool is_registered = false;  // by cudaHostRegister: torch does not know of its copies
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    Lock lock(scheduler().mutex);
    size_t size = 64;
    while (size < wanted) size *= 2;
    for (Pinned* returned : returned_.take()) free_[returned->size].push_back(returned);
    auto& free = free_[size];
    auto is_unused = [](Pinned* buffer) {
      for (Mark copy : buffer->copies) if (!scheduler().is_done(copy)) return false;
      return true;
    };
    auto found = std::find_if(free.begin(), free.end(), is_unused);
    Pinned* buffer = nullptr;
    if (found != free.end()) {
      buffer = *found;
      free.erase(found);
      buffer->copies.clear();
    } else {
      buffer = add(aligned_alloc(64, size), size, false);
    }
    memset(buffer->data, kGarbage, size);
    return {buffer->data, buffer, &PinnedMemory::release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::release; }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }

  Pinned* add(void* data, size_t size, bool is_registered) {
    Lock lock(scheduler().mutex);
    return all_[uintptr_t(data)] = new Pinned{data, size, {}, is_registered};
  }

  Pinned* find(const void* data) {
    Lock lock(scheduler().mutex);
    auto after = all_.upper_bound(uintptr_t(data));
    if (after == all_.begin()) return nullptr;
    auto& [start, buffer] = *--after;
    return uintptr_t(data) < start + buffer->size ? buffer : nullptr;
  }

 private:
  static void release(void* context);
  Returned<Pinned> returned_;
  std::map<uintptr_t, Pinned*> all_;
  std::map<size_t, std::vector<Pinned*>> free_;
};

inline PinnedMemory& pinned_memory() {
  static auto* only = new PinnedMemory;
  return *only;
}

inline void PinnedMemory::release(void* context) { pinned_memory().returned_.add(static_cast<Pinned*>(context)); }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return pinned_memory().find(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(kSim, current_device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {  // FSDP2 frees weights with it
    auto* impl = storage.unsafeGetStorageImpl();
    at::DataPtr fresh = memory().allocate(size);
    size_t kept = std::min(size, impl->nbytes());
    if (kept) scheduler().push(here(), {[to = fresh.get(), from = impl->data(), kept] { memcpy(to, from, kept); }});
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

}  // namespace simgpu
