// Collectives of the pretended device, as NCCL has them: a stream for each communicator, futures tied to it. Gloo moves
// the values: a queued collective is started and then polled, so it blocks no other queue.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <future>

#include "operators.h"

namespace simgpu {

using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Then = std::function<void()>;
using Start = std::function<std::pair<WorkPtr, Then>()>;  // starts it in gloo; what is to be done when it has ended

class Work final : public c10d::Work {
 public:
  Work(Mark mark, Tensors kept, Tensors outputs, c10::Device device, bool blocks)
      : mark_(mark), kept_(std::move(kept)), blocks_(blocks) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    Guard on_device;
    auto before = on_device.exchangeStream(as_stream(mark.stream));
    future_->markCompleted(IValue(outputs));  // records an event on the group's stream
    on_device.exchangeStream(before);
  }

  bool isCompleted() override {
    WithoutPython running;
    Lock lock(scheduler().mutex);
    return scheduler().reach(mark_);
  }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    scheduler().push(stream_of(mark_.stream >> kBits), {{}, {mark_}});  // the current stream waits, not the host
    if (blocks_) host_waits({mark_}, "barrier");
    kept_.clear();
    return true;
  }
  void synchronize() override { wait(); }
  Tensors result() override { return kept_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Mark mark_;
  Tensors kept_;  // until `wait`, as NCCL keeps them
  bool blocks_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Gloo's sends and receives end only in `wait`.
class WaitedBeside final : public c10d::Work {
 public:
  explicit WaitedBeside(WorkPtr work) : ended_(std::async(std::launch::async, [work] { work->wait(); })) {}
  bool isCompleted() override {
    if (ended_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return false;
    ended_.get();  // raises what went wrong
    return true;
  }
  bool isSuccess() const override { return true; }

 private:
  std::future<void> ended_;
};

class Group final : public c10d::Backend {
 public:
  Group(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  // Sends and receives between these two are one task: they start together, and none waits for another.
  void startCoalescing() override { batch_.emplace(); }
  WorkPtr endCoalescing() override {
    Batch batch = std::move(*batch_);
    batch_.reset();
    return queue(batch.starts, batch.touched, {});
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return on_cpu(tensors, tensors, [options, gloo = gloo_](Tensors& cpu) { return gloo->allreduce(cpu, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return on_cpu(tensors, tensors, [options, gloo = gloo_](Tensors& cpu) { return gloo->broadcast(cpu, options); });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return on_cpu({output, input}, {output}, [options, gloo = gloo_](Tensors& cpu) {
      return gloo->_allgather_base(cpu[0], cpu[1], options);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    c10d::AllreduceOptions all;  // gloo's own sums where it is waited for
    all.reduceOp = options.reduceOp;
    Start start = [all, gloo = gloo_, to = as_cpu(output), from = as_cpu(input)] {
      Tensors sum{from.clone()};
      auto part = [to, sum, rank = gloo->getRank()] { to.view(-1).copy_(sum[0].view(-1).narrow(0, rank * to.numel(), to.numel())); };
      return std::pair(gloo->allreduce(sum, all), Then(part));
    };
    return queue({start}, {output, input}, {output});
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    return on_cpu(tensors, {}, [rank, tag, gloo = gloo_](Tensors& cpu) {
      return c10::make_intrusive<WaitedBeside>(gloo->send(cpu, rank, tag));
    });
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    return on_cpu(tensors, tensors, [rank, tag, gloo = gloo_](Tensors& cpu) {
      return c10::make_intrusive<WaitedBeside>(gloo->recv(cpu, rank, tag));
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return queue({[gloo = gloo_] { return std::pair(gloo->barrier(), Then()); }}, {}, {}, true);
  }

 private:
  struct Batch {
    std::vector<Start> starts;
    Tensors touched;
  };

  template <class Call>
  WorkPtr on_cpu(const Tensors& touched, const Tensors& outputs, Call call) {
    Tensors cpu;
    for (const Tensor& tensor : touched) cpu.push_back(as_cpu(tensor));
    return queue({[cpu, call]() mutable { return std::pair<WorkPtr, Then>(call(cpu), Then()); }}, touched, outputs);
  }

  WorkPtr queue(std::vector<Start> starts, Tensors touched, Tensors outputs, bool blocks = false) {
    int device = touched.empty() ? current_device : touched[0].device().index();
    if (batch_) {
      for (auto& start : starts) batch_->starts.push_back(start);
      for (auto& tensor : touched) batch_->touched.push_back(tensor);
      return c10::make_intrusive<Work>(Mark{stream_on(device)}, Tensors{}, Tensors{}, c10::Device(kSim, device), false);
    }
    auto works = std::make_shared<std::vector<std::pair<WorkPtr, Then>>>();
    auto run = [starts, works] {
      Plainly plainly;
      for (const auto& start : starts) works->push_back(start());
    };
    auto has_ended = [works] {
      Plainly plainly;
      for (; !works->empty(); works->pop_back()) {
        auto& [work, then] = works->back();
        if (!work->isCompleted()) return false;
        if (!work->isSuccess()) std::rethrow_exception(work->exception());
        if (then) then();
      }
      return true;
    };
    int64_t stream = stream_on(device);
    scheduler().push(stream, {run, {now_here(device)}, has_ended});
    return c10::make_intrusive<Work>(scheduler().tail(stream), touched, outputs, c10::Device(kSim, device), blocks);
  }

  int64_t stream_on(int device) {
    if (!stream_) {
      stream_ = new_stream(device);
      scheduler().is_of_group(stream_);
    }
    return stream_;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::optional<Batch> batch_;
  int64_t stream_ = 0;
};

}  // namespace simgpu
