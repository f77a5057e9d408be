// What device.cpp has for kernels.cpp.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

namespace pretended {

c10::Allocator* memory();
const at::Generator& generator();
void waits(const char* what);  // a call that makes the host wait for the device

extern thread_local int current;

struct On {  // a device for a while
  explicit On(int index) : before(current) {
    if (index >= 0) current = index;
  }
  ~On() { current = before; }
  int before;
};

}  // namespace pretended
