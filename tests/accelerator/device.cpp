// A fake accelerator for the tests: it takes CUDA's place in a CPU build of torch.
//
// Memory and kernels are the CPU's, but tensors, dispatch, autograd, autocast and generators see
// devices `cuda:0`, `cuda:1`, … As with a GPU,
//
// - tensors of different devices don't meet in one operator, nor do generators of another device,
// - an allocation beyond a device's memory raises torch.OutOfMemoryError,
// - after an error inside a kernel, every further operator raises torch.AcceleratorError,
// - the content of a copy that doesn't block arrives once the host has waited for the device.
//
// Each place at which the host would wait for a GPU is reported to a function of device.py. Not
// simulated: speed, several streams, fragmentation, the numerics of CUDA's kernels.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace {

using namespace at;
using c10::IValue;

constexpr auto kFake = c10::DeviceType::CUDA;
constexpr auto kKey = c10::DispatchKey::CUDA;
constexpr int kMost = 8;

int device_count = 0;
bool broken = false;  // whether a kernel has failed, after which a GPU's context is of no use
thread_local DeviceIndex current = 0;

void refuse_if_broken() {
  if (broken)
    throw c10::AcceleratorError(
        {__func__, __FILE__, __LINE__}, 719, "CUDA error: unspecified launch failure");
}

// ---- memory -----------------------------------------------------------------------------------

struct Memory {
  std::atomic<int64_t> used{0}, peak{0};
  std::atomic<int64_t> limit{1LL << 40};
} memory[kMost];

// What a data pointer of a device owns: memory of the CPU.
struct Owned {
  c10::DataPtr cpu;
  int64_t bytes;
  int index;
};

void release(void* context) {
  auto* owned = static_cast<Owned*>(context);
  memory[owned->index].used -= owned->bytes;
  delete owned;
}

// Make memory of the CPU that of a device, if there is room.
c10::DataPtr on_device(c10::DataPtr cpu, int64_t bytes, int index) {
  Memory& own = memory[index];
  TORCH_CHECK_WITH(
      OutOfMemoryError, own.used + bytes <= own.limit, "CUDA out of memory. Tried to allocate ",
      bytes, " bytes. GPU ", index, " has a total capacity of ", own.limit.load(), " bytes of which ",
      own.limit - own.used, " bytes are free.");
  own.used += bytes;
  for (int64_t seen = own.peak; own.used > seen && !own.peak.compare_exchange_weak(seen, own.used);) {
  }
  void* pointer = cpu.get();
  return {pointer, new Owned{std::move(cpu), bytes, index}, &release, Device(kFake, index)};
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto cpu = c10::GetCPUAllocator()->allocate(bytes);
    if (bytes) std::memset(cpu.get(), 0xFF, bytes);  // NaN: a read before the first write shows
    return on_device(std::move(cpu), bytes, current);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
} device_memory;

// Pinned memory is the CPU's, but known as pinned, because only copies from and to it don't block.
std::mutex pinned_lock;
std::map<const char*, size_t> pinned;

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto* cpu = new c10::DataPtr(c10::GetCPUAllocator()->allocate(bytes));
    std::lock_guard<std::mutex> lock(pinned_lock);
    pinned[static_cast<const char*>(cpu->get())] = bytes;
    return {cpu->get(), cpu, &unpin, Device(kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void unpin(void* context) {
    auto* cpu = static_cast<c10::DataPtr*>(context);
    {
      std::lock_guard<std::mutex> lock(pinned_lock);
      pinned.erase(static_cast<const char*>(cpu->get()));
    }
    delete cpu;
  }
} pinned_memory;

bool is_pinned_pointer(const void* pointer) {
  auto* data = static_cast<const char*>(pointer);
  std::lock_guard<std::mutex> lock(pinned_lock);
  auto after = pinned.upper_bound(data);
  if (after == pinned.begin()) return false;
  auto [begin, bytes] = *std::prev(after);
  return data < begin + bytes;
}

// ---- waits and copies that don't block -----------------------------------------------------------

void (*on_wait)(const char*) = nullptr;  // called whenever the host waits for a device

// A copy to pinned memory that the device has yet to make.
struct Queued {
  int64_t number;
  DeviceIndex device;
  Tensor target, content;
};
std::mutex queue_lock;
std::deque<Queued> queue;
int64_t last_number = 0;

// Make a device's queued copies up to a number.
void carry_out(DeviceIndex device, int64_t number = INT64_MAX) {
  AutoDispatchBelowADInplaceOrView below;
  // Freed after the lock, because freeing a tensor may need Python's lock, and the thread that has
  // Python's lock may wait for this one in `record`.
  std::vector<Queued> made;
  std::lock_guard<std::mutex> lock(queue_lock);
  std::erase_if(queue, [&](const Queued& copy) {
    if (copy.device != device || copy.number > number) return false;
    copy.target.copy_(copy.content);
    made.push_back(copy);
    return true;
  });
}

void wait(const std::string& reason, DeviceIndex device) {
  refuse_if_broken();
  carry_out(device);
  if (on_wait != nullptr) on_wait(reason.c_str());
}

// Operators whose kernels for CUDA copy the size or the value of a result to the host.
const std::set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::bincount", "aten::equal", "aten::is_nonzero",
    "aten::masked_select", "aten::nonzero", "aten::repeat_interleave", "aten::unique_consecutive",
    "aten::unique_dim", "aten::_unique2"};

// ---- random numbers ------------------------------------------------------------------------------

// A generator of the CPU that says that it is the device's.
struct FakeGenerator final : c10::GeneratorImpl {
  explicit FakeGenerator(DeviceIndex index)
      : GeneratorImpl(Device(kFake, index), c10::DispatchKeySet(kKey)),
        cpu(at::detail::createCPUGenerator()) {}
  static c10::DeviceType device_type() { return kFake; }
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    auto* same = const_cast<c10::TensorImpl*>(&state);
    cpu.set_state(Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(same)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.get_state().getIntrusivePtr();
  }
  Generator cpu;

 private:
  FakeGenerator* clone_impl() const override {
    auto* copy = new FakeGenerator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

Generator& default_generator(DeviceIndex index) {
  static std::vector<Generator> all = [] {
    std::vector<Generator> made;
    for (int i = 0; i < kMost; ++i) made.push_back(at::make_generator<FakeGenerator>(i));
    return made;
  }();
  return all.at(index < 0 ? current : index);
}

// Gives the CPU's default generator the state of a device's. Dropout needs it, because its operator
// takes no generator. Otherwise, checkpointing that doesn't restore a device's state would pass.
class Lent {
 public:
  explicit Lent(Generator& own) : lock_(one()), cpu_(at::detail::getDefaultCPUGenerator()), own_(own) {
    before_ = cpu_.get_state();
    cpu_.set_state(own_.get_state());
  }
  ~Lent() {
    own_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
  }

 private:
  static std::recursive_mutex& one() {
    static std::recursive_mutex mutex;
    return mutex;
  }
  std::unique_lock<std::recursive_mutex> lock_;
  Generator cpu_;
  Generator& own_;
  Tensor before_;
};

// ---- the devices ---------------------------------------------------------------------------------

struct Recorded {  // an event: it has happened once these copies are made
  DeviceIndex device;
  int64_t number;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(Device device) {
    const DeviceIndex index = device.has_index() ? device.index() : current;
    return c10::Stream(c10::Stream::DEFAULT, Device(kFake, index));
  }
  c10::DeviceType type() const override { return kFake; }
  Device exchangeDevice(Device device) const override {
    Device before(kFake, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(kFake, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < device_count, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(Device device) const override { return stream(device); }
  c10::Stream getNewStream(Device device, int) const override { return stream(device); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream other) const override { return other; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  void record(void** event, const c10::Stream& stream, DeviceIndex, c10::EventFlag) const override {
    std::lock_guard<std::mutex> lock(queue_lock);
    destroyEvent(*event, 0);
    *event = new Recorded{stream.device_index(), last_number};
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return false; }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeEvent(void* event) const override {  // no wait of the device's whole queue
    auto* recorded = static_cast<Recorded*>(event);
    carry_out(recorded->device, recorded->number);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait("synchronize", stream.device_index());
  }
  void synchronizeDevice(DeviceIndex index) const override { wait("synchronize", index); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasCUDA() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(current, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : std::exchange(current, index);
  }
  void deviceSynchronize(DeviceIndex index) const override { wait("synchronize", index); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<FakeGenerator>(index < 0 ? current : index);
  }
  Device getDeviceFromPtr(void*) const override { return Device(kFake, current); }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return is_pinned_pointer(data); }
};

// ---- operators -----------------------------------------------------------------------------------

bool is_fake(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kFake; }

// A tensor of another device with the same memory.
Tensor tensor_of(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

// Keeps a storage of the CPU alive as long as its memory is a device's.
c10::DataPtr owner_of(const c10::Storage& storage) {
  auto* kept = new c10::Storage(storage);
  auto forget = [](void* context) { delete static_cast<c10::Storage*>(context); };
  return {kept->mutable_data(), kept, forget, Device(kCPU)};
}

// The tensors of one call of an operator: their aliases on the CPU, and the way back.
class Call {
 public:
  explicit Call(const std::string& name) : name_(name) {}

  // Return the alias of an argument. `written` is whether the operator changes it, and `is_index`
  // whether it is one of the tensors in x[…], which may be on the CPU.
  Tensor to_cpu(const Tensor& tensor, bool written, bool is_index) {
    if (!tensor.defined()) return tensor;
    if (!is_fake(tensor)) {
      // Numbers may come from the CPU, as a kernel's arguments, but results can't go there.
      const bool is_number = tensor.device().is_cpu() && tensor.dim() == 0 && !written;
      if (tensor.device().is_cpu() && is_index) {
        cpu_index_ = true;
      } else if (!is_number) {
        others_.push_back(tensor.device());
      }
      return tensor;
    }
    const DeviceIndex index = tensor.device().index();
    if (index_ < 0) index_ = index;
    if (index != index_) others_.push_back(tensor.device());
    for (auto& pair : pairs_)
      if (pair.device.is_same(tensor)) return pair.cpu;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      auto* data = const_cast<void*>(tensor.storage().data());
      c10::Storage alias(
          c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
          c10::DataPtr(data, Device(kCPU)), c10::GetCPUAllocator(), /*resizable=*/true);
      found = storages_.emplace(storage, std::make_pair(tensor.storage(), alias)).first;
    }
    Tensor alias = tensor_of(found->second.second, tensor, c10::DispatchKey::CPU);
    pairs_.push_back({tensor, alias});
    return alias;
  }

  void use_device(Device device) { index_ = device.has_index() ? device.index() : current; }
  DeviceIndex index() const { return index_ < 0 ? current : index_; }

  void check() const {
    TORCH_CHECK(
        others_.empty() || index_ < 0,
        "Expected all tensors to be on the same device, but found at least two devices, ",
        Device(kFake, index_), " and ", others_[0], "! (", name_, ")");
    if (cpu_index_ && index_ >= 0) wait(name_ + " with an index on the CPU", index_);
  }

  // Give arguments the shapes and storages that the kernel has given their aliases.
  void write_back() {
    for (auto& [impl, both] : storages_) {
      auto& [device, cpu] = both;
      if (cpu.data() == device.data() && cpu.nbytes() == device.nbytes()) continue;
      const int64_t bytes = cpu.nbytes();
      impl->set_data_ptr_noswap(on_device(owner_of(cpu), bytes, device.device().index()));
      impl->set_nbytes(bytes);
    }
    for (auto& pair : pairs_)
      pair.device.unsafeGetTensorImpl()->set_sizes_and_strides(
          pair.cpu.sizes(), pair.cpu.strides(), pair.cpu.storage_offset());
  }

  // Return a result: an argument, a view of one, or a new tensor of the device.
  Tensor to_device(const Tensor& cpu) {
    if (!cpu.defined() || !cpu.device().is_cpu()) return cpu;
    for (auto& pair : pairs_)
      if (pair.cpu.is_same(cpu)) return pair.device;
    auto* storage = cpu.storage().unsafeGetStorageImpl();
    for (auto& [impl, both] : storages_)
      if (both.second.unsafeGetStorageImpl() == storage) return tensor_of(both.first, cpu, kKey);
    auto found = made_.find(storage);
    if (found == made_.end()) {
      const int64_t bytes = cpu.storage().nbytes();
      c10::Storage made(
          c10::Storage::use_byte_size_t(), bytes, on_device(owner_of(cpu.storage()), bytes, index()),
          &device_memory, /*resizable=*/true);
      found = made_.emplace(storage, made).first;
    }
    return tensor_of(found->second, cpu, kKey);
  }

 private:
  struct Pair {
    Tensor device, cpu;
  };
  std::string name_;
  DeviceIndex index_ = -1;
  bool cpu_index_ = false;
  std::vector<Device> others_;
  std::vector<Pair> pairs_;
  std::map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages_;
  std::map<c10::StorageImpl*, c10::Storage> made_;
};

// Apply a function of (tensor, whether it is an index) to all tensors in a value.
IValue with_tensors(const IValue& value, const std::function<Tensor(const Tensor&, bool)>& change) {
  if (value.isTensor()) return change(value.toTensor(), false);
  if (value.isTensorList()) {
    c10::List<Tensor> result;
    for (const Tensor& each : value.toTensorVector()) result.push_back(change(each, false));
    return result;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> result;
    for (const std::optional<Tensor>& each : value.toOptionalTensorVector())
      result.push_back(each ? std::make_optional(change(*each, true)) : each);
    return result;
  }
  return value;
}

// Every operator without a kernel below: run the CPU's kernel on aliases of the tensors.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  refuse_if_broken();
  AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  Call call(schema.name());
  bool has_mask = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& value = (*stack)[first + i];
    const auto* alias = arguments[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    if (value.isDevice() && value.toDevice().type() == kFake) {
      call.use_device(value.toDevice());
      value = Device(kCPU);
      continue;
    }
    value = with_tensors(value, [&](const Tensor& each, bool is_index) {
      has_mask |= is_index && (each.scalar_type() == kBool || each.scalar_type() == kByte);
      return call.to_cpu(each, written, is_index);
    });
  }
  call.check();
  bool needs_default = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* type = arguments[i].real_type()->cast<c10::OptionalType>().get();
    if (type == nullptr || type->getElementType()->kind() != c10::TypeKind::GeneratorType) continue;
    IValue& value = (*stack)[first + i];
    Generator own = value.isNone() ? default_generator(call.index()) : value.toGenerator();
    TORCH_CHECK(
        own.device().type() == kFake, "Expected a 'cuda' device type for generator but found '",
        own.device().type(), "'");
    value = static_cast<FakeGenerator*>(own.unsafeGetGeneratorImpl())->cpu;
    needs_default = false;
  }
  // A mask as an index selects an unknown number of elements.
  if (has_mask || kWaiting.count(schema.name())) wait(schema.name(), call.index());
  {
    std::optional<Lent> lent;
    if (needs_default) lent.emplace(default_generator(call.index()));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    auto back = [&](const Tensor& each, bool) { return call.to_device(each); };
    (*stack)[i] = with_tensors((*stack)[i], back);
  }
}

// New tensors have no tensor argument that would lead to `fallback`.
Tensor empty(
    IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  refuse_if_broken();
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &device_memory, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
    std::optional<Device> device, std::optional<bool>) {
  refuse_if_broken();
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

// The only operator that may connect two devices.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  refuse_if_broken();
  AutoDispatchBelowADInplaceOrView below;
  Call to("copy_"), from("copy_");
  Tensor target = is_fake(self) ? to.to_cpu(self, true, false) : self;
  Tensor content = is_fake(source) ? from.to_cpu(source, false, false) : source;
  const bool is_empty = source.numel() == 0;
  if (!is_fake(self) && !is_empty) {
    const DeviceIndex device = source.device().index();
    if (non_blocking && self.is_pinned()) {
      // Queue the copy. Until the host waits for it, the target has no useful content.
      content = content.to(self.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
      std::lock_guard<std::mutex> lock(queue_lock);
      queue.push_back({++last_number, device, self, content});
      if (self.is_floating_point()) self.fill_(NAN);
      return self;
    }
    wait("copy to the CPU", device);
  }
  if (!is_fake(source) && !is_empty && !(non_blocking && source.is_pinned()))
    wait("copy from the CPU", self.device().index());
  target.copy_(content);
  return self;
}

// Copying a module (copy.deepcopy) gives new tensors the copied storages.
Tensor& set_storage(
    Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
}

// ---- for device.py -------------------------------------------------------------------------------

void install() {
  c10::SetAllocator(kFake, &device_memory, 1);
  // Importing torch has made hooks that say there is no CUDA, and keeps them. They have no data, so
  // that ours can take their place in memory.
  static_assert(sizeof(Hooks) == sizeof(CUDAHooksInterface));
  new (const_cast<CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
}

Tensor rng_state(int64_t index) { return Tensor(default_generator(index).get_state()); }
void set_rng_state(int64_t index, const Tensor& state) { default_generator(index).set_state(state); }

TORCH_LIBRARY(fake_device, m) {
  m.def("install", install);
  m.def("device_count", [] { return int64_t(device_count); });
  m.def("set_device_count", [](int64_t count) { device_count = count; });
  m.def("current_device", [] { return int64_t(current); });
  m.def("exchange_device", [](int64_t index) { return int64_t(std::exchange(current, index)); });
  m.def("used", [](int64_t index) { return memory[index].used.load(); });
  m.def("peak", [](int64_t index) { return memory[index].peak.load(); });
  m.def("reset_peak", [](int64_t index) { memory[index].peak = memory[index].used.load(); });
  m.def("limit", [](int64_t index) { return memory[index].limit.load(); });
  m.def("set_limit", [](int64_t index, int64_t bytes) { memory[index].limit = bytes; });
  m.def("set_broken", [](bool value) { broken = value; });
  m.def("seed", [](int64_t index, int64_t seed) { default_generator(index).set_current_seed(seed); });
  m.def("rng_state", rng_state);
  m.def("set_rng_state", set_rng_state);
}

}  // namespace

extern "C" void fake_device_on_wait(void (*function)(const char*)) { on_wait = function; }
