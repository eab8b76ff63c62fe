// Every operator: shapes at once, by torch's meta kernel; values later, by its CPU kernel on raw pointers.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "memory.h"

namespace simgpu {

using c10::IValue;
using at::Tensor;

inline bool is_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// The same memory, which is not kept alive: a kernel of a device has pointers only.
inline Tensor as_cpu(const Tensor& tensor) {
  void* data = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  return at::from_blob(data, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
}

inline Tensor as_meta(const Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

template <class Change>
IValue changed(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      bool is_there = tensor.has_value() && tensor->defined();
      list.push_back(is_there ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// A queued kernel runs where the host happens to wait: without autograd and modes that are active there.
class Plainly {
  c10::impl::ForceDispatchKeyGuard keys_{
      c10::default_included_set - c10::autograd_dispatch_keyset_with_ADInplaceOrView,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView};
  at::NoGradGuard no_grad_;
};

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Whether the operator only writes to its arguments, without giving one another shape.
inline bool is_in_place(const c10::FunctionSchema& schema) {
  const auto& name = schema.operator_name().name;
  bool is_named_so = name.back() == '_' && name[name.size() - 2] != '_';  // add_, and not __lshift__
  return schema.returns().empty() || is_named_so;
}

inline void copy_to(const IValue& to, const IValue& from) {
  if (to.isTensor() && to.toTensor().defined() && to.toTensor().numel()) to.toTensor().copy_(from.toTensor());
  if (!to.isTensorList()) return;
  auto targets = to.toTensorVector(), sources = from.toTensorVector();
  for (size_t k = 0; k < targets.size(); k++) targets[k].copy_(sources[k]);
}

inline int device_of(const std::string& name, const std::vector<IValue>& arguments) {
  static const std::set<std::string> takes_cpu_index = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};
  int device = -1;
  bool is_mixed = false;
  for (const auto& argument : arguments) changed(argument, [&](const Tensor& tensor) {
    if (is_sim(tensor)) {
      TORCH_CHECK(device < 0 || device == tensor.device().index(), "simgpu: ", name, ": tensors on two devices");
      device = tensor.device().index();
    }
    is_mixed |= tensor.device().is_cpu() && tensor.dim() && tensor.numel();
    return tensor;
  });
  TORCH_CHECK(!is_mixed || takes_cpu_index.count(name), "Expected all tensors to be on the same device, but ", name, " got a CPU tensor, too");
  device = device < 0 ? current_device : device;
  if (is_mixed) host_waits({now_here(device)}, "index on the host", name);
  return device;
}

// All that shapes depend on.
inline std::string described(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  std::ostringstream text;
  text << op.schema().operator_name() << ' ' << at::get_default_dtype();
  for (const auto& argument : arguments) {
    text << " | ";
    if (argument.isTensor() || argument.isTensorList() || argument.isOptionalTensorList()) {
      changed(argument, [&](const Tensor& t) {
        text << t.sizes() << t.strides() << t.scalar_type() << ';';
        return t;
      });
    } else {
      text << argument;
    }
  }
  return text.str();
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  size_t count = schema.arguments().size();
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  c10::DeviceGuard guard(c10::Device(kSim, device_of(name, arguments)));

  auto on = [&](c10::DeviceType device, auto change) {
    torch::jit::Stack list;
    for (const auto& argument : arguments) {
      bool is_device = argument.isDevice() && argument.toDevice().type() == kSim;
      list.push_back(is_device ? IValue(c10::Device(device)) : changed(argument, change));
    }
    return list;
  };
  auto cpu = on(at::kCPU, [](const Tensor& t) { return is_sim(t) ? as_cpu(t) : t.device().is_cpu() ? t.clone() : t; });
  torch::jit::Stack meta;
  bool has_values = false;  // its shape depends on values
  if (!is_in_place(schema)) {
    static std::map<std::string, torch::jit::Stack> known;  // a meta kernel may be Python, which takes long
    std::string key = described(op, arguments);
    {
      Lock lock(scheduler().mutex);
      if (auto found = known.find(key); found != known.end()) meta = found->second;
    }
    if (meta.empty()) {
      meta = on(at::kMeta, [](const Tensor& t) {
        return is_sim(t) ? as_meta(t) : t.device().is_cpu() && t.dim() ? t.to(at::kMeta) : t;
      });
      try {
        Plainly plainly;
        op.callBoxed(meta);
        Lock lock(scheduler().mutex);
        known[key] = meta;
      } catch (const std::exception&) {
        has_values = true;
        host_waits({now_here(current_device)}, "shape from values", name);
        Plainly plainly;
        op.callBoxed(cpu);
        meta.clear();
        for (const auto& value : cpu) meta.push_back(changed(value, as_meta));
      }
    }
  }

  torch::jit::Stack results;
  std::vector<std::pair<size_t, IValue>> fresh;  // number of a result -> its memory
  for (size_t i = 0; i < schema.returns().size(); i++) {
    const auto& result = schema.returns()[i];
    TORCH_CHECK_NOT_IMPLEMENTED(!result.alias_info() || is_written(result), "simgpu: the view ", name);
    size_t same = count;
    for (size_t j = 0; is_written(result) && j < count; j++) {
      const auto* alias = schema.arguments()[j].alias_info();
      if (alias && alias->beforeSets() == result.alias_info()->beforeSets()) same = j;
    }
    if (same < count) {
      const auto& own = arguments[same];
      if (!meta.empty() && own.isTensor() && own.toTensor().sizes() != meta[i].toTensor().sizes()) {
        own.toTensor().resize_(meta[i].toTensor().sizes());
        cpu[same] = as_cpu(own.toTensor());
      }
      results.push_back(own);
      continue;
    }
    results.push_back(changed(meta[i], [](const Tensor& t) {
      if (!t.is_meta()) return t;
      return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::Device(kSim, current_device)));
    }));
    fresh.push_back({i, changed(results.back(), [](const Tensor& t) { return is_sim(t) ? as_cpu(t) : t; })});
  }
  auto store = [fresh](const torch::jit::Stack& values) {
    for (const auto& [i, to] : fresh) copy_to(to, values[i]);
  };
  if (has_values) {
    Plainly plainly;
    store(cpu);
  } else {
    scheduler().push(here(), {[op, cpu, store]() mutable {
      Plainly plainly;
      op.callBoxed(cpu);
      store(cpu);
    }});
  }
  stack->erase(stack->end() - count, stack->end());
  for (auto& value : results) stack->push_back(value);
}

// ---- what is no kernel

using Sizes = c10::SymIntArrayRef;
template <class T>
using Maybe = std::optional<T>;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline c10::DeviceGuard guard_of(Maybe<at::Device> device) {
  return c10::DeviceGuard(c10::Device(kSim, device ? Guard::index(*device) : current_device));
}

inline Tensor empty(Sizes size, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<at::Device> device, Maybe<bool>, Maybe<at::MemoryFormat> format) {
  auto guard = guard_of(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory(), kKeys, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(Sizes size, Sizes stride, Maybe<at::ScalarType> dtype, Maybe<at::Layout>, Maybe<at::Device> device, Maybe<bool>) {
  auto guard = guard_of(device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory(), kKeys, c10::dtype_or_default(dtype));
}

// As CUDA's: asynchronous on the device, and between it and contiguous page-locked memory if asked for.
inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  c10::DeviceGuard guard((is_sim(to) ? to : from).device());
  bool is_inside = is_sim(from) && is_sim(to);
  const Tensor& host = is_sim(from) ? to : from;
  Pinned* pinned = is_inside ? nullptr : pinned_memory().find(host.const_data_ptr());
  // the device converts what it sends; what it receives, the host converts into pageable memory
  bool is_direct = host.is_contiguous() && (is_sim(from) || from.scalar_type() == to.scalar_type());
  bool is_queued = is_inside || (non_blocking && pinned && is_direct);
  auto copy = [a = as_cpu(from), b = as_cpu(to)] {
    Plainly plainly;
    b.copy_(a);
  };
  if (!is_queued) {
    std::string memory = pinned ? "page-locked" : "pageable";
    host_waits({now_here(current_device)}, is_sim(from) ? "copy to the host" : "copy to the device", memory);
    copy();
    return to;
  }
  scheduler().push(here(), {copy});
  Lock lock(scheduler().mutex);
  if (pinned && !pinned->is_registered) pinned->copies.push_back(now_here(current_device));
  return to;
}

inline at::Scalar item(const Tensor& tensor) {
  host_waits({now_here(tensor.device().index())}, ".item()");
  return as_cpu(tensor).item();
}

inline bool equal(const Tensor& a, const Tensor& b) {
  host_waits({now_here(a.device().index())}, "torch.equal");
  return at::equal(as_cpu(a), as_cpu(b));
}

inline Tensor as_strided(const Tensor& tensor, Sizes size, Sizes stride, Maybe<c10::SymInt> offset) {
  auto start = offset ? Maybe<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

inline Tensor& set_storage(Tensor& tensor, at::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}

inline void register_operators(torch::Library& m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", [](const Tensor& t, Sizes size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); });
  m.impl("_reshape_alias", [](const Tensor& t, Sizes size, Sizes stride) {
    return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("resize_", [](const Tensor& t, Sizes size, Maybe<at::MemoryFormat> format) -> const Tensor& {
    return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format);
  });
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", [](Tensor& t, const Tensor& from) -> Tensor& { return at::native::set_tensor_(t, from); });
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());  // else torch takes it apart
  m.impl("_copy_from", &copy_from);
  m.impl("_local_scalar_dense", &item);
  m.impl("equal", &equal);
  m.impl("record_stream", [](Tensor& t, c10::Stream stream) {
    record_on(t.storage().data_ptr().get_context(), id_of(stream));
  });
}

}  // namespace simgpu
