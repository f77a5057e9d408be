// CUDA devices that use the host's memory: allocation, streams, and the device interface of torch.
//
// Operations run immediately; streams.cpp checks their synchronization. Allocations are counted in blocks of 512 bytes,
// as torch's caching allocator rounds them, without workspaces of libraries.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <atomic>
#include <mutex>
#include <set>

#include "device.h"
#include "streams.h"

namespace pretended {

thread_local int current = 0;

int count = std::getenv("PRETENDED_CUDA") ? std::atoi(std::getenv("PRETENDED_CUDA")) : 0;
int exchange(int index) {
  int before = current;
  if (index >= 0) current = index;
  return before;
}

c10::Device here(int index = -1) { return c10::Device(c10::DeviceType::CUDA, index < 0 ? current : index); }

// ---- memory

std::atomic<int64_t> allocated{0}, peak{0}, pool{0};
std::atomic<int> sync_mode{0};

void waits(const char* what) {
  if (sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
  TORCH_CHECK(sync_mode != 2, "called a synchronizing CUDA operation (", what, ")");
  host_waits_for(on_stream());
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  given_back(*block);
  allocated -= block->size;
  std::free(block->data);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, nullptr, here()};
    int64_t size = (n + 511) / 512 * 512;
    auto* block = new Block{std::aligned_alloc(512, size), size, on_stream()};
    std::memset(block->data, 0xAB, size);  // makes uninitialized memory visible
    int64_t now = allocated += size, top = peak;
    while (now > top && !peak.compare_exchange_weak(top, now)) {
    }
    int64_t held = pool;
    while (now > held && !pool.compare_exchange_weak(held, now)) {
    }
    return {block->data, block, &release, here()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
DeviceAllocator device_allocator;

c10::Allocator* memory() { return &device_allocator; }

std::mutex pinned_lock;
std::set<std::pair<uintptr_t, uintptr_t>> pinned;

void unpin(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.erase({(uintptr_t)block->data, (uintptr_t)block->data + block->size});
  }
  std::free(block->data);
  delete block;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    int64_t size = (std::max<size_t>(n, 1) + 511) / 512 * 512;
    auto* block = new Block{std::aligned_alloc(512, size), size, 0};
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert({(uintptr_t)block->data, (uintptr_t)block->data + size});
    return {block->data, block, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned.upper_bound({(uintptr_t)data, UINTPTR_MAX});
  if (after == pinned.begin()) return false;
  --after;
  return after->first <= (uintptr_t)data && (uintptr_t)data < after->second;
}

// ---- streams

std::atomic<int64_t> streams{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = here();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < count, "CUDA error: invalid device ordinal");
    exchange(d.index());
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override { exchange(d.index()); }
  c10::Stream getStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, here(d.index()), on_stream());
  }
  c10::Stream getDefaultStream(c10::Device d) const override {
    return c10::Stream(c10::Stream::DEFAULT, here(d.index()));
  }
  c10::Stream getNewStream(c10::Device d, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, here(d.index()), ++streams);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    on_stream(s.id());
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return count; }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex d, c10::EventFlag) const override {
    destroyEvent(*event, d);
    *event = pretended::record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override { wait(stream.id(), *of(event)); }
  bool queryEvent(void* event) const override { return synchronizeEvent(event), true; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete of(event); }
  bool queryStream(const c10::Stream& stream) const override { return host_waits_for(stream.id()), true; }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits_for(stream.id()); }
  void synchronizeEvent(void* event) const override { host_waits(*of(event)); }
  void synchronizeDevice(c10::DeviceIndex) const override { host_waits_for_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    keep(memory, stream.id());
  }
  static Clock* of(void* event) { return static_cast<Clock*>(event); }
};

const at::Generator& generator() {
  static at::Generator own = at::make_generator<at::CPUGeneratorImpl>(0);
  return own;
}

}  // namespace pretended

namespace at {
using namespace pretended;

struct PretendedHooks final : CUDAHooksInterface {
  explicit PretendedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return count; }
  DeviceIndex deviceCount() const override { return count; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { exchange(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return exchange(d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchange(d); }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return generator(); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void*) const override { return here(); }
  void deviceSynchronize(DeviceIndex) const override { host_waits_for_all(); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedHooks)
}  // namespace at

namespace pretended {

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
struct Registered {
  Registered() { c10::SetAllocator(c10::kCUDA, &device_allocator, 255); }
} registered;

}  // namespace pretended

namespace c10d {
struct PretendedTimer final : Timer {
  explicit PretendedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 1; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, PretendedTimer);
}  // namespace c10d

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretended;
  m.def("generator", [] { return generator(); });
  m.def("allocated", [] { return allocated.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reserved", [] { return pool.load(); });
  m.def("reset_peak", [] { peak = allocated.load(); });
  m.def("empty_cache", [] { pool = allocated.load(); });
  m.def("sync_mode", [] { return sync_mode.load(); });
  m.def("set_sync_mode", [](int mode) { sync_mode = mode; });
  m.def("count", [] { return count; });
  m.def("current_device", [] { return current; });
  m.def("exchange", [](int index) { return exchange(index); });
  m.def("on_stream", &on_stream);
  m.def("synchronize", [] { host_waits_for_all(); });
}
