// CPU kernels for tensors of a simulated device, after torch's checks that all tensors are on one device.
//
// Only for strided tensors.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <set>

#include "device.h"
#include "streams.h"

using namespace pretended;

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

void drop(void* context) { delete static_cast<c10::Storage*>(context); }

/// Returns a CPU tensor with the same memory.
at::Tensor host(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  TORCH_CHECK(t.layout() == c10::kStrided, "only strided tensors are pretended, got ", t.layout());
  c10::Storage storage(
      c10::Storage::use_byte_size_t{}, t.storage().nbytes(),
      c10::DataPtr(t.storage().mutable_data(), new c10::Storage(t.storage()), &drop, c10::Device(c10::kCPU)),
      c10::GetAllocator(c10::kCPU), true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                      t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}

at::Tensor there(const at::Tensor& t) {
  auto out = at::detail::empty_strided_generic(t.sizes(), t.strides(), memory(), kKeys, t.scalar_type());
  size_t n = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.dtype().itemsize());
  if (n && t.numel()) std::memcpy(out.mutable_data_ptr(), t.const_data_ptr(), n);
  return out;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

struct Below {  // below autograd and autocast
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard autocast{at::autocast_dispatch_keyset};
};

bool mixes(const std::string& name) {  // these accept CPU tensors together with device tensors
  return name.find("aten::index") == 0 || name.find("aten::_index_put") == 0 || name.find("aten::_unsafe_index") == 0 ||
         name.find("aten::copy") == 0 || name.find("aten::_to_copy") == 0;
}

bool strict(const std::string& name) { return name.find("aten::_fused_") == 0 || name.find("aten::_amp_") == 0; }

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  std::vector<std::pair<at::Tensor, at::Tensor>> made;
  int index = -1;
  auto check = [&](const at::Tensor& t) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      if (index < 0) index = t.device().index();
      TORCH_CHECK(index == t.device().index(),
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:", index,
                  " and ", t.device(), "! (", name, ")");
      return;
    }
    TORCH_CHECK(t.device().is_cpu() && (mixes(name) || (t.dim() == 0 && !strict(name))),
                "Expected all tensors to be on the same device, but found at least two devices, cuda and ", t.device(),
                "! (", name, ")");
  };
  auto take = [&](const at::Tensor& t, const c10::Argument& argument) {
    check(t);
    if (!t.defined() || !t.is_cuda()) return t;
    used(t, argument.alias_info() && argument.alias_info()->isWrite(), name.c_str());
    for (auto& pair : made)
      if (pair.first.is_same(t)) return pair.second;
    made.emplace_back(t, host(t));
    return made.back().second;
  };
  for (size_t i = 0; i < count; ++i) {
    c10::IValue& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i];
    if (value.isTensor()) {
      value = take(value.toTensor(), argument);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(take(t, argument));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : value.toOptionalTensorVector()) {
        if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) waits(name.c_str());
        list.push_back(t ? std::optional<at::Tensor>(take(*t, argument)) : t);
      }
      value = list;
    } else if (value.isDevice()) {
      if (value.toDevice().is_cuda()) {
        if (index < 0) index = value.toDevice().index();
        value = c10::Device(c10::kCPU);
      }
    } else if (value.isNone() && argument.type()->str().find("Generator") != std::string::npos) {
      value = generator();
    }
  }
  On device(index);
  static const std::set<std::string> waiting{
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
      "aten::unique_dim"};
  if (waiting.count(name)) waits(name.c_str());
  {
    Below guard;
    op.callBoxed(stack);
  }
  auto give = [&](const at::Tensor& t) {
    if (!t.defined() || t.is_cuda()) return t;
    for (auto& pair : made) {
      if (pair.second.is_same(t)) return pair.first;
      if (t.has_storage() && t.numel() && t.storage().data() == pair.second.storage().data())
        TORCH_CHECK(false, name, " returns a view, which is not pretended");
    }
    at::Tensor out = there(t);
    used(out, true, name.c_str());
    return out;
  };
  for (auto& pair : made) {
    if (pair.first.sizes() != pair.second.sizes() || pair.first.strides() != pair.second.strides())
      set_tensor(pair.first, there(pair.second));
  }
  const size_t results = schema.returns().size(), at0 = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    c10::IValue& value = (*stack)[at0 + i];
    if (value.isTensor()) {
      value = give(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(give(t));
      value = list;
    }
  }
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(device ? device->index() : -1);
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "only strided tensors are pretended");
  return at::detail::empty_generic(size, memory(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  On on(device ? device->index() : -1);
  return at::detail::empty_strided_generic(size, stride, memory(), kKeys, c10::dtype_or_default(dtype));
}

at::Tensor viewed(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                      self.key_set(), self.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return out;
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return viewed(self, size, stride, offset.value_or(self.storage_offset()));
}

at::Tensor like(const at::Tensor& self, const at::Tensor& meta) {  // with the geometry of the CPU's view
  return viewed(self, meta.sizes(), meta.strides(), meta.storage_offset());
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  Below guard;
  return like(self, host(self).view(size));
}
at::Tensor alias(const at::Tensor& self) { return viewed(self, self.sizes(), self.strides(), self.storage_offset()); }
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  Below guard;
  return like(self, host(self).unfold(dim, size, step));
}
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return viewed(self, size, stride, self.storage_offset());
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  Below guard;
  On on(self.device().index());
  at::Tensor alias = host(self).clone();
  alias.resize_(size, format);
  at::Tensor same = self;
  set_tensor(same, there(alias));
  return self;
}

at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.dtype().itemsize();
  return set_storage(self, std::move(source), 0, {count}, {1});
}
at::Tensor& set_nothing(at::Tensor& self) {
  at::Tensor fresh = at::detail::empty_generic({0}, memory(), kKeys, self.scalar_type(), std::nullopt);
  return set_tensor(self, fresh);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  Below guard;
  used(source, false, "copy_");
  used(self, true, "copy_");
  if (non_blocking && source.is_cuda() && self.is_cpu() && is_pinned(self.const_data_ptr())) {
    arrives_later(self, host(source));
    return self;
  }
  host(self).copy_(host(source));
  if (!non_blocking && self.device() != source.device() && self.numel()) waits("copy_");
  return self;
}

void record_stream(at::Tensor& self, at::Stream stream) { keep(self.storage().data_ptr(), stream.id()); }
bool pinned_tensor(const at::Tensor&, std::optional<at::Device>) { return false; }

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("alias", alias);
  m.impl("unfold", unfold);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("copy_", copy_);
  m.impl("record_stream", record_stream);
  m.impl("is_pinned", pinned_tensor);
  // Composite operators that call CUDA kernels without the dispatcher.
  for (const char* name : {"convolution", "convolution_backward", "native_group_norm", "mse_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
