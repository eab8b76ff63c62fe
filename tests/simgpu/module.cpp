// "simgpu", a pretended accelerator for tests. Its memory is the host's, its kernels are torch's CPU kernels, but they
// run late, early or in any order that streams, events and collectives allow. What is missing (a wait, a reference, a
// record_stream) gives wrong values, each time the same.
#include <torch/version.h>

#include "group.h"

using namespace simgpu;

namespace simgpu {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { register_operators(m); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

#if TORCH_VERSION_MINOR < 9  // later versions have it
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#endif

PYBIND11_MODULE(_simgpu, m) {
  m.def("init", [](int devices) {
    device_count = devices;
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  });
  m.def("schedule", [](int schedule, unsigned seed) { scheduler().choose(schedule, seed); });
  m.def("note_waits", [](py::object function) { ledger() = function; });
  m.def("let_run", [] { scheduler().let_run(); });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { Guard().setDevice(c10::Device(kSim, device)); });
  m.def("allocated", [](int device) { return memory().allocated[device]; });
  m.def("peak", [](int device) { return memory().peak[device]; });
  m.def("set_limit", [](size_t bytes) { memory().limit = bytes; });
  m.def("register_pages", [](uintptr_t data, size_t size, int) {
    pinned_memory().add(reinterpret_cast<void*>(data), size, true);
    return 0;
  });
  py::module_::import("torch._C._distributed_c10d");
  py::class_<Work, c10d::Work, c10::intrusive_ptr<Work>>(m, "Work");
  py::class_<Group, c10d::Backend, c10::intrusive_ptr<Group>>(m, "Group")
      .def(py::init<int, int, c10::intrusive_ptr<c10d::Backend>>());
}
