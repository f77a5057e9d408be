// Functions of device.cpp for kernels.cpp.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

namespace pretended {

c10::Allocator* memory();
const at::Generator& generator();
bool is_pinned(const void* data);
void waits(const char* what);  // a call that synchronizes the host with the device

int exchange(int index);  // sets the current device, -1 for no change, and returns the previous one

struct On {  // sets a device within a scope
  explicit On(int index) : before(exchange(index)) {}
  ~On() { exchange(before); }
  int before;
};

}  // namespace pretended
