// What device.cpp has for kernels.cpp.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

namespace pretended {

c10::Allocator* memory();
const at::Generator& generator();
bool is_pinned(const void* data);
void waits(const char* what);  // a call that makes the host wait for the device

int exchange(int index);  // takes another device as the current one, -1 the same, and returns the one before

struct On {  // a device for a while
  explicit On(int index) : before(exchange(index)) {}
  ~On() { exchange(before); }
  int before;
};

}  // namespace pretended
